"""What one ingress knows of the engine replicas of one base, a step old, and what it sent since.

Fed by the side stream; a request placed counts at once, until a frame says that the engine has it
and its own numbers hold it. Plain values: routers, queues, the autoscaler's tests and the simulator
all read this. Ignorant of Ray and HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.admission import EngineLimits
from engine.types import EngineLoad
from serve_app.messages import RoutingRequest

_MAX_PLACED_S = 30.0  # a request that its engine never took over, and whose call told nothing
_USUAL_OUTPUT_TOKENS = 128.0  # of a sequence, until some have ended
_OUTPUT_WEIGHT = 0.05  # of a newly ended one in the mean
_LOAD_WEIGHT = 0.2  # of a replica's new measurement in what is usual
_WAY_STEP, _LEAST_WAY_S = 0.05, 0.001  # by so much a first token moves the usual way


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """What an adapter takes from each tier until it can be used, measured by the engine replica;
    0: not yet measured."""

    host: float = 0.0
    disk: float = 0.0
    registry: float = 0.0


@dataclass(slots=True)
class BaseEstimates:
    """What the replicas of one base have in common, learned from all of them: who has measured
    nothing yet is no worse than the others, and a file is fetched no faster where one happened to
    be. 0: not known."""

    load_s: LoadSeconds = LoadSeconds()
    step_fixed_s: float = 0.0
    step_token_s: float = 0.0
    step_sequence_s: float = 0.0
    way_s: float = 0.0  # see `score`: about the median, so that a few that took long move it little

    def learn_way(self, beyond_s: float) -> None:
        """What a first token took, from the choice of its replica, beyond what was expected."""
        step_s = _WAY_STEP * max(self.way_s, _LEAST_WAY_S)
        self.way_s = max(0.0, self.way_s + (step_s if beyond_s > self.way_s else -step_s))

    def learn_load(self, told: LoadSeconds) -> None:
        """A replica measured anew."""
        known = self.load_s
        self.load_s = LoadSeconds(
            _mixed(known.host, told.host),
            _mixed(known.disk, told.disk),
            _mixed(known.registry, told.registry),
        )

    def learn_steps(self, load: EngineLoad) -> None:
        if load.step_fixed_s or load.step_token_s:
            self.step_fixed_s = load.step_fixed_s
            self.step_token_s = load.step_token_s
            self.step_sequence_s = load.step_sequence_s


@dataclass(frozen=True, slots=True)
class _Placed:
    num_tokens: int
    num_sequences: int
    adapter: str | None
    at_s: float


@dataclass(slots=True, eq=False)
class ReplicaView:
    """One engine replica. May be read from any thread: values are replaced, not changed, but for
    the set of prefixes, of which only single members are asked for."""

    replica_id: str
    limits: EngineLimits
    load: EngineLoad = field(default_factory=EngineLoad)
    load_s: LoadSeconds = LoadSeconds()
    is_draining: bool = False
    # Its frames come, and its step ends in time; else the rest is old or not known yet.
    is_connected: bool = False
    updated_s: float = 0.0  # when the newest frame came, on the reader's monotonic clock
    on_device: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()
    prefixes: set[int] = field(default_factory=set)
    usual: BaseEstimates = field(default_factory=BaseEstimates)  # shared by all of a base
    output_tokens: float = _USUAL_OUTPUT_TOKENS  # of a sequence, the mean over those that ended
    placed_tokens: int = 0  # on their way there
    placed_sequences: int = 0
    _placed: dict[str, _Placed] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def queued_tokens(self) -> int:
        """Still to prefill there, those that are on their way included."""
        return self.load.queued_tokens + self.placed_tokens

    @property
    def num_sequences(self) -> int:
        """Running or waiting there, or on their way."""
        return self.load.num_running + self.load.num_waiting + self.placed_sequences

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    @property
    def kv_usage(self) -> float:
        return self.load.kv_usage

    @property
    def free_kv_tokens(self) -> int:
        """What can be had without that a running sequence ends."""
        return round((1 - self.kv_usage) * self.limits.max_kv_tokens)

    def has_adapter(self, adapter: str | None) -> bool:
        """In memory, so that nothing is to be waited for but milliseconds."""
        return adapter is None or adapter in self.on_device or adapter in self.on_host

    def is_loading(self, adapter: str) -> bool:
        """A request on its way brings it there already."""
        placed = tuple(self._placed.values())  # one bytecode: safe beside `place`
        return any(one.adapter == adapter for one in placed)

    def num_cached_tokens(self, prefixes: Sequence[int]) -> int:
        """Of a prompt, those that the prefix cache there holds. By bisection: a cache gives up the
        ends of prompts first, so that a longer prefix is hardly ever there without the shorter."""
        known = self.prefixes
        if not prefixes or prefixes[0] not in known:
            return 0
        held, lacked = 1, len(prefixes) + 1
        while lacked - held > 1:
            middle = (held + lacked) // 2
            if prefixes[middle - 1] in known:
                held = middle
            else:
                lacked = middle
        return held * self.limits.prefix_chunk

    def place(self, ask: RoutingRequest, now_s: float) -> None:
        uncached = max(0, ask.num_tokens - self.num_cached_tokens(ask.prefixes))
        with self._lock:
            self._remove(ask.call_id)
            self._placed[ask.call_id] = _Placed(uncached, ask.num_sequences, ask.adapter, now_s)
            self.placed_tokens += uncached
            self.placed_sequences += ask.num_sequences
            self._expire(now_s)

    def unplace(self, call_id: str) -> None:
        """The engine has it, or never will."""
        if call_id in self._placed:
            with self._lock:
                self._remove(call_id)

    def observe(self, load: EngineLoad, now_s: float, *, is_stalled: bool = False) -> None:
        """A frame. `is_stalled`: no step ends there, for too long. The sets of adapters are made
        anew only when they changed."""
        if load.adapters_on_device != self.load.adapters_on_device:
            self.on_device = frozenset(load.adapters_on_device)
        if load.adapters_on_host != self.load.adapters_on_host:
            self.on_host = frozenset(load.adapters_on_host)
        self.load = load
        self.updated_s = now_s
        self.is_connected = not is_stalled
        self.usual.learn_steps(load)
        if self._placed:
            with self._lock:
                self._expire(now_s)

    def observe_load_s(self, told: LoadSeconds) -> None:
        """What its engine measured of adapters' ways into its memory."""
        if told != self.load_s:
            self.load_s = told
            self.usual.learn_load(told)

    def shun(self) -> None:
        """Nothing new is sent there until its next frame. Its connection lives, so its prefixes are
        not sent again: they stay known."""
        self.is_connected = False

    def lose(self) -> None:
        """No frames come any more. The next connection tells all of its prefixes anew."""
        self.is_connected = False
        self.prefixes = set()

    def ended(self, num_tokens: int) -> None:
        """A sequence had so many output tokens."""
        self.output_tokens += _OUTPUT_WEIGHT * (num_tokens - self.output_tokens)

    def change_prefixes(
        self, cached: Iterable[int], evicted: Iterable[int], *, is_whole: bool = False
    ) -> None:
        if is_whole:
            self.prefixes = set(cached)
            return
        self.prefixes.update(cached)
        self.prefixes.difference_update(evicted)

    def _expire(self, now_s: float) -> None:
        """Forgets what was placed too long ago, so that no call which was lost on its way takes
        room for ever from an engine whose frames come. The caller holds the lock."""
        while self._placed:
            oldest, one = next(iter(self._placed.items()))
            if now_s - one.at_s <= _MAX_PLACED_S:
                return
            self._remove(oldest)

    def _remove(self, call_id: str) -> None:
        one = self._placed.pop(call_id, None)
        if one is not None:
            self.placed_tokens -= one.num_tokens
            self.placed_sequences -= one.num_sequences


