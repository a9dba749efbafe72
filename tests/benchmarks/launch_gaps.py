"""The host's time from the tokens of a step to the launch of the next one, where the device waits.

Counted are the steps with drafts that replay a graph: they are planned once the tokens before them
are known. The time includes the drafter's, and ends where the host hands the graph to the device.
"""

from __future__ import annotations

import time
from typing import Any

from engine.device_step import DeviceSteps
from engine.types import ScheduledBatch


class LaunchGaps:
    def __init__(self, steps: DeviceSteps) -> None:
        self._seconds: list[float] = []
        self._arrived_s: float | None = None  # None: a step was launched since
        self._has_drafts = False  # the step that was written last
        self._wait, self._write, self._replay = steps.wait, steps._write, steps._graphs.replay
        for owner, name in ((steps, "wait"), (steps, "_write"), (steps._graphs, "replay")):
            setattr(owner, name, getattr(self, f"on_{name.strip('_')}"))

    def take(self) -> list[float]:
        """Returns the seconds of each step since the last call."""
        seconds, self._seconds = self._seconds, []
        return seconds

    def on_wait(self, *args: Any) -> None:
        self._wait(*args)
        self._arrived_s = time.perf_counter()

    def on_write(self, batch: ScheduledBatch) -> Any:
        self._has_drafts = batch.num_draft_tokens > 0
        return self._write(batch)

    def on_replay(self, *args: Any) -> Any:
        if self._arrived_s is not None and self._has_drafts:
            self._seconds.append(time.perf_counter() - self._arrived_s)
        self._arrived_s = None
        return self._replay(*args)
