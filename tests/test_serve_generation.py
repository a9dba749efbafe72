"""Generations whose engines die, hang, drain and refuse: no token is lost or doubled, and only
requests that kill engines are quarantined.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import TaskCancelledError
from ray.serve._private.replica_result import ActorReplicaResult
from ray.serve.context import _get_serve_request_context, _set_request_context
from ray.serve.handle import DeploymentResponse

from engine.errors import EngineDeadError
from engine.types import TokenOutput
from serve_app.canary.arm_stats import ArmStats
from serve_app.config import MigrationArgs
from serve_app.dispatch.attempt import Attempt, CallCancelledError
from serve_app.dispatch.completion import Completion
from serve_app.dispatch.generation import Generation
from serve_app.errors import (
    ClientGoneError,
    NoMemoryError,
    OverloadedError,
    RequestQuarantinedError,
    to_api_error,
)
from serve_app.messages import RoutingRequest, SubmitCall
from serve_app.observe.record import RequestRecord
from serve_app.openai.engine_params import Prompt
from serve_app.routing import state as routing
from serve_app.routing.request import make_routing_request
from serve_app.stream.server import StreamServer
from serve_app.stream.wire import HEARTBEAT_S
from serve_app.tally import ArmKey
from tests.answer_factory import completion
from tests.fakes_engine import CRASH_TOKEN, POISON_TOKEN, PacedEngine
from tests.fakes_replicas import (
    APP,
    Fleet,
    made_base,
    make_request,
    read_all,
    running_fleet,
    tokens,
)
from tests.routing_factory import EngineEvents
from tests.text_factory import base_text
from tests.waiting import until

PROMPT = (11, 12, 13, 14)
WHOLE = (PROMPT * 10)[:40]


def engine_of(fleet: Fleet, index: int = -1) -> str:
    return fleet.placed[index][0]


def engine_now(generation: Generation) -> str | None:
    return None if generation._attempt is None else generation._attempt.stream.engine_id


def migrated(fleet: Fleet, reason: str, result: str = "ok") -> float:
    text = fleet.migrations.metrics.text().decode()
    wanted = f'reason="{reason}",result="{result}"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if wanted in line)


def count(fleet: Fleet, name: str) -> float:
    text = fleet.migrations.metrics.text().decode()
    start = f"loraplex_requests_{name}_total{{"
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(start)
    )


async def read_some(generation: Generation, num_tokens: int) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while sum(len(output.token_ids) for output in outputs) < num_tokens:
        outputs += await asyncio.wait_for(generation.read(), 120)
    return outputs


@pytest.mark.parametrize("num_before", [0, 1, 20, 39])
async def test_a_stream_goes_on_where_its_engine_died(num_before: int) -> None:
    async with running_fleet(2) as fleet:
        fleet.pause(num_before)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, num_before)
        rest = asyncio.create_task(read_all(generation))
        await until(lambda: bool(fleet.placed))
        fleet.replicas[engine_of(fleet)].kill()
        fleet.pause(None)
        outputs += await rest
        assert tokens(outputs) == WHOLE
        assert outputs[-1].finish_reason == "length"
        assert len({engine for engine, _ in fleet.placed}) == len(fleet.placed) == 2
        assert migrated(fleet, "death") == 1
        generation.close()


async def test_a_resumed_call_has_new_ids_the_same_seed_and_avoids_the_dead_engine() -> None:
    async with running_fleet(2) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        fleet.replicas[engine_of(fleet)].kill()
        fleet.pause(None)
        await read_all(generation)
        (dead, first), (_, second) = fleet.placed
        (before,), (after,) = first.requests, second.requests
        assert before.request_id != after.request_id == second.routing.call_id
        assert before.params.seed is not None
        assert before.params == after.params
        assert after.resumed[0].token_ids[:5] == tokens(outputs)[:5]
        assert second.routing.avoid == {dead}


async def test_choices_that_ended_are_not_sent_again() -> None:
    async with running_fleet(2) as fleet:
        fleet.pause(10)
        generation = fleet.generate(
            make_request(PROMPT, n=3), make_request((7, 8), 5, name="short")
        )
        outputs = await read_some(generation, 3 * 10 + 5)
        generation.end_choice("r", 1)  # a stop string
        outputs_before = len(tokens([o for o in outputs if o.choice == 1], 1))
        fleet.replicas[engine_of(fleet)].kill()
        fleet.pause(None)
        outputs += await read_all(generation)
        (request,) = fleet.placed[1][1].requests
        assert request.choices == (0, 2)
        assert tokens(outputs, 0) == tokens(outputs, 2) == WHOLE
        assert len(tokens(outputs, 1)) >= outputs_before
        assert tokens(outputs, 0, "short") == (7, 8, 7, 8, 7)


async def test_a_choice_that_ends_at_a_stop_string_counts_and_teaches_as_one_that_stopped() -> None:
    async with running_fleet(1, listener=routing.ViewFeed()) as fleet:
        generation = fleet.generate(make_request(PROMPT, 4000))
        outputs = await read_some(generation, 3)
        view = routing.connected["e0"]
        before = view.output_tokens
        generation.end_choice("r", 0)
        metrics = fleet.replicas["e0"].host._metrics
        await until(lambda: metrics._finished.total() == 1)
        assert metrics._finished == {"stop": 1}
        num_tokens = len(tokens(outputs))
        assert before - view.output_tokens == pytest.approx((before - num_tokens) / 20)
        generation.close()


@pytest.mark.parametrize(("found_in", "num_warm"), [(None, 1), ("disk", 0)])
async def test_an_arm_is_charged_only_with_what_did_not_wait_for_its_adapter(
    found_in: str | None, num_warm: int, tmp_path: Path
) -> None:
    text = base_text(tmp_path)
    arms, key = ArmStats(), ArmKey("pirate", "canary", 2, "d2")

    async with running_fleet(1) as fleet:
        engine = fleet.replicas["e0"]
        engine.found_in = found_in
        engine.engine.loaded["d2"] = "pirate"
        for name, leaves in (("a", False), ("b", True)):
            request = replace(make_request(PROMPT, name=name), adapter="d2")
            generation = fleet.generate(request)
            builder = completion(text, [Prompt(PROMPT, "x")], max_tokens=40)
            leave = (lambda _, one=generation: one.fail(ClientGoneError())) if leaves else None
            made = Completion(generation, builder, arms.begin(key), leave)
            with pytest.raises(ClientGoneError) if leaves else nullcontext():
                await asyncio.wait_for(made.whole(), 120)
            made.close()
    ((_, counted),) = arms.counts()
    assert (counted.count("ok"), counted.count("left"), sum(counted.first_token)) == (1, 1, 2)
    assert (counted.num_warm_left, sum(counted.warm_first_token)) == (num_warm, 2 * num_warm)


async def test_the_record_of_an_answer_that_moved_has_its_tokens_once(tmp_path: Path) -> None:
    text = base_text(tmp_path)
    record = RequestRecord("/v1/completions", time.time())
    async with running_fleet(2) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        builder = completion(text, [Prompt(PROMPT, "x")], max_tokens=40)
        made = Completion(generation, builder, record=record)
        whole = asyncio.create_task(made.whole())
        await until(lambda: builder.num_tokens == 5)
        fleet.replicas[engine_of(fleet)].kill()
        fleet.pause(None)
        await asyncio.wait_for(whole, 120)
        made.close()
    record.end()
    assert (record.outcome, record.finish_reasons) == ("ok", ("length",))
    assert (record.prompt_tokens, record.output_tokens) == (len(PROMPT), len(WHOLE))
    (move,) = record.moves
    assert move.reason == "death"
    assert record.arrival_s < record.first_token_s < move.at_s < record.end_s


async def test_the_record_of_a_client_that_leaves_has_the_tokens_until_then(tmp_path: Path) -> None:
    text = base_text(tmp_path)
    record = RequestRecord("/v1/completions", time.time())
    async with running_fleet(1) as fleet:
        fleet.replicas["e0"].engine.pause_at = 5
        generation = fleet.generate(make_request(PROMPT))
        builder = completion(text, [Prompt(PROMPT, "x")], max_tokens=40)
        made = Completion(generation, builder, record=record)
        whole = asyncio.create_task(made.whole())
        await until(lambda: builder.num_tokens == 5)
        made.client_left()
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(whole, 120)
        made.close()
    record.end()
    assert (record.outcome, record.status, record.output_tokens) == ("left", 499, 5)


async def test_late_tokens_of_an_engine_that_hung_find_nobody() -> None:
    async with running_fleet(2, silence_s=0.05) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        old = fleet.replicas[engine_of(fleet)]
        old.hang()
        await asyncio.sleep(0.1)
        fleet.migrations.check_engines()
        fleet.pause(None)
        outputs += await read_all(generation)
        assert tokens(outputs) == WHOLE
        assert migrated(fleet, "silence") == 1
        await until(lambda: bool(old.engine.aborted))


async def test_requests_leave_an_engine_whose_step_hangs_though_its_heartbeat_goes_on() -> None:
    async with running_fleet(2) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        old = fleet.replicas[engine_of(fleet)]
        old.engine.hung_s = time.monotonic() - 11.0
        await until(lambda: (fleet.server.silence_s(old.engine_id) or 0.0) > 10.0)
        fleet.migrations.check_engines()
        fleet.pause(None)
        assert fleet.migrations.has_silent_engine
        outputs += await read_all(generation)
        assert tokens(outputs) == WHOLE
        assert [engine for engine, _ in fleet.placed] == [old.engine_id, engine_now(generation)]
        assert migrated(fleet, "silence") == 1
        assert len({engine for engine, _ in fleet.placed}) == 2
        assert fleet.router.deprioritised == {old.engine_id}


async def test_an_engine_in_a_long_step_of_a_usual_length_keeps_its_requests() -> None:
    async with running_fleet(2) as fleet:
        generation = fleet.generate(make_request(PROMPT))
        await read_some(generation, 5)
        engine = fleet.replicas[engine_of(fleet)].engine
        engine.usual_s, engine.hung_s = 7.4, time.monotonic() - 11.0
        await asyncio.sleep(1.5 * HEARTBEAT_S)
        fleet.migrations.check_engines()
        assert not fleet.migrations.has_silent_engine
        assert len(fleet.placed) == 1
        generation.close()


async def test_an_engine_that_stays_hung_ends_the_calls_that_nobody_moved() -> None:
    async with running_fleet(1) as fleet:
        fleet.args = MigrationArgs(limit=0)
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        await read_some(generation, 5)
        (replica,) = fleet.replicas.values()
        replica.engine.hung_s = time.monotonic() - 13.0
        fleet.pause(None)
        with pytest.raises(EngineDeadError, match="not ended"):
            await read_all(generation)
        assert replica.host.dead.is_set()


async def test_an_engine_whose_process_was_stopped_as_a_whole_is_not_given_up() -> None:
    async with running_fleet(1) as fleet:
        generation = fleet.generate(make_request(PROMPT))
        await read_some(generation, 5)
        (replica,) = fleet.replicas.values()
        replica.engine.hung_s = time.monotonic() - 13.0
        time.sleep(2 * HEARTBEAT_S)
        await asyncio.sleep(0.2)
        replica.engine.hung_s = None
        await asyncio.sleep(1.5 * HEARTBEAT_S)
        assert not replica.host.dead.is_set()
        generation.close()


async def test_a_request_without_memory_goes_on_at_another_engine() -> None:
    async with running_fleet(2) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT, n=2))
        outputs = await read_some(generation, 10)
        fleet.replicas[engine_of(fleet)].engine.no_memory = True
        fleet.pause(None)
        outputs += await read_all(generation)
        assert tokens(outputs, 0) == tokens(outputs, 1) == WHOLE
        assert len({engine for engine, _ in fleet.placed}) == len(fleet.placed) == 2
        assert migrated(fleet, "memory") == 1


async def test_a_request_that_finds_memory_nowhere_ends_after_its_limit() -> None:
    async with running_fleet(2) as fleet:
        fleet.args = MigrationArgs(limit=1)
        for replica in fleet.replicas.values():
            replica.engine.no_memory = True
        generation = fleet.generate(make_request(PROMPT))
        with pytest.raises(NoMemoryError):
            await read_all(generation)
        assert len(fleet.placed) == 2
        assert to_api_error(NoMemoryError()).status == 503


async def test_the_call_of_a_whole_answer_returns_and_is_not_cancelled() -> None:
    async with running_fleet(1) as fleet:
        fleet.return_s = 0.05
        generation = fleet.generate(make_request(PROMPT, 3))
        await read_all(generation)
        generation.close()
        await until(lambda: not fleet._tasks)
        assert fleet.num_cancelled == 0


async def test_a_call_that_does_not_return_after_its_answer_is_cancelled_in_the_end() -> None:
    async with running_fleet(1) as fleet:
        fleet.return_s = 60.0
        generation = fleet.generate(make_request(PROMPT, 3))
        await read_all(generation)
        generation.close()
        await until(lambda: fleet.num_cancelled == 1)
        assert not fleet._tasks


async def test_what_came_to_an_engine_that_was_silent_goes_on_sooner_and_is_no_suspect() -> None:
    async with running_fleet(2, silence_s=30.0, shun_s=0.05) as fleet:
        for replica in fleet.replicas.values():
            await replica.host.attend(fleet.server.address)
        await until(lambda: len(fleet.server.engines) == 2)
        fleet.replicas["e0"].hang()
        fleet.drain("e1")
        await asyncio.sleep(0.02)
        generation = fleet.generate(make_request(PROMPT))
        reading = asyncio.create_task(read_all(generation))
        await until(lambda: bool(fleet.placed))
        await asyncio.sleep(0.1)
        fleet.migrations.check_engines()
        assert "e0" in fleet.router.deprioritised
        fleet.add()
        assert tokens(await reading) == WHOLE
        assert [engine for engine, _ in fleet.placed] == ["e0", "e2"]
        assert not generation._state.num_deaths


async def test_drained_requests_move_at_once_and_are_aborted_where_they_were() -> None:
    async with running_fleet(2) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        old = fleet.replicas[engine_of(fleet)]
        fleet.drain(old.engine_id)
        fleet.pause(None)
        outputs += await read_all(generation)
        assert tokens(outputs) == WHOLE
        assert migrated(fleet, "drain") == 1
        await until(lambda: bool(old.engine.aborted))
        assert engine_of(fleet) != old.engine_id


async def test_the_last_replica_of_a_base_is_left_to_end_its_requests_itself() -> None:
    async with running_fleet(1) as fleet:
        fleet.replicas["e0"].engine.pause_at = 20  # it does not end before the other one comes
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        fleet.drain("e0")
        outputs += await read_some(generation, 5)
        assert engine_of(fleet) == "e0"
        fleet.add()  # now there is an elsewhere
        outputs += await read_all(generation)
        assert tokens(outputs) == WHOLE
        assert engine_of(fleet) == "e1"


async def test_drains_are_not_counted_as_deaths() -> None:
    async with running_fleet(2) as fleet:
        fleet.args = MigrationArgs(limit=1)
        fleet.pause(3)
        generation = fleet.generate(make_request(PROMPT))
        outputs: list[TokenOutput] = []
        for turn in range(1, 5):
            fleet.pause(3 * turn)
            outputs += await read_some(generation, 3)
            fleet.add()
            fleet.drain(engine_of(fleet))
            await until(lambda: engine_now(generation) is not None)
        fleet.pause(None)
        outputs += await read_all(generation)
        assert tokens(outputs) == WHOLE


async def test_without_another_replica_it_waits_for_the_replacement() -> None:
    async with running_fleet(1) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        fleet.replicas["e0"].kill()
        fleet.pause(None)
        rest = asyncio.get_running_loop().create_task(read_all(generation))
        await asyncio.sleep(0.1)
        fleet.add()
        assert tokens(outputs + await rest) == WHOLE


async def test_it_does_not_wait_longer_than_its_time_limit() -> None:
    async with running_fleet(1) as fleet:
        fleet.args = MigrationArgs(timeout_s=0.1)
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        await read_some(generation, 5)
        fleet.replicas["e0"].kill()
        fleet.pause(None)
        with pytest.raises(EngineDeadError, match="in time"):
            await read_all(generation)
        assert migrated(fleet, "death", "failed") == count(fleet, "lost") == 1


async def test_a_wait_behind_a_suspect_is_not_taken_off_its_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.dispatch.generation.MAX_HOLD_S", 1.5)
    async with running_fleet(3) as fleet:
        fleet.args = MigrationArgs(timeout_s=1.0)
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        turn = fleet.migrations.suspects(APP).join(is_exclusive=True)  # another request's
        fleet.replicas[engine_of(fleet)].kill()
        fleet.pause(None)
        outputs += await read_all(generation)
        assert tokens(outputs) == WHOLE
        turn.end()


async def test_a_suspect_that_is_refused_everywhere_meets_its_time_limit() -> None:
    async with running_fleet(2, rate=1.0) as fleet:  # no token before the death
        fleet.args = MigrationArgs(timeout_s=1.5)
        generation = fleet.generate(make_request(PROMPT))
        reading = asyncio.create_task(read_all(generation))
        await until(lambda: bool(fleet.placed))
        fleet.num_refusals = 1_000_000
        fleet.replicas[engine_of(fleet)].kill()
        with pytest.raises(OverloadedError):
            await reading
        assert generation._state.is_suspect


async def test_a_call_that_its_far_end_cancels_goes_on_elsewhere() -> None:
    async with running_fleet(2) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        (task,) = fleet._tasks
        task.cancel()  # as Serve cancels the calls of a replica that it stops
        fleet.pause(None)
        outputs += await read_all(generation)
        assert tokens(outputs) == WHOLE
        assert len(fleet.placed) == 2
        assert not generation._state.num_deaths


class _CancelledResponse:
    """Ray's own wrappers around a call whose task was cancelled at the replica."""

    _cancelled = False
    request_id = "request"
    __await__ = DeploymentResponse.__await__

    async def _fetch_future_result_async(self) -> _CancelledResponse:
        return self

    @ActorReplicaResult._process_response
    async def get_async(self) -> None:
        raise TaskCancelledError

    def cancel(self) -> None:
        raise AssertionError("nobody here cancels it")


