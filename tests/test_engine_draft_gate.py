"""The gate of drafts: it opens where they save time, and costs nothing where they do not."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from operator import mul
from typing import ClassVar

import pytest

from engine.core import Engine
from engine.draft_gate import Acceptance, Acceptances, DraftGate
from engine.drafts import Draft
from engine.sampler import by_sequence
from engine.types import Sample, ScheduledBatch, Sequence
from tests.fakes import FakeRunner, FakeStep, make_config, make_request
from tests.speculation_helpers import Script, ScriptedDrafter

Seconds = Callable[[int, int], float]  # of a step, by its sequences and tokens of drafts

COSTS: dict[str, Seconds] = {
    # The weights are read once, whatever the rows: an idle GPU.
    "memory": lambda sequences, drafted: 8e-3 + 5e-5 * (sequences + drafted),
    # A graph replays 32 rows almost as fast as 160; without drafts the host's work is hidden.
    "graphs": lambda sequences, drafted: (
        6.3e-3 + 8e-6 * (sequences + drafted) + 1e-3 * (drafted > 0)
    ),
    # Every row costs alike: a full GPU, or a CPU beside many sequences.
    "compute": lambda sequences, drafted: 2e-4 + 1e-3 * (sequences + drafted),
    # Steps with drafts have no graphs.
    "no graphs": lambda sequences, drafted: 5e-3 + 1e-4 * sequences + (4e-3 if drafted else 0),
    # Cheap up to eight rows.
    "tile": lambda sequences, drafted: 5e-3 * (1 + (sequences + drafted - 1) // 8),
}


class TimedStep(FakeStep):
    now_s: ClassVar[list[float]]
    took_s: float

    def collect(self):  # type: ignore[no-untyped-def]
        self.now_s[0] += self.took_s
        return super().collect()


def token_at(sequence: Sequence, position: int) -> int:
    return tokens_of(sequence.seed)[position]


@cache
def tokens_of(seed: int) -> tuple[int, ...]:
    """Returns a token for each position; a draft asks for hundreds."""
    return tuple(1 + zlib.crc32(f"{seed} {position}".encode()) % 15 for position in range(1000))


class TimedRunner(FakeRunner):
    """A runner whose tokens and times need no look at the tokens before."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__(num_blocks=4000)
        self.now_s = TimedStep.now_s = [0.0]
        self._seconds = seconds

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        drawn = [Sample(token_at(row.sequence, row.end)) for row in batch.rows]
        step = TimedStep(tuple(by_sequence(batch, drawn.__getitem__)))
        step.took_s = self._seconds(len(batch.sequences), batch.num_draft_tokens)
        return step


class QueuedStep(FakeStep):
    ready_s: float
    now_s: ClassVar[list[float]]

    def collect(self):  # type: ignore[no-untyped-def]
        self.now_s[0] = max(self.now_s[0], self.ready_s)
        return super().collect()


class AheadRunner(TimedRunner):
    """The same beside a device that works while the host plans the next step, for 1.5 ms."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__(seconds)
        QueuedStep.now_s = self.now_s
        self.runs_ahead = True
        self._ready_s = 0.0

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        step = super().launch(batch)
        assert isinstance(step, TimedStep)
        self.now_s[0] += 1.5e-3
        queued = QueuedStep(step.samples)
        queued.ready_s = self._ready_s = max(self._ready_s, self.now_s[0]) + step.took_s
        return queued


def truth(sequence: Sequence) -> tuple[int, ...]:
    first, count = sequence.num_prompt_tokens, sequence.num_output_tokens
    return tokens_of(sequence.seed)[first : first + count + 8]


def begin_requests(
    runner: TimedRunner,
    drafter: ScriptedDrafter,
    modes: Iterable[str | None],
    max_tokens: int,
    num_speculative_tokens: int = 4,
) -> Engine:
    """Returns an engine of mode "auto" with a request of each mode, None for the engine's."""
    config = make_config(speculation="auto", num_speculative_tokens=num_speculative_tokens)
    engine = Engine(config, runner, lambda: runner.now_s[0], drafter=drafter)
    for index, mode in enumerate(modes):
        request = make_request(f"r{index}", 4, seed=index, max_tokens=max_tokens, speculation=mode)
        engine.add_request(request)
    return engine


