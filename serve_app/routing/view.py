"""The engine replicas of a base as an ingress sees them: the state of the newest frame, at most
a step old, and the requests sent since.

The side stream feeds the views. A request counts as soon as it is placed, until a frame reports
that the engine has accepted it and the engine's own numbers include it. Routers, queues, the tests
of the autoscaler and the simulator all read these plain values. Ignorant of Ray and HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.admission import EngineLimits
from engine.types import EngineLoad, key_digests
from serve_app.messages import RoutingRequest
from serve_app.stream.wire import NOT_MEASURED, LoadSeconds

# A request counts at most so long if its engine never accepts it and its call reports no end.
_MAX_PLACED_S = 30.0
_INITIAL_OUTPUT_TOKENS = 128.0  # output tokens per sequence, until some have ended
_OUTPUT_WEIGHT = 0.05  # of the newest sequence in the mean output length
_LOAD_WEIGHT = 0.2  # of a replica's new measurement in the base's load times
# A first token moves the estimated overhead by this share, or by this share of the minimum.
_OVERHEAD_STEP, _MIN_OVERHEAD_S = 0.05, 0.001


@dataclass(slots=True)
class BaseEstimates:
    """Estimates that all replicas of a base share and contribute to. So a replica without
    measurements looks no worse than the others, and a fetch looks no faster at the replica that
    happened to measure a fast one. 0 or None if unknown."""

    load_s: LoadSeconds = NOT_MEASURED
    # Of a step itself, of a prompt token and of a decoding sequence in it
    steps_s: tuple[float, float, float] | None = None
    # The network and other overhead of a first token (see `score`): about the median, so that a
    # few slow requests move it little.
    overhead_s: float = 0.0

    def learn_overhead(self, excess_s: float) -> None:
        """`excess_s`: the measured time to a first token since its replica was chosen, less the
        time that was expected at the replica."""
        step_s = _OVERHEAD_STEP * max(self.overhead_s, _MIN_OVERHEAD_S)
        self.overhead_s = max(
            0.0, self.overhead_s + (step_s if excess_s > self.overhead_s else -step_s)
        )

    def learn_load(self, measured: LoadSeconds) -> None:
        """Includes a replica's new measurement."""
        self.load_s = LoadSeconds(*map(_mixed, self.load_s, measured))

    def learn_steps(self, load: EngineLoad) -> None:
        if load.step_fixed_s or load.step_token_s:
            self.steps_s = load.step_fixed_s, load.step_token_s, load.step_sequence_s


@dataclass(frozen=True, slots=True)
class _Placed:
    num_tokens: int
    num_sequences: int
    adapter: str | None
    at_s: float