async def test_a_far_ends_cancellation_fails_the_reader_as_ray_brings_it() -> None:
    server = StreamServer(EngineEvents())
    await server.listen("127.0.0.1")
    request = make_request(PROMPT)
    routing = make_routing_request([request], (), PacedEngine().model_limits)
    handle = SimpleNamespace(submit=SimpleNamespace(remote=lambda call: _CancelledResponse()))
    call = SubmitCall((request,), (), server.address, routing)
    attempt = Attempt(server, made_base(MigrationArgs(), handle), call)
    with pytest.raises(CallCancelledError):
        await asyncio.wait_for(attempt.stream.read(), 120)
    attempt.close(())
    server.close()


async def test_the_call_is_made_apart_from_the_http_request() -> None:
    """Ray finds the calls to cancel with a request by a variable of the context."""
    of_ray = ContextVar("of_ray", default="")
    seen: list[tuple[str, str, str]] = []

    def submit(call: SubmitCall) -> _CancelledResponse:
        request = _get_serve_request_context()
        seen.append((of_ray.get(), request._internal_request_id, request.request_id))
        return _CancelledResponse()

    of_ray.set("the request's task")
    _set_request_context(request_id="of-the-client", _internal_request_id="internal")
    server = StreamServer(EngineEvents())
    await server.listen("127.0.0.1")
    request = make_request(PROMPT)
    routing = make_routing_request([request], (), PacedEngine().model_limits)
    handle = SimpleNamespace(submit=SimpleNamespace(remote=submit))
    call = SubmitCall((request,), (), server.address, routing)
    Attempt(server, made_base(MigrationArgs(), handle), call).close(())
    server.close()
    assert seen == [("", "", "of-the-client")]


