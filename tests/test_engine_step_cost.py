"""The cost of steps, fitted to times with noise, exceptions and changes."""

from __future__ import annotations

import math
import random

import pytest

from engine.step_cost import LongestSteps, StepCost
from tests.fakes import FakeRunner, make_engine, make_request

TRUE = (0.006, 4e-5, 3e-5)


def seconds(tokens: int, sequences: int, cost: tuple[float, float, float] = TRUE) -> float:
    return cost[0] + cost[1] * tokens + cost[2] * sequences


def expected(cost: StepCost, tokens: int, sequences: int) -> float:
    return seconds(tokens, sequences, (cost.fixed_s, cost.token_s, cost.sequence_s))


def mixed_steps(generator: random.Random, count: int) -> list[tuple[int, int]]:
    return [
        (generator.choice([0, 0, 0, generator.randint(10, 4000)]), generator.randint(1, 128))
        for _ in range(count)
    ]


def test_nothing_is_known_before_the_first_steps() -> None:
    cost = StepCost()
    assert (cost.fixed_s, cost.token_s, cost.sequence_s) == (0.0, 0.0, 0.0)
    for _ in range(10):
        cost.observe(0, 4, 0.01)
    assert expected(cost, 0, 4) == pytest.approx(0.01, rel=0.05)
    assert cost.token_s == 0.0


def test_exact_times_give_back_their_three_parts() -> None:
    cost = StepCost()
    for tokens, sequences in mixed_steps(random.Random(0), 400):
        cost.observe(tokens, sequences, seconds(tokens, sequences))
    assert (cost.fixed_s, cost.token_s, cost.sequence_s) == pytest.approx(TRUE, rel=0.03)


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_exceptions_move_the_fit_little(seed: int) -> None:
    generator, cost = random.Random(seed), StepCost()
    worst = 1.0
    for i, (tokens, sequences) in enumerate(mixed_steps(generator, 600)):
        took_s = seconds(tokens, sequences) * generator.lognormvariate(0, 0.1)
        if i < 3 or generator.random() < 0.02:  # compiled, or put to sleep
            took_s *= generator.choice([20, 300])
        cost.observe(tokens, sequences, took_s)
        if i > 100:
            for probe in ((0, 64), (2000, 64)):
                ratio = expected(cost, *probe) / seconds(*probe)
                worst = max(worst, ratio, 1 / ratio)
    assert worst < 2.0
    assert expected(cost, 0, 64) == pytest.approx(seconds(0, 64), rel=0.25)


@pytest.mark.parametrize("exceptions", [(10.0,), (10.0, 3.0, 5.0), (0.01, 30.0, 0.05, 30.0)])
def test_a_beginning_of_compilations_is_soon_forgotten(exceptions: tuple[float, ...]) -> None:
    cost = StepCost()
    for i in range(40):
        tokens = 0 if i % 2 else 1000
        cost.observe(tokens, 1, exceptions[i] if i < len(exceptions) else seconds(tokens, 1))
    assert expected(cost, 0, 1) == pytest.approx(seconds(0, 1), rel=0.2)
    assert expected(cost, 1000, 1) == pytest.approx(seconds(1000, 1), rel=0.3)


def test_decoding_for_long_does_not_wear_off_what_a_prompt_token_costs() -> None:
    generator, cost = random.Random(1), StepCost()
    for tokens, sequences in mixed_steps(generator, 200):
        cost.observe(tokens, sequences, seconds(tokens, sequences))
    for _ in range(5000):
        cost.observe(0, 64, seconds(0, 64) * generator.lognormvariate(0, 0.05))
    assert expected(cost, 0, 64) == pytest.approx(seconds(0, 64), rel=0.05)
    assert cost.token_s == pytest.approx(TRUE[1], rel=0.1)


def test_a_device_that_became_slower_is_followed_and_one_that_recovered_too() -> None:
    generator, cost = random.Random(2), StepCost()
    for factor in (1, 5, 1):
        for tokens, sequences in mixed_steps(generator, 800):
            cost.observe(tokens, sequences, factor * seconds(tokens, sequences))
        for probe in ((0, 64), (2000, 64)):
            assert expected(cost, *probe) == pytest.approx(factor * seconds(*probe), rel=0.35)


def test_no_part_is_ever_negative() -> None:
    generator, cost = random.Random(3), StepCost()
    for tokens, sequences in mixed_steps(generator, 500):
        cost.observe(tokens, sequences, max(0.0, 0.02 - 1e-4 * sequences - 1e-6 * tokens))
        assert min(cost.fixed_s, cost.token_s, cost.sequence_s) >= 0.0


class Clock:
    """A clock by which each call of the runner's device lasts as long as TRUE defines."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("is_host_slow", [False, True])
@pytest.mark.parametrize("runs_ahead", [True, False])
def test_the_engine_measures_its_own_steps(runs_ahead: bool, is_host_slow: bool) -> None:
    clock = Clock()

    class TimedRunner(FakeRunner):
        def launch(self, batch):  # type: ignore[no-untyped-def]
            step = super().launch(batch)
            num_prompt = batch.num_tokens - batch.num_decoding
            took_s = seconds(num_prompt, batch.num_decoding)
            # Prompts are launched kernel by kernel: the device may be done before the host is.
            launch_s = took_s if num_prompt and is_host_slow else 0.0
            clock.now_s += launch_s

            class Timed:
                def draw(self):  # type: ignore[no-untyped-def]
                    pass

                def collect(self):  # type: ignore[no-untyped-def]
                    clock.now_s += took_s - launch_s
                    return step.collect()

            return Timed()

    runner = TimedRunner(num_blocks=512)
    runner.runs_ahead = runs_ahead
    engine, _ = make_engine(runner, clock=clock, max_num_seqs=32, enable_prefix_caching=False)
    generator = random.Random(0)
    for i in range(150):
        clock.now_s += 3.0  # nothing to do for so long
        for j in range(generator.randint(1, 16)):
            engine.add_request(make_request(f"{i}/{j}", generator.randint(2, 60)))
        while engine.has_work:
            engine.step()
    load = engine.load()
    found = (load.step_fixed_s, load.step_token_s, load.step_sequence_s)
    assert found == pytest.approx(TRUE, rel=0.1)


def test_how_long_a_step_may_take_follows_the_longest_of_its_size() -> None:
    longest = LongestSteps()
    for _ in range(31):
        longest.observe(0, 0.01)
        assert longest.expect(0) == math.inf  # kernels may have to be compiled yet
    longest.observe(100, 0.5)
    assert longest.expect(0) == 0.01
    assert longest.expect(70) == 0.5  # of that size: a power of two
    assert longest.expect(2000) == 0.5 * 2**4
    assert longest.expect(10) == 0.01 * 2**4
    longest.observe(2000, 3.0)
    assert longest.expect(2000) == 3.0
    for _ in range(100):
        longest.observe(2000, 1.0)
    assert longest.expect(2000) == 1.0  # what is long ago is forgotten
