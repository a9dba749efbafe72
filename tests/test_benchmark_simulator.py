"""The simulator against theory, against the real scheduler, and against itself."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from engine.admission import EngineLimits
from engine.block_tables import BlockTables
from engine.blocks import BlockPool
from engine.scheduler import Scheduler
from engine.types import Request, Sample, SamplingParams, ScheduledBatch
from serve_app.autoscaling.policy import ScalingArgs
from serve_app.messages import RoutingRequest
from serve_app.routing.policy import Ranked
from serve_app.routing.score import expected_ttft
from serve_app.routing.view import ReplicaView
from tests.benchmarks.simulator.calibration import Calibration, h200
from tests.benchmarks.simulator.calls import Call
from tests.benchmarks.simulator.cluster import Cluster, ClusterArgs
from tests.benchmarks.simulator.expectation import Plan, run_plan
from tests.benchmarks.simulator.gate import GateArgs
from tests.benchmarks.simulator.line import measured_cost
from tests.benchmarks.simulator.pace import Pace, steps_s, steps_until
from tests.benchmarks.simulator.records import jain
from tests.benchmarks.simulator.scaler import Scaler
from tests.benchmarks.simulator.tiers import TierRoom, TierSpeeds
from tests.benchmarks.simulator.traffic import LogNormal, Traffic, TrafficArgs
from tests.fakes import FakePool, commit, make_config


class Shortest:
    """A policy of the tests' own: the fewest sequences, whatever else."""

    def rank(
        self, ask: RoutingRequest, replicas: Sequence[ReplicaView], now_s: float
    ) -> list[Ranked]:
        best = sorted(replicas, key=lambda one: one.num_sequences)[:2]
        return [Ranked(one, expected_ttft(ask, one)) for one in best]

    def changed(self, replica_ids: Sequence[str]) -> None:
        pass


def calibration(
    pace: Pace | None = None, *, runs_ahead: bool = False, kv_tokens: int = 1 << 20, rows: int = 64
) -> Calibration:
    return Calibration(
        "test",
        pace or Pace(0.01, 0.0001, 0.0002),
        EngineLimits(8192, 1000, kv_tokens, rows, 512),
        runs_ahead,
        TierSpeeds(copy_s=0.002, disk_s=0.05, registry_s=0.2),
        TierRoom(device_pages=4, host_pages=8, disk_pages=16),
        front_s=0.0,
        stream_s=0.0,
    )


def cluster(args: Calibration, replicas: int = 1, max_jump: int = 1 << 40) -> Cluster:
    return Cluster(ClusterArgs(args, replicas, lambda _: Shortest(), max_jump=max_jump))


def some_calls(count: int = 300, rate: float = 20.0, **args: object) -> Iterator[Call]:
    settings: dict[str, object] = {
        "num_adapters": 12,
        "system": LogNormal(100, 0.5, 32),
        "message": LogNormal(60, 1.0, 4, 1000),
        "output": LogNormal(20, 1.0, 1, 200),
        "think": LogNormal(1, 0.5),
    }
    return Traffic(TrafficArgs(count, rate, **(settings | args))).calls()  # type: ignore[arg-type]


def test_steps_of_growing_length_are_summed_and_found_again() -> None:
    draw = random.Random(1)
    for _ in range(200):
        first_s, growth_s = draw.uniform(0.001, 0.1), draw.choice((0.0, draw.uniform(0, 1e-3)))
        size = draw.randrange(1, 500)
        total_s = sum(first_s + i * growth_s for i in range(size))
        assert steps_s(first_s, growth_s, size) == pytest.approx(total_s)
        assert steps_until(first_s, growth_s, total_s - first_s / 2) == size
        assert steps_until(first_s, growth_s, total_s + first_s / 2) == size + 1


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_every_request_ends_once_with_all_its_tokens_in_order_of_time(runs_ahead: bool) -> None:
    service = cluster(calibration(runs_ahead=runs_ahead), 3)
    service.run(some_calls(400, 60.0))
    column = service.records.column
    assert sorted(column("index")) == list(range(400))
    assert (column("ttft_s") > 0).all()
    assert (column("duration_s") >= column("ttft_s")).all()
    for engine in service.engines.values():
        assert engine.is_idle
        assert engine.num_calls == 0
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.queued_tokens) == (0, 0, 0)
        assert load.num_free_blocks == load.num_blocks
    for view in service.ingresses[0].views.replicas:
        assert (len(view._placed), view.num_sequences, view.queued_tokens) == (0, 0, 0)


