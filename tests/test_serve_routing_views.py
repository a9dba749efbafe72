"""The routing state of an ingress: views that survive any order of Serve's reports and the stream's
connections, the newest decisions, and the calls of listeners."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle

from engine.admission import EngineLimits
from engine.types import StepOutput
from serve_app.api.explain import measured
from serve_app.dispatch.migrations import Migrations
from serve_app.dispatch.warm_ups import WarmUps
from serve_app.messages import EngineOutcome
from serve_app.routing import connections as connections_module
from serve_app.routing import state as routing
from serve_app.routing.connections import EngineConnections
from serve_app.routing.decisions import Decisions
from serve_app.routing.policy import Ranked
from serve_app.routing.score import expected_ttft
from serve_app.routing.state import (
    RoutingState,
    RoutingStates,
    ViewFeed,
    routing_state,
)
from serve_app.routing.view import BaseEstimates, ReplicaView, ReplicaViews
from serve_app.stream.client import IngressLinks
from serve_app.stream.server import StreamServer
from tests.fakes_broadcast import Handle
from tests.routing_factory import IDLE, LIMITS, EngineEvents, make_ask, make_load, make_view
from tests.virtual_loop import VirtualLoop
from tests.waiting import until


def _state(*replica_ids: str) -> RoutingState:
    state = RoutingStates().of("app")
    state.views.set_limits(LIMITS)
    state.set_replicas(replica_ids)
    return state


def test_replicas_come_and_go_and_the_others_keep_what_is_known() -> None:
    views = ReplicaViews(LIMITS)
    assert views.set_replicas(["a", "b"])
    kept, before = views.get("b"), views.replicas
    assert not views.set_replicas(["b", "a"])
    assert views.replicas is before
    assert views.set_replicas(["b", "c"])
    assert views.get("b") is kept
    assert [view.replica_id for view in views.replicas] == ["b", "c"]


def test_an_engine_that_dialled_before_serve_told_of_it_loses_nothing() -> None:
    states = RoutingStates()
    early = states.attach("early")
    early.observe(make_load(adapters_on_device=("a",)), 1.0)
    early.change_prefixes((1, 2), (), is_whole=True)
    state = states.of("app")
    state.views.set_limits(LIMITS)
    state.set_replicas(["early", "late"])
    assert state.views.get("early") is early
    assert early.limits == LIMITS
    assert early.num_cached_tokens((1, 2)) == 64
    assert states.attach("late") is state.views.get("late")


def test_a_lost_connection_leaves_a_view_that_is_known_to_be_old() -> None:
    view = make_view(prefixes=(1,))
    view.disconnect()
    assert not view.is_connected
    assert view.num_cached_tokens((1,)) == 0
    view.observe(make_load(), 2.0)
    assert view.is_connected


def test_an_engine_that_dials_while_serve_tells_of_it_has_one_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = RoutingStates()
    state = states.of("app")
    state.views.set_limits(LIMITS)
    router = threading.Thread(target=state.set_replicas, args=(["e0"],))

    def slow_view(replica_id: str, limits: EngineLimits) -> ReplicaView:
        """Lets the router's thread run between the look-up of a view and its construction."""
        monkeypatch.undo()
        router.start()
        router.join(0.2)  # it may wait until the view exists
        return ReplicaView(replica_id, limits)

    monkeypatch.setattr(routing, "ReplicaView", slow_view)
    adopted = states.attach("e0")
    router.join(10)
    assert state.views.get("e0") is adopted
    assert adopted.limits == LIMITS
    assert states.attach("e0") is adopted


async def test_an_engine_that_was_silent_for_a_while_keeps_its_prefixes() -> None:
    server = StreamServer(ViewFeed())
    await server.listen("127.0.0.1")
    migrations = Migrations(server, routing.placed_at, routing.deprioritise, "i0", 10.0, 0.05)
    state = routing.routing_state("app of an engine that was silent")
    state.views.set_limits(LIMITS)
    state.set_replicas(["silent"])
    view = state.views.get("silent")
    assert view is not None
    links = IngressLinks("silent", lambda *_: None, lambda _: None)
    await links.attend(server.address)
    links.send(StepOutput((), IDLE, (1, 2, 3), ()), {})
    await until(lambda: view.num_cached_tokens((1, 2, 3)) == 96)
    await until(lambda: (server.silence_s("silent") or 0.0) > 0.05)
    migrations.check_engines()
    assert not view.is_connected
    links.send(StepOutput((), IDLE, (4,), (3,)), {})
    await until(lambda: view.is_connected)
    assert view.prefixes == {1, 2, 4} == links.snapshot.prefixes
    links.close()
    await until(lambda: not server.engines)
    assert not view.prefixes  # its next connection sends all of them
    server.close()


