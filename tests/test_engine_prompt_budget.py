"""The prompt tokens that a step gets while other sequences decode."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from engine.decode_graphs import GraphKey
from engine.inputs import LoraReach
from engine.mixed_graphs import SIZES, MixedGraphs
from engine.prompt_budget import prompt_budget
from engine.step_cost import StepCost
from tests.benchmarks.report import percentile
from tests.benchmarks.simulator.gaps import OFF, Seen, burst, h200_step_s, open_loop, run_engine
from tests.fakes import make_config, make_request, make_scheduler, ranges, run_step

CONFIG = EngineConfig("", "", max_num_batched_tokens=8192, max_num_seqs=256)
GRAPHS_END = 1024  # tokens of the largest step that is a graph, on the machines below


def measured(decoding: tuple[int, ...] = (1, 4, 16, 64, 256)) -> StepCost:
    """The cost of steps as an H200 has them, after 200 steps of several sizes."""
    cost = StepCost()
    for i in range(200):
        num_prompt, num_decoding = (0, 300, 900, 4096)[i % 4], decoding[i // 4 % len(decoding)]
        cost.observe(num_prompt, num_decoding, h200_step_s(num_prompt, num_decoding))
    return cost


def test_nothing_that_decodes_leaves_the_whole_step_to_prompts() -> None:
    assert prompt_budget(CONFIG, measured(), 0, 9, 50_000) == 8192


def test_before_the_first_measured_steps_a_step_has_512_tokens() -> None:
    assert prompt_budget(CONFIG, StepCost(), 12, 20, 5000) == 500
    only_prompts = StepCost()
    for _ in range(2 + 3):  # the first two of a process do not count
        only_prompts.observe(900, 3, 0.02)
    assert prompt_budget(CONFIG, only_prompts, 12, 20, 5000) == 500


def test_after_a_few_steps_with_prompts_a_step_without_is_measured() -> None:
    cost = StepCost()
    for _ in range(2 + 4):
        cost.observe(900, 3, 0.02)
    assert prompt_budget(CONFIG, cost, 12, 20, 5000) == 0
    assert prompt_budget(CONFIG, cost, 0, 20, 5000) == 8192
    cost.observe(0, 12, 0.005)
    assert prompt_budget(CONFIG, cost, 12, 20, 5000) > 500


def test_the_first_step_without_prompts_is_measured_whatever_its_number() -> None:
    """Later only every fourth is, and until then prompts had no tokens."""
    cost = StepCost()
    for index in range(70):
        cost.observe(900, 3 if index > 60 else 0, 0.02)
    assert prompt_budget(CONFIG, cost, 12, 20, 5000) == 0
    cost.observe(0, 12, 0.005)
    assert prompt_budget(CONFIG, cost, 12, 20, 5000) > 0


def test_the_first_burst_of_a_process_is_as_quick_as_the_next_ones() -> None:
    """No step was without prompts until its last prompt, so that none was measured: the whole burst
    had 512 tokens a step, and a tenth fewer tokens a second than later ones."""
    bursts = [replace(one, at_s=one.at_s + 10 * turn) for turn in range(2) for one in burst(256)]
    seen = run_engine(bursts, 2.5, 2048, num_singles=0)
    rates = []
    for turn in range(2):
        names = [str(256 * turn + index) for index in range(256)]
        last_s = max(seen.times_s[name][-1] for name in names)
        rates.append(256 * 128 / (last_s - min(seen.arrived_s[name] for name in names)))
    assert rates[0] > 0.97 * rates[1]
    assert sum(not num_prompt for num_prompt, _, _ in seen.steps[:40]) <= 3


@pytest.mark.parametrize("num_decoding", [1, 16, 64, 128, 256])
def test_a_step_with_prompts_lasts_a_small_multiple_of_one_without(num_decoding: int) -> None:
    count = prompt_budget(CONFIG, measured(), num_decoding, num_decoding + 1, 500)
    slowdown = h200_step_s(count, num_decoding) / h200_step_s(0, num_decoding)
    assert 1.5 < slowdown < 3
    assert count >= 180  # their products last as long as the read of the weights


@pytest.mark.parametrize("queued_tokens", [500, 5000, 50_000])
@pytest.mark.parametrize("num_decoding", [1, 16, 64, 128, 256])
def test_a_step_has_a_size_that_the_device_computes_well(
    num_decoding: int, queued_tokens: int
) -> None:
    count = prompt_budget(CONFIG, measured(), num_decoding, num_decoding + 1, queued_tokens)
    total = count + num_decoding
    assert total % (128 if total <= 1024 else 256) == 0


def test_large_steps_are_hardly_padded() -> None:
    """The device takes longer than the host for a prompt of so many tokens: padding shows."""
    kv = SimpleNamespace(blocks=None)
    graphs = MixedGraphs(SIZES, None, kv, None, None, ())  # type: ignore[arg-type]
    assert graphs.size_for(100) is None  # nothing is captured
    graphs._graphs = {GraphKey(64, LoraReach.NONE): ()}
    found = {count: graphs.size_for(count) for count in (1, 65, 897, 1024, 1025, 1199, 1200, 1280)}
    assert found == {
        1: 64,
        65: 128,
        897: 1024,
        1024: 1024,
        1025: None,
        1199: None,
        1200: 1280,
        1280: 1280,
    }
    assert [graphs.size_for(count) for count in (1679, 1680, 2048, 2049)] == [
        None,
        1792,
        2048,
        None,
    ]


def test_a_burst_is_measured_by_the_steps_that_it_will_have() -> None:
    cost = measured()
    alone, first = (prompt_budget(CONFIG, cost, 8, n, 500) for n in (8, 256))
    assert h200_step_s(first, 8) < 3 * h200_step_s(0, 256)
    assert first > 1.5 * alone


def test_large_batches_are_not_guessed_from_small_ones() -> None:
    cost = measured(decoding=(1, 2, 3, 5))
    count = prompt_budget(CONFIG, cost, 128, 256, 500)
    assert h200_step_s(count, 128) < 3 * h200_step_s(0, 256)


def test_prompts_that_look_free_do_not_grow_beyond_what_was_measured() -> None:
    """The device waits for the weights with few sequences, and prompt tokens cost no time."""
    cost = StepCost()
    for i in range(40):
        cost.observe((0, 100)[i % 2], 2, 0.0045)
    assert prompt_budget(CONFIG, cost, 2, 2, 500) == 510


def test_steps_of_equal_size_do_not_make_prompts_look_expensive() -> None:
    cost = StepCost()
    for num_decoding in (1, 30, 40, 60) * 8:
        cost.observe(0, num_decoding, h200_step_s(0, num_decoding))
    for i in range(300):
        num_decoding = 36 + i % 4
        cost.observe(256 - num_decoding, num_decoding, h200_step_s(256, 0))
    assert cost.added_token_s == pytest.approx(24.5e-6, rel=0.1)


def test_prompts_that_queue_get_steps_that_are_worth_the_read_of_the_weights() -> None:
    cost = measured()
    first, queueing = (prompt_budget(CONFIG, cost, 8, 9, n) for n in (500, 10_000))
    assert first < 300
    assert 20e-3 < h200_step_s(queueing, 8) < 30e-3


def test_prompts_that_queue_on_a_fast_device_get_steps_that_nobody_notices() -> None:
    cost = StepCost()
    for i in range(200):
        num_prompt, num_decoding = (0, 300, 900, 2048)[i % 4], (4, 16, 64, 256)[i // 4 % 4]
        cost.observe(num_prompt, num_decoding, h200_step_s(num_prompt, num_decoding) / 3)
    first, queueing = (prompt_budget(CONFIG, cost, 256, 256, n) for n in (500, 40_000))
    assert h200_step_s(first, 256) / 3 < 2.6 * cost.decode_s(256) < 0.012
    assert 0.02 < h200_step_s(queueing, 256) / 3 < 0.026


def test_prompts_that_queue_stay_in_the_graphs_where_larger_steps_compute_them_slower() -> None:
    """Steps of 512 tokens are graphs here and last 11 ms; of 640, which 25 ms allow,
    25."""
    cost = StepCost()
    for i in range(200):
        num_prompt = (0, 284, 412, 540, 668)[i % 5]
        cost.observe(
            num_prompt, 100, (0.0025 if num_prompt < 500 else 0.016) + 14e-6 * (num_prompt + 100)
        )
    assert prompt_budget(CONFIG, cost, 100, 100, 20_000) == 412


def test_slow_steps_at_the_ends_of_bursts_leave_the_bound_as_it_is() -> None:
    """The last sequences of a burst run alone, with nothing launched beside them. Taken for the
    read of the weights, their steps allowed 31 ms instead of 26, a fifth more than the bound."""
    costs = [StepCost(), StepCost()]
    for cost, single_s in zip(costs, (h200_step_s(0, 1), 0.0052), strict=True):
        for i in range(200):
            num_prompt, num_decoding = (0, 300, 900, 768)[i % 4], (4, 16, 64, 256)[i // 4 % 4]
            cost.observe(num_prompt, num_decoding, h200_step_s(num_prompt, num_decoding))
        for _ in range(40):
            cost.observe(0, 1, single_s)
    for cost in costs:
        assert cost.weights_s == pytest.approx(h200_step_s(0, 1), rel=0.05)
        assert prompt_budget(CONFIG, cost, 56, 256, 40_000) == 1024 - 56


def test_the_read_of_the_weights_is_estimated_from_large_steps_alone() -> None:
    assert StepCost().weights_s == 0.0
    cost = StepCost()
    for i in range(80):
        num_prompt = (0, 700)[i % 2]
        cost.observe(num_prompt, 64, h200_step_s(num_prompt, 64))
    assert cost.weights_s == pytest.approx(h200_step_s(0, 1), rel=0.1)
    for _ in range(80):
        cost.observe(0, 64, 0.002)  # far less than what so many prompt tokens cost
    assert cost.weights_s >= 0.001


def test_a_measured_step_of_one_sequence_is_not_made_shorter_by_large_ones() -> None:
    """Where the host launches steps with prompts, a token of these costs more than a sequence."""
    cost = StepCost()
    for i in range(300):
        cost.observe(0, 1, 0.005)
        cost.observe(0, 256, 0.0055)
        if i > 6:
            cost.observe(128, 1, 0.016)
    assert cost.weights_s == pytest.approx(cost.decode_s(1), rel=0.01)


def test_a_long_queue_of_prompts_gets_larger_and_larger_steps() -> None:
    cost = measured()
    counts = [prompt_budget(CONFIG, cost, 32, 64, n) for n in (0, 20_000, 100_000, 4_000_000)]
    assert counts[0] < counts[1] < counts[2] < counts[3] == 8192 - 32


def test_max_num_batched_tokens_remains_the_limit() -> None:
    config = make_config(max_num_batched_tokens=100)
    assert prompt_budget(config, measured(), 8, 9, 5000) == 92
    assert prompt_budget(config, measured(), 100, 101, 5000) == 1  # prompts always get on


def test_the_oldest_prompt_takes_the_chunk_and_decodes_go_on() -> None:
    scheduler, _ = make_scheduler(400, max_num_batched_tokens=2048)
    scheduler.add(make_request("a", 3, max_tokens=9), 0)
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 0, 3)]
    scheduler.add(make_request("b", [9] * 700), 0)
    scheduler.add(make_request("c", [5] * 500), 0)
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 3, 4), ("b", 0, 0, 511)]
    batch = run_step(scheduler)[0]
    assert ranges(batch) == [("a", 0, 4, 5), ("b", 0, 511, 700), ("c", 0, 0, 322)]
    assert batch.num_tokens == 512
    batch = run_step(scheduler)[0]
    assert ranges(batch) == [("a", 0, 5, 6), ("b", 0, 700, 701), ("c", 0, 322, 500)]


def launched_s(num_prompt: int, num_decoding: int) -> float:
    """Returns the seconds of a step of two H200s, in FP8 with 32 adapters: the host launches steps
    with prompts as slowly whatever their prompts, and those beyond the graphs more slowly."""
    if not num_prompt:
        return 0.0023 + 16e-6 * num_decoding
    tokens = num_prompt + num_decoding
    launch_s = (0.015 if tokens <= GRAPHS_END else 0.034) + 20e-6 * num_decoding
    return max(launch_s, 0.004 + 9e-6 * tokens)


def test_steps_that_the_host_launches_are_filled() -> None:
    """The bound alone shrank prompts to 100 tokens a step, which are no quicker: two bursts took
    6.4 s."""
    again = [replace(one, at_s=one.at_s + 20) for one in burst(256)]
    seen = run_engine([*burst(256), *again], 2.5, 8192, step_s=launched_s)
    beside = [one for one in seen.steps if one[0] and one[1]]
    full = [one for one in beside if one[0] + one[1] > 640]
    assert len(full) > 0.9 * len(beside)
    assert sum(seconds for _, _, seconds in beside) < 3.3
    assert percentile(seen.gaps_s(), 95) < 1.1 * launched_s(512, 256)


@pytest.mark.parametrize("launch_s", [0.016, 0.025])
def test_a_looser_bound_never_makes_steps_of_one_time_smaller(launch_s: float) -> None:
    """Rounding down swallowed what a step had room for, while it took as long anyway."""
    counts = []
    for slowdown in (1.8, 2.0, 2.1, 2.4, 2.6, 3.0):
        config = replace(CONFIG, max_decode_slowdown=slowdown)
        cost = StepCost()
        num_prompt = 128
        for _ in range(200):
            for _ in range(4):
                cost.observe(0, 256, 0.0095)
                cost.observe(0, 1, 0.003)
            tokens = num_prompt + 256
            slow_s = 0.0 if tokens <= GRAPHS_END else 0.034
            cost.observe(num_prompt, 256, max(launch_s, slow_s, 0.004 + 9e-6 * tokens))
            num_prompt = prompt_budget(config, cost, 256, 256, 1000)
        counts.append(num_prompt)
    assert min(counts) >= 640, counts


def test_a_size_that_turned_slow_is_tried_no_more() -> None:
    """Steps beyond the graphs last twice as long: chunks stay below them."""
    cost = StepCost()
    for i in range(40):
        cost.observe(0, (1, 256)[i % 2], launched_s(0, (1, 256)[i % 2]))
        num_prompt = (128, 256, 640, 768, 1024)[i % 5]
        cost.observe(num_prompt, 256, launched_s(num_prompt, 256))
    assert 512 <= prompt_budget(CONFIG, cost, 256, 256, 500) <= 768


def test_a_device_that_computes_longer_for_more_tokens_keeps_the_bound() -> None:
    cost = measured()
    for num_prompt in (128, 256, 384, 512, 640):
        for _ in range(4):
            cost.observe(num_prompt, 128, 1.3 * h200_step_s(num_prompt, 128))
    count = prompt_budget(CONFIG, cost, 128, 129, 500)
    assert 1.3 * h200_step_s(count, 128) < 2.6 * cost.decode_s(128)


def gap_ratio(seen: Seen) -> float:
    gaps = seen.gaps_s()
    return percentile(gaps, 99) / percentile(gaps, 50)


def test_streams_stay_even_while_long_prompts_arrive() -> None:
    arrivals = open_loop(10.0, 60)
    usual = EngineConfig("", "").max_decode_slowdown
    with_bound, without = (run_engine(arrivals, bound, 8192) for bound in (usual, OFF))
    assert gap_ratio(with_bound) < 4 < 8 < gap_ratio(without)
    assert max(with_bound.gaps_s()) < 0.03 < 0.06 < max(without.gaps_s())
    assert max(with_bound.ttft_s()) < 0.1 + max(without.ttft_s())
    assert with_bound.tokens_per_s() > 0.98 * without.tokens_per_s()


def test_a_burst_stays_even_and_loses_little_throughput() -> None:
    usual = EngineConfig("", "").max_decode_slowdown
    with_bound, without = (run_engine(burst(256), bound, 2048) for bound in (usual, OFF))
    assert gap_ratio(with_bound) <= 3 < 4.5 < gap_ratio(without)
    assert with_bound.tokens_per_s() > 0.95 * without.tokens_per_s()
    assert max(with_bound.ttft_s()) < 1.25 * max(without.ttft_s())