def seconds_of(
    cost: str,
    num_sequences: int,
    script: Script,
    mode: str,
    num_tokens: int = 300,
    more: int = 0,  # tokens of each request than of the one before
    runner_class: type[TimedRunner] = TimedRunner,
) -> float:
    runner = runner_class(COSTS[cost])
    config = make_config(
        speculation=mode, max_num_seqs=64, max_num_batched_tokens=512, num_speculative_tokens=4
    )
    drafter = ScriptedDrafter(script, 16, truth)
    engine = Engine(config, runner, lambda: runner.now_s[0], drafter=drafter)
    for index in range(num_sequences):
        count = num_tokens + more * index
        engine.add_request(make_request(f"r{index}", 4, seed=index, max_tokens=count))
    while engine.has_work:
        engine.step()
    return runner.now_s[0]


@pytest.mark.parametrize("num_sequences", [1, 6, 40])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("script", ["wrong", "random"])
def test_drafts_that_are_wrong_cost_two_percent_at_most(
    cost: str, num_sequences: int, script: Script
) -> None:
    plain_s = seconds_of(cost, num_sequences, script, "off")
    assert seconds_of(cost, num_sequences, script, "auto") <= 1.02 * plain_s


@pytest.mark.parametrize(
    ("cost", "num_sequences", "most"),
    [
        ("memory", 1, 0.5),
        ("memory", 6, 0.5),
        ("memory", 40, 0.6),
        ("graphs", 1, 0.5),
        ("graphs", 6, 0.5),
        ("graphs", 40, 0.5),
        ("no graphs", 6, 0.8),
        ("tile", 1, 0.5),
    ],
)
def test_drafts_that_are_right_save_time(cost: str, num_sequences: int, most: float) -> None:
    plain_s = seconds_of(cost, num_sequences, "right", "off")
    assert seconds_of(cost, num_sequences, "right", "auto") < most * plain_s


def test_drafts_go_on_while_requests_end() -> None:
    """Fewer sequences are a kind of step that has to be measured; the gate stays open meanwhile."""
    settings = ("graphs", 40, "right")
    plain_s = seconds_of(*settings, "off", 100, more=20, runner_class=AheadRunner)
    drafted_s = seconds_of(*settings, "auto", 100, more=20, runner_class=AheadRunner)
    assert drafted_s < 0.48 * plain_s


def test_one_slow_step_keeps_drafts_out_for_a_moment_only() -> None:
    gate = DraftGate()
    for _ in range(10):
        gate.observe(2, 0, 0.010)
    gate.observe(2, 2, 0.100)
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [0, 0]
    for _ in range(33):
        gate.observe(2, 0, 0.010)
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [1, 1]
    for _ in range(20):
        gate.observe(2, 2, 0.030)  # slow ones they are
    for _ in range(200):
        gate.observe(2, 0, 0.010)
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [0, 0]


@pytest.mark.parametrize("script", ["right", "half"])
def test_rows_that_cost_as_much_as_a_sequence_get_no_drafts(script: Script) -> None:
    plain_s = seconds_of("compute", 40, script, "off")
    assert seconds_of("compute", 40, script, "auto") <= 1.02 * plain_s


def test_acceptance_is_learned_by_the_length_of_the_match() -> None:
    found = Acceptance()
    for _ in range(200):
        found.observe(2, is_hit=False)
        found.observe(9, is_hit=True)
    assert found.probability(2) < 0.05
    assert found.probability(9) > 0.95


