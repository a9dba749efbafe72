"""Views and requests for the tests of routing; by default all engines are equal and idle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine.admission import EngineLimits
from engine.types import EngineLoad
from serve_app.messages import RoutingRequest
from serve_app.routing.policy import Policy
from serve_app.routing.view import ReplicaView, ReplicaViews
from serve_app.stream.wire import LoadSeconds, Step

LIMITS = EngineLimits(
    max_model_len=4096,
    vocab_size=1000,
    max_kv_tokens=100_000,
    max_num_seqs=64,
    max_num_batched_tokens=1000,
    prefix_chunk=32,
)
# A step of 10 ms, a prompt token 0.1 ms, a decoding sequence 0.1 ms.
IDLE = EngineLoad(
    num_blocks=1000,
    num_free_blocks=1000,
    step_fixed_s=0.01,
    step_token_s=0.0001,
    step_sequence_s=0.0001,
)
LOADS = LoadSeconds(host=0.01, disk=0.2, registry=2.0)


def make_load(**changes: object) -> EngineLoad:
    return replace(IDLE, **changes)  # type: ignore[arg-type]


def make_view(
    replica_id: str = "r0",
    *,
    device: Iterable[str] = (),
    host: Iterable[str] = (),
    disk: Iterable[str] = (),
    prefixes: Iterable[int] = (),
    **load: object,
) -> ReplicaView:
    view = ReplicaView(replica_id, LIMITS)
    view.load_s = LOADS
    view.on_disk = frozenset(disk)
    view.observe(
        make_load(adapters_on_device=tuple(device), adapters_on_host=tuple(host), **load), 1.0
    )
    view.change_prefixes(tuple(prefixes), (), is_whole=True)
    return view


def make_views(count: int, **load: object) -> ReplicaViews:
    views = ReplicaViews(LIMITS)
    views.set_replicas(f"r{i}" for i in range(count))
    for view in views.replicas:
        view.load_s = LOADS
        view.observe(make_load(**load), 1.0)
    return views


def make_ask(call_id: str = "call", num_tokens: int = 100, **fields: object) -> RoutingRequest:
    return RoutingRequest(call_id, num_tokens, **fields)  # type: ignore[arg-type]


def order(
    policy: Policy, ask: RoutingRequest, views: Sequence[ReplicaView], now_s: float = 1.0
) -> list[str]:
    return [one.replica.replica_id for one in policy.rank(ask, views, now_s)]


@dataclass
class EngineEvents:
    """Records the events of a StreamServer."""

    frames: list[Step] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def frame_received(self, engine_id: str, step: Step) -> None:
        self.frames.append(step)

    def choice_stopped(self, engine_id: str, num_tokens: int) -> None:
        pass

    def engine_lost(self, engine_id: str) -> None:
        self.lost.append(engine_id)
