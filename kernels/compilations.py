"""The kernels of this process: loaded onto the device before traffic, counted if traffic compiles
one.

Triton is imported only where it runs: a machine without it has nothing to load or to count.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from kernels.kernel_call import KernelCall

logger = logging.getLogger(__name__)

_num_late = 0


def load_kernels(calls: Collection[KernelCall]) -> None:
    """Reads the kernels from the cache, or compiles them, and loads each onto the current device:
    otherwise its first launch would, for milliseconds."""
    if not calls:
        return
    from kernels.kernel_compiler import compile_call

    for call in calls:
        try:
            compile_call(call)._init_handles()
        except Exception as error:  # only a step that needs it has to fail
            logger.warning("the kernel %s.%s cannot be loaded: %s", call.module, call.name, error)


def watch_compilations() -> None:
    """Counts and logs from now on every kernel that Triton compiles or reads from the cache."""
    import triton

    triton.knobs.compilation.listener = _note


def num_late_compilations() -> int:
    """Returns the number since `watch_compilations`, of this process, which runs one engine."""
    return _num_late


def _note(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
    global _num_late
    _num_late += 1
    logger.warning(
        "the kernel %s was %s while requests waited: it is missing among the kernels of "
        "engine/kernel_trace.py",
        src.name,
        "read from the cache" if cache_hit else "compiled",
    )