async def test_a_replica_gets_a_call_without_the_part_for_the_router() -> None:
    async with running_fleet(1) as fleet:
        generation = fleet.generate(make_request(PROMPT), session="s")
        await read_some(generation, 1)
        ((_, call),) = fleet.placed
        generation.close()
    assert call.routing.num_tokens == len(PROMPT)
    at_replica = pickle.loads(pickle.dumps(call))
    assert at_replica.routing == RoutingRequest(call.routing.call_id, num_tokens=0)
    assert replace(at_replica, routing=call.routing) == call


async def test_full_queues_are_waited_for() -> None:
    async with running_fleet(2) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await read_some(generation, 5)
        fleet.num_refusals = 3
        fleet.replicas[engine_of(fleet)].kill()
        fleet.pause(None)
        outputs += await read_all(generation)
        assert tokens(outputs) == WHOLE


async def test_a_full_queue_at_the_first_engine_is_the_clients_to_know() -> None:
    async with running_fleet(1) as fleet:
        fleet.num_refusals = 1
        with pytest.raises(OverloadedError):
            await read_all(fleet.generate(make_request(PROMPT)))


async def test_a_base_that_opted_out_fails_at_the_first_death() -> None:
    async with running_fleet(2) as fleet:
        fleet.args = MigrationArgs(limit=0)
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        await read_some(generation, 5)
        fleet.replicas[engine_of(fleet)].kill()
        fleet.pause(None)
        with pytest.raises(EngineDeadError):
            await read_all(generation)
        assert len(fleet.placed) == count(fleet, "lost") == 1