def test_placing_from_two_threads_at_once_counts_right() -> None:
    view = make_view()

    def place(thread: int) -> None:
        for number in range(2000):
            view.place(make_ask(f"{thread}-{number}"), 1.0)
            if number % 2:
                view.unplace(f"{thread}-{number}")

    threads = [threading.Thread(target=place, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(view._placed), view.placed_tokens) == (4000, 400_000)


def test_output_lengths_are_learned() -> None:
    view = make_view()
    for _ in range(200):
        view.record_length(1000)
    assert view.output_tokens == pytest.approx(1000, rel=0.01)


def test_whoever_listens_is_told_of_changes_and_cannot_harm() -> None:
    state = _state("a")
    seen: list[list[str]] = []

    def harm() -> None:
        raise RuntimeError("not mine")

    def record() -> None:
        seen.append([view.replica_id for view in state.views.replicas])

    state.add_listener(harm, lambda _: None)
    state.add_listener(record, lambda _: None)
    state.set_replicas(["a", "b"])
    state.set_replicas(["a", "b"])
    state.set_replicas(["b"])
    assert seen == [["a", "b"], ["b"]]


def test_a_placed_call_is_told_and_taken_back() -> None:
    state = _state("a")
    placed: list[str] = []
    state.add_listener(lambda: None, placed.append)
    request = make_ask("call")
    ranked = state.rank(request)
    state.decisions.add(request, "a", ranked, "expected_ttft", 1.0, 2.0)
    state.place(request, "a")
    view = state.views.get("a")
    assert placed == ["call"]
    assert view is not None
    assert len(view._placed) == 1
    state.unplace("call")
    state.unplace("nobody")
    assert len(view._placed) == 0


async def test_a_call_of_a_base_that_is_away_for_a_moment_is_reported_once_as_placed() -> None:
    placed: list[tuple[str, str]] = []
    changes: list[frozenset[str]] = []
    connections = EngineConnections(
        StreamServer(EngineEvents()),
        lambda app, call: placed.append((app, call)),
        lambda _, replica_ids: changes.append(replica_ids),
    )
    state, limits = routing_state("away"), EngineLimits(0, 0, 0)
    handle = cast(DeploymentHandle[object], object())
    connections.add_base("away", "base", handle, limits)
    connections.remove_base("away")
    state.place(make_ask("while it is away"), "a")
    state.set_replicas(["a"])
    await asyncio.sleep(0)
    assert changes == [frozenset()]  # nobody waits for the replicas of a base that is away
    state.set_replicas([])
    connections.add_base("away", "base", handle, limits)
    state.place(make_ask("afterwards"), "a")
    assert placed == [("away", "while it is away"), ("away", "afterwards")]


def test_a_policy_that_cannot_be_made_here_leaves_the_one_before() -> None:
    state = _state("a", "b")
    state.set_policy("round_robin", {})
    state.set_policy("no:where", {})
    assert state.policy_name == "round_robin"
    assert state.rank(make_ask())


def _ranked(view: ReplicaView) -> list[Ranked]:
    return [Ranked(view, expected_ttft(make_ask(adapter="a"), view), "home")]


def test_the_newest_decisions_are_kept_and_all_are_counted() -> None:
    decisions = Decisions()
    has, lacks = make_view("has", device="a"), make_view("lacks")
    for number in range(1500):
        view = has if number % 3 else lacks
        request = make_ask(str(number), adapter="a")
        decisions.add(request, view.replica_id, _ranked(view), "expected_ttft", 1.0, 2.0)
    decisions.add(make_ask("full"), "else", _ranked(has), "expected_ttft", 1.0, 2.0)
    decisions.add(make_ask("failed"), "has", [], "expected_ttft", 1.0, 2.0)
    assert decisions.reasons == {"home": 1500, "other": 1, "fallback": 1}
    assert decisions.affinity_hits == 1000
    assert len(decisions.newest) == 1024
    assert decisions.get("0") is None
    assert decisions.newest[-1].call_id == "failed"


def test_expectations_are_counted_against_the_times_that_came() -> None:
    decisions, view = Decisions(), make_view()
    for number, factor in enumerate((1.0, 1.05, 0.3, 9.0)):
        request = make_ask(str(number), adapter="a")
        ranked = _ranked(view)
        decisions.add(request, "r0", ranked, "expected_ttft", 1.0, 2.0)
        answer_s = ranked[0].terms.total_s / factor
        decisions.first_token(str(number), 0.0, 2.0 + answer_s * (1 + 1e-9))
        decisions.first_token(str(number), 0.0, 99.0)  # of another choice
    decisions.add(make_ask("failed"), "r0", [], "expected_ttft", 1.0, 2.0)
    decisions.first_token("failed", 0.0, 3.0)  # nothing was expected
    found = dict(zip(decisions.expected_ratio.bounds, decisions.expected_ratio.counts, strict=True))
    assert {le: count for le, count in found.items() if count} == {
        "0.5": 1,
        "1.0": 1,
        "1.1": 1,
        "+Inf": 1,
    }
    assert decisions.expected_ratio.total == pytest.approx(11.35)


def test_a_rejected_call_is_decided_again() -> None:
    decisions, view = Decisions(), make_view()
    for _ in range(3):
        decisions.add(make_ask("call"), "r0", _ranked(view), "expected_ttft", 1.0, 2.0)
    (decision,) = decisions.newest
    assert decision.rejections == 2


def test_the_parts_of_a_first_token_sum_to_its_time() -> None:
    decisions = Decisions()
    decisions.add(make_ask("call"), "r0", [], "expected_ttft", 10.5, 10.6)
    decisions.accepted("call", 0.2, "disk")
    decisions.accepted("call", 9.9, "host")  # a frame that arrived twice
    decisions.first_token("call", 0.3, 11.5)
    decisions.first_token("call", 0.4, 12.0)
    (decision,) = decisions.newest
    assert decision.adapter_tier == "disk"
    parts = measured(decision, arrival_s=10.0, fair_s=0.1, first_s=11.6)
    assert sum(parts.values()) == pytest.approx(1.6)
    assert parts == pytest.approx(
        {
            "prepare": 0.4,
            "fair": 0.1,
            "route": 0.1,
            "adapter": 0.2,
            "queue": 0.3,
            "prefill": 0.4,
            "deliver": 0.1,
        }
    )


def test_the_usual_way_is_learned_and_a_few_that_took_long_move_it_little() -> None:
    estimates = BaseEstimates()
    for number in range(400):
        estimates.learn_overhead(9.0 if number % 10 == 0 else 0.03)
    assert estimates.overhead_s == pytest.approx(0.03, rel=0.15)
    for _ in range(400):
        estimates.learn_overhead(-0.001)
    assert estimates.overhead_s < 0.001


def test_the_way_is_expected_of_every_replica_alike_and_decides_nothing() -> None:
    view = make_view("r0")
    before = expected_ttft(make_ask(), view)
    view.estimates.overhead_s = 0.02
    after = expected_ttft(make_ask(), view)
    assert after.total_s == pytest.approx(before.total_s + 0.02)
    assert after.there_s == before.there_s


@dataclass
class _WarmHandle:
    """Answers warm-ups."""

    outcome: EngineOutcome
    began_s: list[float] = field(default_factory=list)

    @property
    def warm(self) -> _WarmHandle:
        return self

    async def remote(self, adapter: object, request: object) -> EngineOutcome:
        self.began_s.append(asyncio.get_running_loop().time())
        return self.outcome


def test_a_warm_up_that_fails_is_tried_again_ever_more_rarely_and_logged_once_a_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RoutingState, "warm_ups", lambda *_: [("d" * 64, "e0")])
    handle = _WarmHandle(EngineOutcome("e0", False, "the files are gone"))
    calls: list[list[float]] = []

    async def run() -> None:
        adapter = cast(Any, SimpleNamespace(name="pirate", rank=8))
        base = SimpleNamespace(app_name="app of a lost adapter", handle=handle)
        models = SimpleNamespace(handles=[base], num_ingresses=1, find_adapter=lambda _: adapter)
        polling = WarmUps(cast(Any, models)).start()
        for outcome in ("the files are gone", "the store is down", "", "the files are gone"):
            handle.outcome, handle.began_s = EngineOutcome("e0", not outcome, outcome), []
            await asyncio.sleep(600.0)
            calls.append(handle.began_s)
        polling.cancel()

    loop = VirtualLoop(0)
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    first, second, third, fourth = calls
    gaps_s = [late - early for early, late in pairwise(first)]
    assert gaps_s[0] < 3.0
    assert 60.0 <= gaps_s[-1] < 62.0
    assert max(len(first), len(second)) < 20
    assert len(third) > 300  # repeated warm-ups that succeed have no pause
    assert len(fourth) < 20
    warned = [record.getMessage().split(": ")[1] for record in caplog.records]
    assert warned == ["the files are gone", "the store is down", "the files are gone"]


