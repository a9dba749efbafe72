"""The promises of `soak`: what must be true when the load is over, judged from what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import EngineLoad, Resident

_MINUTE_S = 60.0
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class MemorySample:
    at_s: float  # from the start of the load
    device_bytes: int  # in use on the device; on a CPU, of the process
    process_bytes: int


@dataclass(frozen=True, slots=True)
class Evidence:
    errors: tuple[str, ...]  # of clients: failed, stuck or incomplete requests
    load: EngineLoad  # when the engine was idle again
    residents: tuple[Resident, ...]
    changed_probes: int
    num_probes: int
    samples: tuple[MemorySample, ...]
    window_s: float  # of the first and the last samples
    slack_bytes: int

    def growth(self) -> tuple[int, int]:
        """Returns by how many bytes the highest sample of the last window exceeds that of the
        first, on the device and of the process."""
        first, last = self._windows()
        device = max(s.device_bytes for s in last) - max(s.device_bytes for s in first)
        process = max(s.process_bytes for s in last) - max(s.process_bytes for s in first)
        return device, process

    def memory_fields(self) -> dict[str, object]:
        first, last = self._windows()
        device, process = self.growth()
        return {
            "window_s": self.window_s,
            "device_first_mib": round(max(s.device_bytes for s in first) / _MIB, 1),
            "device_last_mib": round(max(s.device_bytes for s in last) / _MIB, 1),
            "device_growth_mib": round(device / _MIB, 1),
            "process_growth_mib": round(process / _MIB, 1),
        }

    def _windows(self) -> tuple[Sequence[MemorySample], Sequence[MemorySample]]:
        end_s = self.samples[-1].at_s
        first = [s for s in self.samples if s.at_s <= self.window_s]
        last = [s for s in self.samples if s.at_s >= end_s - self.window_s]
        return first or self.samples[:1], last


def window_of(seconds: float) -> float:
    """Returns the length of the first and the last window: a minute, or a quarter of a short
    run."""
    return min(_MINUTE_S, seconds / 4)


def broken_promises(seen: Evidence) -> list[str]:
    """Returns a sentence for each promise that was not kept."""
    broken = []
    if seen.errors:
        broken.append(f"{len(seen.errors)} requests failed: {seen.errors[0]}")
    load = seen.load
    if load.num_running or load.num_waiting:
        broken.append(f"{load.num_running} sequences run and {load.num_waiting} wait")
    if load.num_free_blocks != load.num_blocks:
        broken.append(f"{load.num_blocks - load.num_free_blocks} KV blocks are held")
    held = [one.digest for one in seen.residents if one.num_references]
    if held:
        broken.append(f"{len(held)} adapters are referenced: {held[0]}")
    if load.num_missed_wakeups:
        broken.append(f"the engine slept beside its work {load.num_missed_wakeups} times")
    if seen.changed_probes:
        broken.append(f"{seen.changed_probes} of {seen.num_probes} answers have changed")
    growth, _ = seen.growth()
    if growth > seen.slack_bytes:
        broken.append(f"the memory has grown by {growth / _MIB:.1f} MiB")
    return broken
