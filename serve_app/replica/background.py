"""Work at a lower priority, in a thread of its own that ends with it.

A starting engine imports torch and MLflow (2.4 s of a core each), then reads and checks weights.
With few cores, that competes with the steps of an engine on the same node. On Linux each thread has
a priority, new threads inherit it, and only root could raise it again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_NICENESS = 10  # added; a tenth of the normal share of a core; Linux allows at most 19


async def in_background(work: Callable[[], T]) -> T:
    thread = ThreadPoolExecutor(1, "background", initializer=_lower_priority)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)


def _lower_priority() -> None:
    thread = threading.get_native_id()
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