async def test_more_deaths_than_the_limit_end_it() -> None:
    async with running_fleet(4) as fleet:
        fleet.args = MigrationArgs(limit=2)
        fleet.pause(3)
        generation = fleet.generate(make_request(PROMPT))
        for turn in range(1, 4):
            fleet.pause(3 * turn)
            await read_some(generation, 3)
            fleet.replicas[engine_of(fleet)].kill()
        with pytest.raises(EngineDeadError):
            await read_all(generation)
        assert len(fleet.placed) == 3


async def test_a_client_that_leaves_while_it_moves_ends_it() -> None:
    async with running_fleet(1) as fleet:
        fleet.pause(5)
        generation = fleet.generate(make_request(PROMPT))
        await read_some(generation, 5)
        fleet.replicas["e0"].kill()
        fleet.pause(None)
        reading = asyncio.get_running_loop().create_task(read_all(generation))
        await asyncio.sleep(0.05)
        generation.fail(ClientGoneError())
        with pytest.raises(ClientGoneError):
            await reading
        generation.close()
        replica = fleet.add()
        await asyncio.sleep(0.05)
        assert replica.engine.load().num_running == 0
        assert fleet.server.num_open == 0


async def test_a_death_after_the_last_token_changes_nothing() -> None:
    async with running_fleet(2) as fleet:
        generation = fleet.generate(make_request(PROMPT, 3))
        outputs = await read_some(generation, 1)
        await until(lambda: fleet.replicas[engine_of(fleet)].engine.load().num_running == 0)
        await asyncio.sleep(0.05)
        fleet.replicas[engine_of(fleet)].kill()
        assert tokens(outputs + await read_all(generation)) == (11, 12, 13)
        assert len(fleet.placed) == 1