def test_a_sequence_that_differs_from_its_source_is_known_soon() -> None:
    acceptances = Acceptances()
    usual, odd = acceptances.of_sequence("a"), acceptances.of_sequence("a")
    for _ in range(100):
        usual.observe(Draft((1, 2), 4), (1, 2))
    before = odd.survivals(Draft((1,), 4))[0]
    for _ in range(8):
        odd.observe(Draft((1,), 4), (2,))
    assert before > 0.9
    assert odd.survivals(Draft((1,), 4))[0] < 0.6


def test_the_best_beginnings_of_all_drafts_are_chosen() -> None:
    gate = DraftGate()
    for _ in range(10):
        gate.observe(2, 0, 0.010)
        gate.observe(2, 3, 0.012)
    assert gate.choose(2, [[0.9, 0.8, 0.01], [0.5, 0.02]], 0.0005) == [2, 1]
    assert gate.choose(2, [[0.1, 0.01]], 0.0005) == [0]


def test_the_choice_has_the_most_tokens_per_second_of_all_numbers_of_drafts() -> None:
    """Compared with a walk over the numbers, on steps of 20 and 40 draft tokens."""
    draw = random.Random(3)
    for _ in range(200):
        gate, plain_s = DraftGate(), draw.uniform(0.008, 0.010)
        first_s, second_s = sorted(draw.uniform(0.008, 0.014) for _ in range(2))
        for _ in range(9):
            for num_drafted, seconds in ((0, plain_s), (20, first_s), (40, second_s)):
                gate.observe(8, num_drafted, seconds)
                if draw.random() < 0.2:
                    gate.prepare(8, 1e-4)
        row_s = draw.choice((0.0, 1e-4))
        survivals = [
            list(accumulate((draw.choice((0.5, 0.8)) for _ in range(8)), mul)) for _ in range(8)
        ]
        values = sorted((v for one in survivals for v in one if v >= 0.05), reverse=True)
        rates = [1.03 * 8 / plain_s]
        for count in range(1, len(values) + 1):
            slope = (second_s - first_s) / 20
            beyond = slope * (count - 20) if count <= 40 else slope * (20 + (count - 40) / 2)
            expected_s = first_s + beyond
            if count <= 20:
                expected_s = max(plain_s, first_s - row_s * (20 - count))
            rates.append((8 + sum(values[:count])) / expected_s)
        best = max(range(len(rates)), key=rates.__getitem__)
        counts = gate.choose(8, survivals, row_s)
        assert sum(counts) == best
        chosen = [v for one, count in zip(survivals, counts, strict=True) for v in one[:count]]
        assert sorted(chosen, reverse=True) == values[:best]


def test_tokens_that_no_step_is_worth_have_no_estimate() -> None:
    acceptance = Acceptances().of_sequence("a")
    found = acceptance.survivals(Draft(tuple(range(20)), 1))
    assert 1 <= len(found) < 20
    assert found == sorted(found, reverse=True)
    assert found[-1] >= 0.05


def test_nothing_is_chosen_before_a_step_without_drafts_was_measured() -> None:
    gate = DraftGate()
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [0, 0]
    gate.observe(2, 0, 0.010)
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [1, 1]
    for _ in range(130):
        gate.observe(2, 2, 0.010)
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [0, 0]


@pytest.mark.parametrize("runner_class", [TimedRunner, AheadRunner])
def test_a_request_that_always_drafts_leaves_the_cost_of_steps_measured(
    runner_class: type[TimedRunner],
) -> None:
    """Otherwise the drafts of all others would stay out, and the cost of steps unknown."""
    runner = runner_class(COSTS["memory"])
    drafter = ScriptedDrafter("right", 16, truth)
    engine = begin_requests(runner, drafter, ("suffix", None, None), 900)
    num_outputs = [0, 0, 0]
    for _ in range(300):
        for output in engine.step().outputs:
            num_outputs[int(output.request_id[1:])] += len(output.token_ids)
    assert min(num_outputs[1:]) > 0.8 * num_outputs[0]
    assert engine.load().step_fixed_s > 0


