"""What one ingress knows of the engine replicas of one base, a step old, and what it sent since.

Fed by the side stream; a request placed counts at once, until a frame says that the engine has it
and its own numbers hold it. Plain values: routers, queues, the autoscaler's tests and the simulator
all read this. Ignorant of Ray and HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.admission import EngineLimits
from engine.types import EngineLoad

_MAX_PLACED_S = 30.0  # a request that its engine never took over, and whose call told nothing


@dataclass(frozen=True, slots=True)
class Ask:
    """A submit call as a router sees it."""

    call_id: str
    num_tokens: int  # of all its prompts, and of the tokens that a resumed choice recomputes
    num_sequences: int = 1
    adapter: str | None = None  # content digest
    adapter_rank: int = 0
    prefixes: tuple[int, ...] = ()  # `engine.prefix_digests` of its first prompt
    session: str | None = None  # requests of one session like to meet the same replica
    avoid: frozenset[str] = frozenset()  # replicas that it left or that died under it
    only: str | None = None  # this replica and no other: a warm-up


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """What an adapter takes from each tier until it can be used, measured by the engine replica;
    0: not yet measured."""

    host: float = 0.0
    disk: float = 0.0
    registry: float = 0.0


@dataclass(slots=True)
class _Placed:
    num_tokens: int
    num_sequences: int
    adapter: str | None
    at_s: float


@dataclass(slots=True, eq=False)
class ReplicaView:
    """One engine replica. Replaced values, never changed ones: may be read from any thread."""

    replica_id: str
    limits: EngineLimits
    load: EngineLoad = field(default_factory=EngineLoad)
    load_s: LoadSeconds = LoadSeconds()
    is_draining: bool = False
    updated_s: float = 0.0  # when the newest frame came, on the reader's monotonic clock
    on_device: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()
    prefixes: set[int] = field(default_factory=set)
    _placed: dict[str, _Placed] = field(default_factory=dict)

    @property
    def queued_tokens(self) -> int:
        """Still to prefill there, those that are on their way included."""
        return self.load.queued_tokens + sum(one.num_tokens for one in self._placed_now())

    @property
    def num_sequences(self) -> int:
        """Running or waiting there, or on their way."""
        placed = sum(one.num_sequences for one in self._placed_now())
        return self.load.num_running + self.load.num_waiting + placed

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    @property
    def kv_usage(self) -> float:
        load = self.load
        return 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0

    def is_loading(self, adapter: str) -> bool:
        """A request on its way brings it there already."""
        return any(one.adapter == adapter for one in self._placed_now())

    def num_cached_tokens(self, prefixes: Sequence[int]) -> int:
        """Of a prompt, those that the prefix cache there holds."""
        count = 0
        for digest in prefixes:
            if digest not in self.prefixes:
                break
            count += 1
        return count * self.limits.prefix_chunk

    def place(self, ask: Ask, now_s: float) -> None:
        uncached = max(0, ask.num_tokens - self.num_cached_tokens(ask.prefixes))
        self._placed[ask.call_id] = _Placed(uncached, ask.num_sequences, ask.adapter, now_s)
        self._drop_old(now_s)

    def unplace(self, call_id: str) -> None:
        """The engine has it, or never will."""
        self._placed.pop(call_id, None)

    def observe(self, load: EngineLoad, now_s: float) -> None:
        """A frame. The sets of adapters are made anew only when they changed."""
        if load.adapters_on_device != self.load.adapters_on_device:
            self.on_device = frozenset(load.adapters_on_device)
        if load.adapters_on_host != self.load.adapters_on_host:
            self.on_host = frozenset(load.adapters_on_host)
        self.load = load
        self.updated_s = now_s

    def change_prefixes(
        self, cached: Iterable[int], evicted: Iterable[int], *, is_whole: bool = False
    ) -> None:
        if is_whole:
            self.prefixes = set(cached)
            return
        self.prefixes.update(cached)
        self.prefixes.difference_update(evicted)

    def _placed_now(self) -> tuple[_Placed, ...]:
        return tuple(self._placed.values())  # one bytecode: safe beside `place` in another thread

    def _drop_old(self, now_s: float) -> None:
        for call_id, one in tuple(self._placed.items()):
            if now_s - one.at_s > _MAX_PLACED_S:
                self._placed.pop(call_id, None)


class ReplicaViews:
    """The engine replicas of one base application, as one ingress process sees them. The side
    stream writes in the ingress's event loop, Serve's router reads in its own thread."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._replicas: dict[str, ReplicaView] = {}

    @property
    def replicas(self) -> tuple[ReplicaView, ...]:
        return tuple(self._replicas.values())

    def get(self, replica_id: str) -> ReplicaView | None:
        return self._replicas.get(replica_id)

    def keep(self, replica_ids: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Which replicas there are now; (came, went)."""
        wanted = frozenset(replica_ids)
        with self._lock:
            known = frozenset(self._replicas)
            for replica_id in wanted - known:
                self._replicas[replica_id] = ReplicaView(replica_id, self.limits)
            for replica_id in known - wanted:
                del self._replicas[replica_id]
        return wanted - known, known - wanted
