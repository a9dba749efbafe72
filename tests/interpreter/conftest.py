"""Collected only by tests/test_interpreter.py, whose process has the interpreter on.

Triton's interpreter replaces the functions of `triton.language` when a kernel is launched, and
again, by the same ones, at every call of a device function. A launch makes about 60 such calls, of
0.4 ms each; here it replaces them once.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kernels.backend import IS_INTERPRETED, allow_triton

collect_ignore_glob = [] if IS_INTERPRETED else ["*"]


@pytest.fixture(scope="module", autouse=True)
def allowed_triton() -> None:
    """Lets each file begin as in a process of its own: a runner of the reference sets the choice
    for the whole process, and kernels' tests would compare the reference with itself."""
    allow_triton(True)


def _replace_once_a_launch() -> None:
    """Keeps the interpreter from replacing what the launch under way has replaced already."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    replaced: set[int] = set()  # empty between launches

    @functools.cache
    def languages(fn: Any) -> frozenset[int]:
        """Returns the ids of the modules whose functions are replaced for `fn`."""
        named = {id(value) for value in fn.__globals__.values()}
        return frozenset(named & {id(tl), id(tl.core)})

    def replace_once(fn: Any) -> Any:
        if languages(fn) and languages(fn) <= replaced:
            return interpreter._LangPatchScope()
        is_launch = not replaced
        scope = replace(fn)
        replaced.update(languages(fn))
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                replaced.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = replace_once


if IS_INTERPRETED:
    _replace_once_a_launch()