@pytest.mark.parametrize("runner_class", [TimedRunner, AheadRunner])
def test_the_gate_lets_no_drafts_pass_beside_prompts(runner_class: type[TimedRunner]) -> None:
    """It does not know what they cost there; a request that always drafts has them."""
    runner = runner_class(COSTS["memory"])
    config = make_config(speculation="auto", num_speculative_tokens=4, max_num_batched_tokens=16)
    engine = Engine(
        config, runner, lambda: runner.now_s[0], drafter=ScriptedDrafter("right", 16, truth)
    )
    batches: list[ScheduledBatch] = []
    launch = runner.launch

    def watched(batch: ScheduledBatch) -> FakeStep:
        batches.append(batch)
        return launch(batch)

    runner.launch = watched  # type: ignore[method-assign]
    for number in range(12):
        mode = "suffix" if number % 6 == 5 else None
        request = make_request(
            f"r{number}", 40, seed=number, max_tokens=60, adapter=None, speculation=mode
        )
        engine.add_request(request)
        for _ in range(15):
            engine.step()
    while engine.has_work:
        engine.step()
    beside = [batch for batch in batches if any(p.known_end - p.start > 1 for p in batch.sequences)]
    drafted = {
        p.sequence.request.params.speculation for b in beside for p in b.sequences if p.draft
    }
    assert drafted == {"suffix"}
    others = {
        p.sequence.request.params.speculation for b in batches for p in b.sequences if p.draft
    }
    assert others == {None, "suffix"}