async def test_the_call_to_an_engine_that_does_not_dial_in_time_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections_module, "_CALL_TIMEOUT_S", 1.0)
    app_name, handle = "app with an engine that hangs", Handle(False, True)
    stream = StreamServer(EngineEvents())
    await stream.listen("127.0.0.1")
    connections = EngineConnections(stream, lambda *_: None, lambda *_: None)
    routing.routing_state(app_name).set_replicas(("a", "b"))
    connections.add_base(app_name, "base", cast(DeploymentHandle[object], handle), LIMITS)
    await until(lambda: bool(handle.results) and handle.results[0][1].is_cancelled)
    assert handle.calls == [("attend", stream.address)]
    assert not handle.results[0][0].is_cancelled
    stream.close()


async def test_calls_queued_when_a_base_was_removed_are_still_reported_as_placed() -> None:
    app_name = "app that is replaced while requests wait"
    placed: list[tuple[str, str]] = []
    changes: list[frozenset[str]] = []
    handle: Any = SimpleNamespace()
    connections = EngineConnections(
        StreamServer(EngineEvents()),
        lambda app, call_id: placed.append((app, call_id)),
        lambda _, replica_ids: changes.append(replica_ids),
    )
    state = routing.routing_state(app_name)
    connections.add_base(app_name, "base", handle, LIMITS)
    connections.remove_base(app_name)
    state.place(make_ask("late"), "a")
    assert placed == [(app_name, "late")]
    state.set_replicas(())
    changes.clear()
    connections.add_base(app_name, "base", handle, LIMITS)
    state.place(make_ask("again"), "a")
    assert placed[1:] == [(app_name, "again")]
    assert changes == [frozenset()]