def test_a_run_is_a_function_of_its_seed() -> None:
    def run(seed: int) -> list[float]:
        service = cluster(calibration(), 2)
        service.run(some_calls(200, 40.0, seed=seed))
        return list(service.records.column("ttft_s"))

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("kv_token_s", [0.0, 1e-6])
def test_many_steps_at_once_give_the_times_of_single_ones(
    runs_ahead: bool, kv_token_s: float
) -> None:
    numbers = calibration(Pace(0.01, 0.0001, 0.0002, kv_token_s), runs_ahead=runs_ahead)
    found = []
    for max_jump in (1, 1 << 40):
        service = cluster(numbers, 2, max_jump)
        service.run(some_calls(300, 10.0, output=LogNormal(100, 1.0, 1, 900)))
        order = np.argsort(service.records.column("index"))
        times = [service.records.column(name)[order] for name in ("ttft_s", "duration_s")]
        found.append((np.concatenate(times), service.loop.num_events))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-9)
    assert found[1][1] < found[0][1] / 2


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_times_are_those_of_the_real_scheduler(runs_ahead: bool) -> None:
    """Has no prefixes and adapters: with blocks instead of tokens, hits would differ a little."""
    numbers = calibration(runs_ahead=runs_ahead, rows=8)
    calls = list(some_calls(120, 12.0, num_adapters=0, turns=1, base_share=1.0))
    for call in calls:
        call.prefixes = call.prefixes_after = ()
    wanted = _real_first_tokens(numbers, calls)
    service = cluster(numbers)
    service.run(iter(calls))
    found = {call.index: call.first_s for call in calls}
    # The last token of a prompt, when it is alone in its step, counts as a decode there.
    assert found == pytest.approx(wanted, abs=5e-4)
    assert max(call.first_s - call.arrived_s for call in calls) > 0.5  # there were queues