# Requests that kill their engine


@pytest.mark.parametrize(("token", "num_killed"), [(POISON_TOKEN, 2), (CRASH_TOKEN, 3)])
async def test_what_kills_its_engines_is_quarantined_and_twenty_others_are_answered(
    token: int, num_killed: int
) -> None:
    async with running_fleet(3, rate=100.0) as fleet:
        others = [fleet.generate(make_request((i + 1, i + 2), 60, name=f"o{i}")) for i in range(20)]
        reading = [asyncio.create_task(read_all(other)) for other in others]
        await until(lambda: all(engine_now(other) is not None for other in others))
        poison = fleet.generate(make_request((token, 1, 2), 60, name="poison"))
        reading.append(asyncio.create_task(read_all(poison)))
        while not reading[-1].done():
            if not fleet.num_up:
                fleet.add()
            await asyncio.sleep(0.01)
        with pytest.raises(RequestQuarantinedError):
            await reading.pop()
        if not fleet.num_up:
            fleet.add()
        for i, outputs in enumerate(await asyncio.gather(*reading)):
            assert tokens(outputs, 0, f"o{i}") == ((i + 1, i + 2) * 30)[:60]
        assert sum(replica.is_dead for replica in fleet.replicas.values()) == num_killed
        assert count(fleet, "quarantined") == 1
        again = make_request((token, 1, 2), 60, name="again")
        with pytest.raises(RequestQuarantinedError):
            fleet.generate(again)
        assert count(fleet, "lost") == 0


async def test_newcomers_that_die_with_a_poison_go_on_one_by_one_and_are_not_judged() -> None:
    async with running_fleet(1, rate=50.0) as fleet:
        names = [f"o{i}" for i in range(5)]
        requests = [make_request((5, 6, 7), 10, name=name) for name in names]
        poison = make_request((POISON_TOKEN, 6, 7), 10, name="poison")
        together = [fleet.generate(one) for one in (*requests[:3], poison, *requests[3:])]
        reading = [asyncio.create_task(read_all(one)) for one in together]
        while not reading[3].done():
            if not fleet.num_up:
                fleet.add()
            await asyncio.sleep(0.01)
        fleet.add()
        results = await asyncio.gather(*reading, return_exceptions=True)
        assert isinstance(results.pop(3), RequestQuarantinedError)
        assert all(isinstance(one, list) and len(one) == 10 for one in results)
        assert sum(replica.is_dead for replica in fleet.replicas.values()) == 2