@dataclass(slots=True, eq=False)
class ReplicaView:
    """An engine replica. Any thread may read it: values are replaced, not changed. The exception
    is the set of prefixes, of which readers look up single members only."""

    replica_id: str
    limits: EngineLimits
    load: EngineLoad = field(default_factory=EngineLoad)
    load_s: LoadSeconds = NOT_MEASURED
    # Its frames arrive and its steps end in time; otherwise the values are old or not known yet.
    is_connected: bool = False
    updated_s: float = 0.0  # when the newest frame arrived, on this process's monotonic clock
    on_device: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()
    prefixes: set[int] = field(default_factory=set)
    estimates: BaseEstimates = field(default_factory=BaseEstimates)  # shared by all of a base
    output_tokens: float = _INITIAL_OUTPUT_TOKENS  # mean output length of the ended sequences
    placed_tokens: int = 0  # of requests on their way to the engine
    placed_sequences: int = 0
    _placed: dict[str, _Placed] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def queued_tokens(self) -> int:
        """The tokens still to prefill, including requests on their way."""
        return self.load.queued_tokens + self.placed_tokens

    @property
    def num_sequences(self) -> int:
        """The sequences running or waiting at the engine, or on their way."""
        return self.load.num_running + self.load.num_waiting + self.placed_sequences

    @property
    def free_kv_tokens(self) -> int:
        """The KV tokens available without waiting for a running sequence to end."""
        return round((1 - self.load.kv_usage) * self.limits.max_kv_tokens)

    def has_adapter(self, adapter: str | None) -> bool:
        """Returns True if all adapters of the key are in device or host memory, at most
        milliseconds away."""
        return all(one in self.on_device or one in self.on_host for one in key_digests(adapter))

    def is_loading(self, digest: str) -> bool:
        """Returns True if a request on its way needs the adapter, so that it is loaded anyway."""
        placed = tuple(self._placed.values())  # one bytecode: safe while another thread places
        return any(digest in key_digests(request.adapter) for request in placed)

    def num_cached_tokens(self, prefixes: Sequence[int]) -> int:
        """Returns the number of a prompt's tokens in the engine's prefix cache. Bisects: a cache
        evicts the ends of prompts first, so it hardly ever holds a longer prefix without the
        shorter."""
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

    def place(self, request: RoutingRequest, now_s: float) -> None:
        uncached = max(0, request.num_tokens - self.num_cached_tokens(request.prefixes))
        placed = _Placed(uncached, request.num_sequences, request.adapter, now_s)
        with self._lock:
            self._remove(request.call_id)
            self._placed[request.call_id] = placed
            self.placed_tokens += uncached
            self.placed_sequences += request.num_sequences
            self._expire(now_s)

    def unplace(self, call_id: str) -> None:
        """Stops counting a request that the engine has accepted or will never get."""
        if call_id in self._placed:
            with self._lock:
                self._remove(call_id)

    def observe(
        self,
        load: EngineLoad,
        now_s: float,
        *,
        is_stalled: bool = False,
        same_adapters: bool = False,
    ) -> None:
        """Applies a frame. `is_stalled`: the step under way is overdue. `same_adapters`: see
        `Step`."""
        if not same_adapters:
            self.on_device = frozenset(load.adapters_on_device)
            self.on_host = frozenset(load.adapters_on_host)
        self.load = load
        self.updated_s = now_s
        self.is_connected = not is_stalled
        self.estimates.learn_steps(load)
        if self._placed:
            with self._lock:
                self._expire(now_s)

    def observe_load_s(self, measured: LoadSeconds) -> None:
        """Applies the load times that the engine replica measured."""
        if measured != self.load_s:
            self.load_s = measured
            self.estimates.learn_load(measured)

    def disconnect(self) -> None:
        """Marks the end of the connection. The next connection sends all prefixes again."""
        self.is_connected = False
        self.prefixes = set()

    def record_length(self, num_tokens: int) -> None:
        """Includes the output length of an ended sequence in the mean."""
        self.output_tokens += _OUTPUT_WEIGHT * (num_tokens - self.output_tokens)

    def change_prefixes(
        self, cached: Iterable[int], evicted: Iterable[int], *, is_whole: bool = False
    ) -> None:
        """Applies changes of the prefix cache; with `is_whole` it holds exactly `cached`."""
        if is_whole:
            self.prefixes = set(cached)
            return
        self.prefixes.update(cached)
        self.prefixes.difference_update(evicted)

    def _expire(self, now_s: float) -> None:
        """Stops counting requests placed too long ago, so that a call lost on its way does not
        occupy a connected engine for ever. The caller holds the lock."""
        while self._placed:
            call_id, oldest = next(iter(self._placed.items()))
            if now_s - oldest.at_s <= _MAX_PLACED_S:
                return
            self._remove(call_id)

    def _remove(self, call_id: str) -> None:
        placed = self._placed.pop(call_id, None)
        if placed is not None:
            self.placed_tokens -= placed.num_tokens
            self.placed_sequences -= placed.num_sequences


class ReplicaViews:
    """The views of all engine replicas of a base application. The side stream writes them in the
    ingress's event loop, Serve's router reads them in its own thread."""

    def __init__(
        self,
        limits: EngineLimits,
        connected: Mapping[str, ReplicaView] | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        """`connected`: the views of all connected engines by id; a new replica is looked up there
        first, because its engine may have dialled before Serve reported the replica. `lock`: held
        by all code that adds to `connected`, so that no engine gets two views."""
        self.limits = limits
        self.estimates = BaseEstimates()
        self._connected = {} if connected is None else connected
        self._lock = lock or threading.Lock()
        self._by_id: dict[str, ReplicaView] = {}
        self.replicas: tuple[ReplicaView, ...] = ()  # the same tuple as long as the set is the same

    def get(self, replica_id: str) -> ReplicaView | None:
        return self._by_id.get(replica_id)

    def set_limits(self, limits: EngineLimits) -> None:
        with self._lock:
            self.limits = limits
            for view in self._by_id.values():
                view.limits = limits

    def set_replicas(self, replica_ids: Iterable[str]) -> bool:
        """Replaces the set of replicas. Returns False if it is the same set. Serve leaves out a
        replica as soon as it drains."""
        wanted = frozenset(replica_ids)
        with self._lock:
            if wanted == self._by_id.keys():
                return False
            by_id = {name: view for name, view in self._by_id.items() if name in wanted}
            for replica_id in sorted(wanted - by_id.keys()):
                view = self._connected.get(replica_id) or ReplicaView(replica_id, self.limits)
                view.limits, view.estimates = self.limits, self.estimates
                by_id[replica_id] = view
            self._by_id, self.replicas = by_id, tuple(by_id.values())
        return True


def _mixed(known: float, measured: float) -> float:
    return known + _LOAD_WEIGHT * (measured - known) if known and measured else known or measured