class ReplicaViews:
    """The engine replicas of one base application, as one ingress process sees them. The side
    stream writes in the ingress's event loop, Serve's router reads in its own thread."""

    def __init__(
        self,
        limits: EngineLimits,
        connected: Mapping[str, ReplicaView] | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        """`connected`: views of engines whose frames come, by id; a replica that comes is looked up
        there first, for its engine may have dialled before Serve told of it. `lock`: held by
        everything that adds to `connected`, so that no engine gets two views."""
        self.limits = limits
        self.usual = BaseEstimates()
        self._connected = {} if connected is None else connected
        self._lock = lock or threading.Lock()
        self._replicas: dict[str, ReplicaView] = {}
        self._in_order: tuple[ReplicaView, ...] = ()

    @property
    def replicas(self) -> tuple[ReplicaView, ...]:
        """The same tuple as long as the same replicas are there."""
        return self._in_order

    def get(self, replica_id: str) -> ReplicaView | None:
        return self._replicas.get(replica_id)

    def set_limits(self, limits: EngineLimits) -> None:
        with self._lock:
            self.limits = limits
            for view in self._replicas.values():
                view.limits = limits

    def keep(self, replica_ids: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Which replicas there are now; (came, went)."""
        wanted = frozenset(replica_ids)
        with self._lock:
            known = frozenset(self._replicas)
            replicas = {one: self._replicas[one] for one in self._replicas if one in wanted}
            for replica_id in sorted(wanted - known):
                view = self._connected.get(replica_id) or ReplicaView(replica_id, self.limits)
                view.limits, view.usual = self.limits, self.usual
                replicas[replica_id] = view
            if wanted != known:
                self._replicas, self._in_order = replicas, tuple(replicas.values())
        return wanted - known, known - wanted


def _mixed(known: float, told: float) -> float:
    return known + _LOAD_WEIGHT * (told - known) if known and told else known or told