def closed_s(
    script: Script, mode: str, num_sequences: int, num_tokens: int, num_queued: int = 0
) -> float:
    """Returns the seconds of requests of which the next one comes when one ends."""
    runner = AheadRunner(COSTS["graphs"])
    config = make_config(
        speculation=mode,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=512,
        num_speculative_tokens=4,
    )
    drafter = ScriptedDrafter(script, 16, truth)
    engine = Engine(config, runner, lambda: runner.now_s[0], drafter=drafter)
    num_added, count = 0, 10 * num_sequences
    while num_added < count or engine.has_work:
        num_open = len(engine.scheduler.running) + len(engine.scheduler.waiting)
        for _ in range(min(count - num_added, num_sequences + num_queued - num_open)):
            most = num_tokens + num_added * 7 % (num_tokens // 2)
            request = make_request(f"r{num_added}", 4, seed=num_added, max_tokens=most)
            engine.add_request(request)
            num_added += 1
        engine.step()
    return runner.now_s[0]


# Each request that ends leaves a number of sequences that is hardly ever met, and each one that
# comes has a prompt: neither may have the steps wait in vain, or keep the drafts out.
CLOSED = [(32, 20, 0), (32, 40, 8), (8, 40, 0)]


@pytest.mark.parametrize(("num_sequences", "num_tokens", "num_queued"), CLOSED)
def test_requests_that_come_and_go_lose_two_percent_at_most_by_wrong_drafts(
    num_sequences: int, num_tokens: int, num_queued: int
) -> None:
    setting = (num_sequences, num_tokens, num_queued)
    assert closed_s("wrong", "auto", *setting) <= 1.02 * closed_s("wrong", "off", *setting)


@pytest.mark.parametrize(("num_sequences", "most"), [(32, 0.61), (8, 0.55)])
def test_requests_that_come_and_go_have_drafts(num_sequences: int, most: float) -> None:
    plain_s = closed_s("right", "off", num_sequences, 80)
    assert closed_s("right", "auto", num_sequences, 80) < most * plain_s


def gate_of_graphs() -> DraftGate:
    """Returns a gate that knows the graph of 8 rows, cheap, and that of 16, dear."""
    gate = DraftGate((1, 2, 4, 8, 16))
    for _ in range(10):
        gate.observe(2, 0, 0.010)
        gate.observe(2, 5, 0.011)
        gate.observe(2, 9, 0.020)
    return gate


def test_the_rows_of_a_graph_are_filled_and_a_larger_one_is_not_begun() -> None:
    """The draft tokens of 2 sequences: 6 fill the graph of 8 rows, a seventh needs that of 16."""
    gate = gate_of_graphs()
    likely = [[0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6], [0.9, 0.8, 0.7]]
    assert gate.choose(2, likely, 0.0) == [4, 2]
    # Two rows that are unlikely are free where the graph has room for them.
    assert gate.choose(2, [[0.9, 0.9, 0.9, 0.9], [0.1, 0.06, 0.01]], 0.0) == [4, 2]


def test_graphs_that_were_not_measured_are_tried_from_small_ones_on() -> None:
    gate = DraftGate((*range(8, 65, 8), *range(80, 257, 16)))
    likely = [[0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6]] * 32
    sizes = []
    for _ in range(6):
        gate.observe(32, 0, 0.010)
        gate.observe(32, 0, 0.010)
        num_drafted = sum(gate.choose(32, likely, 1e-6))
        gate.observe(32, num_drafted, 0.0105)
        sizes.append(32 + num_drafted)
    assert sizes[0] == 40  # an eighth of the sequences, and the rest of its graph
    assert sizes == sorted(sizes)
    assert sizes[-1] == 256


def test_more_sequences_than_the_largest_graph_has_rows_are_no_error() -> None:
    gate = DraftGate((1, 2, 4))
    gate.observe(6, 0, 0.010)
    gate.observe(6, 2, 0.010)
    assert sum(gate.choose(6, [[0.9]] * 6, 0.0)) <= 6


def test_drafts_without_a_gate_take_rows_of_the_same_graph() -> None:
    gate = gate_of_graphs()
    likely = [[0.9, 0.5, 0.3, 0.2, 0.1, 0.08, 0.06]] * 2
    assert sum(gate.choose(2, likely, 0.0)) == 6
    assert sum(gate.choose(2, likely, 0.0, 4)) == 2


class GraphRunner(AheadRunner):
    """Steps are padded to graphs; up to 16 rows they take 6 ms, and beyond 10."""

    def __init__(self) -> None:
        super().__init__(lambda sequences, drafted: 0.010 if sequences + drafted > 16 else 0.006)
        self.graph_sizes = (1, 2, 4, 8, 16, 24, 32, 64)
        self.rows: list[int] = []  # of steps with drafts

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        if batch.num_draft_tokens:
            self.rows.append(batch.num_tokens)
        return super().launch(batch)


@pytest.mark.parametrize("modes", [("auto",) * 8, ("suffix", *("auto",) * 7)])
def test_an_engine_fills_the_largest_graph_that_is_cheap(modes: tuple[str, ...]) -> None:
    runner = GraphRunner()
    engine = begin_requests(runner, ScriptedDrafter("half", 16, truth), modes, 600)
    while len(runner.rows) < 150:
        engine.step()
    later = sorted(runner.rows[50:])
    assert later[len(later) // 2] == 16
    assert sum(rows > 16 for rows in later) <= 10


class LimitedDrafter(ScriptedDrafter):
    """Guesses as many tokens as it may, and notes the limits."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, 16, truth)
        self.limits: list[int] = []

    def propose(self, sequence: Sequence, limit: int) -> Draft | None:
        self.limits.append(limit)
        return super().propose(sequence, limit)


@pytest.mark.parametrize(
    ("cost", "script", "expected"),
    [("compute", "wrong", {7}), ("memory", "right", {7}), ("tile", "half", {3, 5})],
)
def test_no_more_is_guessed_than_the_gate_may_let_pass(
    cost: str, script: Script, expected: set[int]
) -> None:
    """Where rows are free, all tokens pass; a gate that is closed sees whole drafts."""
    runner = TimedRunner(COSTS[cost])
    drafter = LimitedDrafter(script)
    engine = begin_requests(runner, drafter, 6 * (None,), 900, num_speculative_tokens=7)
    for _ in range(60):
        engine.step()
    assert set(drafter.limits[-60:]) == expected
