"""Work that must not disturb: in a thread of lower priority, which ends with it.

What a starting engine does first (imports of torch and MLflow, 2.4 s of a core each, reading and
checking weights) competes with the steps of an engine beside it where cores are few. Linux keeps
priority by thread, threads inherit it, and nobody but root could raise it again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_STEPS_BACK = 10  # a tenth of the share of those who work; Linux ends at 19


async def in_background(work: Callable[[], T]) -> T:
    thread = ThreadPoolExecutor(1, "background", initializer=_yield_to_others)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)


def _yield_to_others() -> None:
    thread = threading.get_native_id()
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, thread) + _STEPS_BACK)
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
