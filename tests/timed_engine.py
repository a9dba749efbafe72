"""The real engine over a device that is a clock: steps take what a file beside the base says.

Scheduler, blocks, prefix cache, loop, cost fit and frames are the engine's own; a step ends after
fixed + token * prompt tokens + sequence * decoding sequences, adapters wait for seconds instead of
bytes. What it does is independent of how fast this machine computes: measurements of routing run
against it, and the simulator predicts them. Every token is the same letter.
"""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Engine
from engine.kv_layout import kv_layout
from engine.service import AsyncEngine
from engine.types import Resident, Sample, ScheduledBatch
from tests.fakes_registry import EOS_ID

TIMES = "times.json"  # in the base's folder
TOKEN = 64  # "a" of `fakes_registry.write_text_files`


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, and how many adapters each tier holds."""

    fixed_s: float
    token_s: float
    sequence_s: float
    copy_s: float  # of an adapter to the device
    read_s: float  # of one from the disk
    on_device: int
    on_host: int
    num_blocks: int
    runs_ahead: bool = True

    def write(self, base_folder: Path) -> None:
        (base_folder / TIMES).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, base_folder: Path) -> Times:
        return cls(**json.loads((base_folder / TIMES).read_text()))


@dataclass(frozen=True, slots=True)
class TimedModel:
    vocab_size: int = EOS_ID + 1
    eos_token_ids: tuple[int, ...] = (EOS_ID,)


@dataclass(slots=True)
class TimedPool:
    """Two least-recently-used tiers; copies to the device go one after the other."""

    times: Times
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _device: OrderedDict[str, float] = field(default_factory=OrderedDict)  # digest -> usable from
    _host: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _references: Counter[str] = field(default_factory=Counter)
    _protected: frozenset[str] = frozenset()
    _pinned: set[str] = field(default_factory=set)
    _copies_end_s: float = 0.0
    _landed_s: float = 0.0  # what ended until then can be acquired
    num_copied_to_device: int = 0
    reserved_bytes: int = 0
    page_bytes: int = 0
    device_bytes_used: int = 0
    host_bytes_used: int = 0

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def copy_s(self) -> float:
        return self.times.copy_s if self.num_copied_to_device else 0.0

    def has(self, digest: str) -> bool:
        return digest in self._host

    def land_copies(self) -> None:
        self._landed_s = self.clock()

    def obstacle(self, key: str) -> str | None:
        return None

    def invocation(self, key: str) -> tuple[int, ...]:
        return ()

    def acquire(self, digest: str) -> bool:
        self._host.move_to_end(digest)
        if self._device.get(digest, float("inf")) > self._landed_s:
            self.prefetch((digest,))
            return False
        self._device.move_to_end(digest)
        self._references[digest] += 1
        return True

    def release(self, digest: str) -> None:
        self._references[digest] -= 1

    def prefetch(self, digests: Iterable[str]) -> None:
        now_s = self.clock()
        for digest in digests:
            if digest in self._device or not self._has_device_room(now_s):
                continue
            self._copies_end_s = max(now_s, self._copies_end_s) + self.times.copy_s
            self._device[digest] = self._copies_end_s
            self.num_copied_to_device += 1

    def has_pending_copies(self) -> bool:
        return self._copies_end_s > self._landed_s

    def wait_pending(self) -> None:
        now_s = self.clock()
        coming = [ready_s for ready_s in self._device.values() if ready_s > now_s]
        if coming:
            self.sleep(min(coming) - now_s)

    def insert(self, digest: str) -> None:
        for old in list(self._host):
            if len(self._host) < self.times.on_host:
                break
            if not self._references[old] and old not in self._protected:
                del self._host[old]
                self._device.pop(old, None)
        self._host[digest] = None

    def remove(self, digest: str) -> bool:
        if self._references[digest]:
            return False
        self._host.pop(digest, None)
        self._device.pop(digest, None)
        return True

    def protect(self, digests: Iterable[str]) -> None:
        self._protected = frozenset(digests)

    def pin(self, digest: str) -> None:
        self._pinned.add(digest)

    def unpin(self, digest: str) -> None:
        self._pinned.discard(digest)

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def on_device(self) -> tuple[str, ...]:
        now_s = self.clock()
        return tuple(digest for digest, ready_s in self._device.items() if ready_s <= now_s)

    def on_host(self) -> tuple[str, ...]:
        return tuple(self._host)

    def residents(self) -> tuple[Resident, ...]:
        held = set(self.on_device())
        return tuple(
            Resident(one, one in held, 1, 1, self._references[one], one in self._pinned, False, 0.0)
            for one in self._host
        )

    def _has_device_room(self, now_s: float) -> bool:
        if len(self._device) < self.times.on_device:
            return True
        for digest, ready_s in self._device.items():
            if not self._references[digest] and ready_s <= now_s:
                del self._device[digest]
                return True
        return False


@dataclass(frozen=True, slots=True)
class TimedStep:
    samples: tuple[Sample, ...]
    due_s: float

    def draw(self) -> None: ...

    def collect(self) -> tuple[Sample, ...]:
        time.sleep(max(0.0, self.due_s - time.monotonic()))
        return self.samples


class TimedRunner:
    def __init__(self, times: Times, block_size: int) -> None:
        self.times = times
        self.num_blocks = times.num_blocks
        self.kv_layout = kv_layout((None,), block_size, 4096)
        self.runs_ahead = times.runs_ahead
        self.max_model_len = 4096
        self.num_late_compilations = 0
        self.kv_copies = None
        self.model_config = TimedModel()
        self.adapters = TimedPool(times)
        self._due_s = 0.0

    def launch(self, batch: ScheduledBatch) -> TimedStep:
        prompts = [item for item in batch.sequences if item.start < item.sequence.num_prompt_tokens]
        num_tokens = sum(item.end - item.start for item in prompts)
        num_decoding = len(batch.sequences) - len(prompts)
        times = self.times
        seconds = times.fixed_s + times.token_s * num_tokens + times.sequence_s * num_decoding
        self._due_s = max(self._due_s, time.monotonic()) + seconds
        samples = tuple(Sample(TOKEN if item.samples else None) for item in batch.sequences)
        return TimedStep(samples, self._due_s)

    def is_out_of_memory(self, error: Exception) -> bool:
        return False

    def free_cache(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TimedReader:
    runner: TimedRunner

    def read(self, digest: str, path: str) -> Callable[[], None]:
        time.sleep(self.runner.times.read_s)
        return lambda: self.runner.adapters.insert(digest)


def open_timed_engine(config: EngineConfig) -> AsyncEngine:
    """An EngineFactory."""
    runner = TimedRunner(Times.read(Path(config.model_path)), config.block_size)
    return AsyncEngine(Engine(config, runner), TimedReader(runner))