def _real_first_tokens(numbers: Calibration, calls: Sequence[Call]) -> dict[int, float]:
    """The real scheduler in virtual time; with runs_ahead a step is planned while one runs."""
    limits = numbers.limits
    config = make_config(
        block_size=16,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        enable_prefix_caching=False,
    )
    blocks = BlockPool(limits.max_kv_tokens // 16, 16, "base", can_share=False)
    cost = measured_cost(numbers.pace, limits)
    scheduler = Scheduler(config, BlockTables(blocks), FakePool(), (0,), 8192, cost=cost)
    coming = list(calls)
    first_s: dict[int, float] = {}
    now_s = end_s = 0.0
    flight: ScheduledBatch | None = None

    def collect(batch: ScheduledBatch) -> None:
        samples = [Sample(7 if item.samples else None) for item in batch.sequences]
        for output in commit(scheduler, batch, samples):
            first_s.setdefault(int(output.request_id), now_s)

    while coming or scheduler.has_work:
        if not scheduler.has_work and flight is None:
            now_s = max(now_s, coming[0].arrived_s)
        while coming and coming[0].arrived_s <= now_s:
            call = coming.pop(0)
            params = SamplingParams(max_tokens=call.num_output, ignore_eos=True)
            scheduler.add(Request(str(call.index), (1,) * call.num_prompt, params), 0)
        batch = scheduler.schedule()
        start_s = max(now_s, end_s)
        if flight is not None:
            now_s = end_s
            collect(flight)
            flight = None
        if not batch.sequences:
            continue
        prompts = [i for i in batch.sequences if i.start < i.sequence.num_prompt_tokens]
        num_tokens = sum(item.end - item.start for item in prompts)
        num_decoding = len(batch.sequences) - len(prompts)
        end_s = start_s + numbers.pace.step_s(num_tokens, num_decoding, 0)
        if numbers.runs_ahead:
            flight = batch
        else:
            now_s = end_s
            collect(batch)
    return first_s


def test_a_queue_of_one_server_waits_as_theory_says() -> None:
    """M/D/1: prompts of one length, one a step, no tokens after the first: the mean wait is
    rho s / 2 (1 - rho)."""
    step_s, rho = 0.1, 0.7
    numbers = calibration(Pace(0.0, step_s / 512, 0.0))
    calls = some_calls(
        20000,
        rho / step_s,
        num_adapters=0,
        base_share=1.0,
        turns=1,
        system=LogNormal(1, 0.0, 1, 1),
        message=LogNormal(511.001, 0.0),
        output=LogNormal(1, 0.0, 1, 1),
    )
    service = cluster(numbers)
    service.run(calls)
    wait_s = service.records.column("ttft_s").mean() - step_s
    assert wait_s == pytest.approx(rho * step_s / (2 * (1 - rho)), rel=0.08)


def test_a_full_cache_preempts_the_youngest_and_all_end_nevertheless() -> None:
    service = cluster(calibration(kv_tokens=1024, rows=16))
    calls = list(
        some_calls(60, 50.0, message=LogNormal(100, 0.5, 10, 300), output=LogNormal(100, 0.3))
    )
    service.run(iter(calls))
    assert len(service.records) == 60
    assert next(iter(service.engines.values())).num_preemptions > 0
    load = next(iter(service.engines.values())).load()
    assert load.num_free_blocks == load.num_blocks


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_requests_of_a_replica_that_goes_end_elsewhere_with_all_their_tokens(
    runs_ahead: bool,
) -> None:
    service = cluster(calibration(runs_ahead=runs_ahead), 2)
    calls = list(some_calls(120, 60.0, output=LogNormal(60, 0.5)))
    moved: list[Call] = []

    def go(_: object) -> None:
        service.tell_replicas(service.names[:1])
        moved.extend(service.engines[service.names[1]].abandon())
        for call in moved:
            service.resume(call)

    service.loop.at(1.0, go)
    service.run(iter(calls))
    assert len(service.records) == 120
    assert any(0 < call.num_done < call.num_output for call in moved)
    for call in moved:
        assert call.replica == 0
        assert call.first_s <= call.ended_s
        assert call.last_step - call.first_step == call.num_output - call.num_done - 1
    load = service.engines[service.names[0]].load()
    assert load.num_free_blocks == load.num_blocks


def test_the_fair_queue_shares_and_refuses_what_is_too_much() -> None:
    gate = GateArgs(max_waiting=64, max_queue_s=20.0)
    made = ClusterArgs(calibration(rows=8), 1, lambda _: Shortest(), gate=gate)
    service = Cluster(made)
    calls = some_calls(1500, 60.0, tenants=(1.0, 9.0), num_adapters=0, turns=1, base_share=1.0)
    service.run(calls)
    queue = service.ingresses[0].gate
    assert queue is not None
    assert len(queue) == 0
    records = service.records
    assert len(records) + sum(queue.refused.values()) == 1500
    ended_s = records.column("arrived_s") + records.column("duration_s")
    inside = (ended_s > 5) & (ended_s < 20)
    tokens = (records.column("prompt") + 2 * records.column("output"))[inside]
    of_first = records.tenants()[inside] == records.code_of("tenant-0")
    assert jain([tokens[of_first].sum(), tokens[~of_first].sum()]) > 0.95


def test_the_scaling_rule_follows_a_load_and_loses_nobody() -> None:
    service = cluster(calibration(rows=16))
    calls = some_calls(3000, 20.0, curve=((0, 0.2), (20, 0.2), (21, 4), (60, 4), (61, 0.1)))
    args = ScalingArgs(1, 4, upscale_delay_s=1, downscale_delay_s=5)
    scaler = Scaler(service, args, start_s=3.0, until_s=150.0)
    service.run(calls)
    assert len(service.records) == 3000
    assert max(running for _, running, _ in scaler.curve) > 1
    assert all(1 <= wanted <= 4 for _, _, wanted in scaler.curve)


def test_an_adapter_costs_what_its_tier_costs() -> None:
    numbers = calibration()
    service = cluster(numbers)
    calls = [Call(i, 10.0 * i, 64, 2, f"a{i % 6}") for i in range(12)]
    calls += [Call(12, 120.0, 64, 2, "a5"), Call(13, 130.0, 64, 2, "a0")]
    service.run(iter(calls))
    assert [call.found_in for call in calls[:6]] == ["registry"] * 6
    assert [call.found_in for call in calls[6:12]] == ["host"] * 6  # four on the device, in turns
    assert [call.found_in for call in calls[12:]] == ["device", "host"]
    step_s = numbers.pace.step_s(64, 0, 0)
    ttft_s = [call.first_s - call.arrived_s for call in calls]
    assert ttft_s[0] == pytest.approx(0.05 + 0.2 + 0.002 + step_s)
    assert ttft_s[12] == pytest.approx(step_s)
    assert ttft_s[13] == pytest.approx(0.002 + step_s)


def test_a_cached_prefix_is_not_computed_again() -> None:
    service = cluster(calibration())
    names = tuple(range(10))
    calls = [Call(i, 5.0 * i, 330, 40, prefixes=names, prefixes_after=names) for i in range(2)]
    calls.append(Call(2, 10.0, 330, 40, prefixes=(*names[:3], *range(100, 107))))
    service.run(iter(calls))
    assert [call.num_cached for call in calls] == [0, 320, 96]
    assert calls[1].first_s - calls[1].arrived_s == pytest.approx(0.01 + 10 * 0.0001)


def test_traffic_is_what_its_arguments_say() -> None:
    args = TrafficArgs(
        20000, 100.0, burstiness=2.0, num_adapters=50, turns=3.0, think=LogNormal(1, 0.5)
    )
    calls = list(Traffic(args).calls())
    gaps = np.diff([call.arrived_s for call in calls])
    assert gaps.mean() == pytest.approx(0.01, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.1)
    sessions = {call.session for call in calls}
    assert 2.0 < len(calls) / len(sessions) < 4.0
    counts = np.sort(np.unique([call.adapter for call in calls], return_counts=True)[1])[::-1]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.4)  # the exponent is 1
    assert all(call.num_prompt + call.num_output <= args.max_context for call in calls)
    assert all(len(call.prefixes) == call.num_prompt // args.chunk for call in calls[:500])


def test_a_curve_bends_the_arrivals_and_keeps_their_number() -> None:
    args = TrafficArgs(5000, 100.0, num_adapters=0, turns=1, curve=((0, 0.2), (10, 1.8), (20, 0.2)))
    times = np.asarray([call.arrived_s for call in Traffic(args).calls()])
    middle, edge = ((times % 20 > 5) & (times % 20 < 15)).sum(), (times % 20 < 2).sum()
    assert times[-1] == pytest.approx(50, rel=0.1)
    assert middle / 10 > 3 * edge / 2


def test_the_numbers_of_the_h200_are_those_measured() -> None:
    numbers = h200()
    gap_ms = 1000 * numbers.pace.step_s(0, 32, 32 * 320)
    assert gap_ms == pytest.approx(6.44, rel=0.05)  # on-r16x32-n32
    prefill_s = numbers.pace.step_s(3900, 0, 0)
    assert prefill_s == pytest.approx(0.0998, rel=0.1)  # prefill 3900, 1 adapter
    assert set(numbers.sources)


def test_jains_index() -> None:
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25


@pytest.mark.parametrize(("load", "worst"), [(0.2, 0.15), (0.5, 0.2), (0.8, 0.3)])
def test_expected_first_tokens_are_near_those_that_come(load: float, worst: float) -> None:
    """Compares most requests: more adapters than room on the device, and prompts in a queue."""
    sent = run_plan(Plan(75 * load, int(75 * load * 8)))
    errors = [one.error for one in sent[len(sent) // 5 :]]
    assert len(errors) > 90
    assert statistics.median(errors) < worst
