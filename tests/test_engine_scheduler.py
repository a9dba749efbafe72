"""The scheduler's policy in exact ids, and its promises over random traces."""

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_tables import BlockTables
from engine.blocks import BlockPool
from engine.core import Engine
from engine.kv_layout import kv_layout, num_uncommitted
from engine.scheduler import Scheduler
from engine.types import NO_MEMORY, Request, Sample, SamplingParams, TokenOutput
from tests.fakes import (
    EOS,
    FakeModel,
    FakePool,
    FakeRunner,
    check_invariants,
    commit,
    make_config,
    make_request,
    make_scheduler,
    ranges,
    run_step,
    solo_tokens,
)


def test_a_long_prompt_is_computed_in_chunks_and_decodes_go_on_beside_it() -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 3), 0)
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 0, 3)]
    scheduler.add(make_request("b", [9] * 18), 0)
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 3, 4), ("b", 0, 0, 7)]
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 4, 5), ("b", 0, 7, 14)]
    batch, outputs = run_step(scheduler)
    assert ranges(batch) == [("a", 0, 5, 6), ("b", 0, 14, 18)]
    assert [(o.request_id, o.offset, o.finish_reason) for o in outputs] == [
        ("a", 3, "length"),
        ("b", 0, None),
    ]


def test_an_older_chunked_prompt_leaves_a_token_for_each_younger_sequence() -> None:
    pool = FakePool(capacity=1, known={"x", "y"})
    scheduler, _ = make_scheduler(20, pool, max_num_batched_tokens=8)
    scheduler.add(make_request("blocker", 2, "x", max_tokens=1), 0)
    scheduler.add(make_request("late", 30, "y"), 0)
    scheduler.add(make_request("young", [5, 5], max_tokens=9), 0)
    assert ranges(run_step(scheduler)[0]) == [("blocker", 0, 0, 2), ("young", 0, 0, 2)]
    assert ranges(run_step(scheduler)[0]) == [("young", 0, 2, 3), ("late", 0, 0, 7)]
    assert ranges(run_step(scheduler)[0]) == [("late", 0, 7, 14), ("young", 0, 3, 4)]


def test_a_second_request_takes_the_full_blocks_of_the_first() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 10), 0)  # blocks 0, 1 full, 2 partial
    (a,) = run_step(scheduler)[0].sequences
    assert a.sequence.block_table == [0, 1, 2]
    scheduler.add(make_request("b", 10), 0)
    batch, outputs = run_step(scheduler)
    assert ranges(batch) == [("a", 0, 10, 11), ("b", 0, 8, 10)]
    assert batch.sequences[1].sequence.block_table == [0, 1, 3]
    assert outputs[1].num_cached_tokens == 8
    assert (scheduler.load().prefix_queries, scheduler.load().prefix_hits) == (20, 8)


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 8, max_tokens=1), 0)
    run_step(scheduler)
    scheduler.add(make_request("b", 8), 0)
    assert ranges(run_step(scheduler)[0]) == [("b", 0, 4, 8)]


@pytest.mark.parametrize("other", [{"adapter": "y"}, {"cache_salt": "t"}, {"adapter": None}])
def test_another_adapter_or_salt_shares_nothing(other: dict[str, str | None]) -> None:
    scheduler, _ = make_scheduler(adapters=FakePool(known={"x", "y"}))
    scheduler.add(make_request("a", 8, "x", "s"), 0)
    run_step(scheduler)
    scheduler.add(make_request("b", 8, **({"adapter": "x", "cache_salt": "s"} | other)), 0)
    batch, _ = run_step(scheduler)
    assert ranges(batch)[1] == ("b", 0, 0, 8)
    assert not {0, 1} & set(batch.sequences[1].sequence.block_table)


def test_choices_wait_for_the_first_ones_prompt_and_share_its_blocks() -> None:
    scheduler, blocks = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(make_request("a", 9, n=3), 0)
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 0, 6)]
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 6, 9)]
    batch, _ = run_step(scheduler)
    assert ranges(batch) == [("a", 0, 9, 10), ("a", 1, 8, 9), ("a", 2, 8, 9)]
    assert [s.sequence.block_table for s in batch.sequences] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert [blocks.num_references(block) for block in range(5)] == [3, 3, 1, 1, 1]


def test_choices_without_prefix_caching_start_at_once() -> None:
    scheduler, _ = make_scheduler(enable_prefix_caching=False)
    scheduler.add(make_request("a", 5, n=2), 0)
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 0, 5), ("a", 1, 0, 5)]


def test_choices_go_on_when_the_first_is_aborted() -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(make_request("a", 9, n=2), 0)
    run_step(scheduler)
    scheduler.abort("a", 0)
    batch, outputs = run_step(scheduler)
    assert ranges(batch) == [("a", 1, 4, 9)]  # the first block was computed
    assert (outputs[0].choice, outputs[0].finish_reason) == (0, "abort")


def test_prompt_logprobs_take_no_hits_and_come_with_the_first_output() -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=6)
    runner = FakeRunner(10)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 8, max_tokens=1, prompt_logprobs=0), 0)
    collected = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert all(i.start != 4 or i.end > 6 for i in batch.sequences)
        collected += commit(scheduler, batch, runner.execute(batch))
    assert [len(o.prompt_logprobs) for o in collected] == [8, 8]
    assert [p and p.token_id for p in collected[1].prompt_logprobs] == [None, 2, 3, 4, 5, 6, 7, 8]
    assert scheduler.load().prefix_queries == 0


def test_the_youngest_is_preempted_and_goes_on_where_it_was() -> None:
    scheduler, blocks = make_scheduler(4)
    scheduler.add(make_request("old", 8, max_tokens=8), 0)
    scheduler.add(make_request("young", [5] * 8, max_tokens=2), 0)
    run_step(scheduler)
    # Both need a third block and none is free: the young one gives its two back.
    batch, _ = run_step(scheduler)
    assert ranges(batch) == [("old", 0, 8, 9)]
    assert [s.request.request_id for s in scheduler.waiting] == ["young"]
    # Its tail was free first and is taken; its head, block 2, can still be found.
    assert batch.sequences[0].sequence.block_table == [0, 1, 3]
    while scheduler.running:  # the old one goes on to 16 tokens and takes that too
        run_step(scheduler)
    assert scheduler.load().num_preemptions == 1
    batch, outputs = run_step(scheduler)
    assert ranges(batch) == [("young", 0, 0, 9)]
    assert [(o.request_id, o.offset, o.finish_reason) for o in outputs] == [("young", 1, "length")]
    assert blocks.num_free == 4


def test_a_request_behind_one_without_blocks_does_not_overtake_it() -> None:
    scheduler, _ = make_scheduler(4)
    scheduler.add(make_request("a", 9), 0)
    scheduler.add(make_request("large", [5] * 8), 0)
    scheduler.add(make_request("small", [6]), 0)
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 0, 9)]


def test_a_request_waiting_for_its_adapter_is_overtaken_a_bounded_number_of_times() -> None:
    pool = FakePool(capacity=1, known={"hot", "cold"})
    scheduler, _ = make_scheduler(40, pool, max_adapter_overtakes=2)
    scheduler.add(make_request("h0", [1], "hot", max_tokens=3), 0)
    scheduler.add(make_request("cold", [2], "cold"), 0)
    for i in range(1, 5):
        scheduler.add(make_request(f"h{i}", [2 + i], "hot", max_tokens=3), 0)
    scheduler.add(make_request("base", [9], max_tokens=3), 0)
    # Two hot ones pass, then only what needs no adapter.
    names = [name for name, *_ in ranges(run_step(scheduler)[0])]
    assert names == ["h0", "h1", "h2", "base"]
    assert scheduler.load().num_waiting_for_adapter == 1
    run_step(scheduler)
    run_step(scheduler)
    assert [name for name, *_ in ranges(run_step(scheduler)[0])] == ["cold"]


def test_the_load_shows_who_waits_for_room_for_an_adapter_and_how_long() -> None:
    pool = FakePool(capacity=1, known={"x", "y"})
    now_s = [0.0]
    config = make_config()
    blocks = BlockPool(40, config.block_size, "base", can_share=False)
    scheduler = Scheduler(config, BlockTables(blocks), pool, (EOS,), 4096, lambda: now_s[0])
    scheduler.add(make_request("blocker", 4, "x", max_tokens=9), 0)
    scheduler.add(make_request("waiting", [7] * 12, "y"), 0)
    run_step(scheduler)
    load = scheduler.load()
    assert (load.num_waiting_for_adapter, load.queued_tokens_for_adapter) == (1, 12)
    assert (load.queued_tokens, load.adapter_room_s) == (12, 0.0)
    while scheduler.load().num_waiting_for_adapter:
        now_s[0] += 1.0
        run_step(scheduler)
    assert scheduler.load().queued_tokens_for_adapter == 0
    assert scheduler.load().adapter_room_s == pytest.approx(0.1 * now_s[0])


def test_an_adapter_that_never_finds_room_holds_nobody_up() -> None:
    pool = FakePool(known={"x", "y"}, blocked={"x"})
    scheduler, _ = make_scheduler(40, pool, max_adapter_overtakes=0)
    scheduler.add(make_request("stuck", [1], "x"), 0)
    scheduler.add(make_request("base", [2], max_tokens=1), 0)
    scheduler.add(make_request("other", [3], "y", max_tokens=1), 0)
    assert [o.request_id for o in run_step(scheduler)[1]] == ["base", "other"]
    assert ranges(scheduler.schedule()) == []
    scheduler.abort("stuck")
    assert not scheduler.running
    assert not scheduler.waiting


def test_a_waiting_request_whose_adapter_was_dropped_ends_with_an_error() -> None:
    pool = FakePool(known={"x"})
    scheduler, _ = make_scheduler(adapters=pool)
    scheduler.add(make_request("a", 4, "x"), 0)
    pool.remove("x")
    _, outputs = run_step(scheduler)
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error == "adapter x is no longer loaded"
    assert not scheduler.running


def test_an_abort_between_schedule_and_commit_drops_the_sample() -> None:
    scheduler, blocks = make_scheduler()
    scheduler.add(make_request("a", 6), 0)
    batch = scheduler.schedule()
    scheduler.abort("a")
    outputs = commit(scheduler, batch, [Sample(3)])
    assert [o.finish_reason for o in outputs] == ["abort"]
    assert blocks.num_free == 10


@pytest.mark.parametrize(
    ("params", "drawn", "reason", "stop_token_id", "length"),
    [
        ({"ignore_eos": False}, 0, "stop", None, 1),
        ({"ignore_eos": True}, 0, "length", None, 4),
        ({"stop_token_ids": (7,)}, 7, "stop", 7, 1),
        ({"stop_token_ids": (7,), "min_tokens": 2}, 7, "stop", 7, 3),
        ({}, 7, "length", None, 4),
        ({"max_tokens": 0}, 7, "length", None, 0),
    ],
)
def test_how_a_sequence_ends(
    params: dict[str, object], drawn: int, reason: str, stop_token_id: int | None, length: int
) -> None:
    scheduler, blocks = make_scheduler()
    scheduler.add(make_request("a", 6, **params), 0)
    outputs: list[TokenOutput] = []
    while scheduler.has_work:
        outputs += run_step(scheduler, drawn)[1]
    assert sum(len(o.token_ids) for o in outputs) == length
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (reason, stop_token_id)
    assert blocks.num_free == 10


def test_a_preempted_sequence_finds_what_is_left_of_its_prefix() -> None:
    scheduler, _ = make_scheduler(4)
    scheduler.add(make_request("old", 8, max_tokens=2), 0)
    scheduler.add(make_request("young", [5] * 8, max_tokens=2), 0)
    run_step(scheduler)
    run_step(scheduler)  # preempts the young one, then ends the old one
    batch, outputs = run_step(scheduler)
    assert ranges(batch) == [("young", 0, 4, 9)]
    assert outputs[0].finish_reason == "length"
    assert outputs[0].num_cached_tokens == 0  # of the first admission


def test_a_step_is_planned_while_the_last_is_under_way() -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 3, max_tokens=3), 0)
    scheduler.add(make_request("b", [9] * 7), 0)
    first = scheduler.schedule()
    assert ranges(first) == [("a", 0, 0, 3), ("b", 0, 0, 5)]
    second = scheduler.schedule()
    assert ranges(second) == [("a", 0, 3, 4), ("b", 0, 5, 7)]
    assert [item.samples for item in (*first.sequences, *second.sequences)] == [1, 0, 1, 1]
    outputs = commit(scheduler, first, [Sample(7), Sample(None)])
    assert [(o.request_id, o.offset) for o in outputs] == [("a", 0)]
    third = scheduler.schedule()
    assert ranges(third) == [("a", 0, 4, 5), ("b", 0, 7, 8)]
    commit(scheduler, second, [Sample(7), Sample(8)])
    # The last token of "a" is under way: nothing is left to compute.
    assert ranges(scheduler.schedule()) == [("b", 0, 8, 9)]
    outputs = commit(scheduler, third, [Sample(7), Sample(8)])
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "length"), ("b", None)]


def test_what_a_sequence_that_has_ended_left_under_way_is_dropped() -> None:
    scheduler, blocks = make_scheduler()
    scheduler.add(make_request("a", 6, stop_token_ids=(7,)), 0)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert ranges(second) == [("a", 0, 6, 7)]
    assert [o.finish_reason for o in commit(scheduler, first, [Sample(7)])] == ["stop"]
    assert blocks.num_free == 10
    assert commit(scheduler, second, [Sample(5)]) == []


def test_a_sequence_with_penalties_is_in_every_step() -> None:
    """Its draw waits for the token before, not its forward pass."""
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 6, presence_penalty=0.5), 0)
    scheduler.add(make_request("b", [9] * 2), 0)
    first = scheduler.schedule()
    assert ranges(scheduler.schedule()) == [("a", 0, 6, 7), ("b", 0, 2, 3)]
    commit(scheduler, first, [Sample(7), Sample(7)])
    assert ranges(scheduler.schedule()) == [("a", 0, 7, 8), ("b", 0, 3, 4)]


MODEL = FakeModel(vocab_size=6)
MOST_TOKENS, BLOCK_SIZE = 18, 2  # of a request; the blocks are as many as it needs alone
WINDOWS: list[tuple[int | None, ...]] = [
    (None,),
    (None,),
    (5, 5),  # all layers
    (1,),  # each query sees itself
    (4, None),  # groups of the same size
    (3, 3, None, 3),
    (None, None, 5),  # blocks of the windowed layers hold more tokens
    (6, 6, 6, 6, 6, None, 6),
]

params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 7),
    n=st.integers(1, 3),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (3,)]),
    prompt_logprobs=st.sampled_from([None, None, 0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
)
request_strategy = st.builds(
    lambda prompt, params, adapter, salt: (tuple(prompt), params, adapter, salt),
    st.lists(st.integers(1, 2), min_size=1, max_size=11),
    params_strategy,
    st.sampled_from([None, "x", "y", "z"]),
    st.sampled_from(["", "", "s"]),
)
command_strategy = st.one_of(
    st.tuples(st.just("add"), request_strategy),
    st.tuples(st.just("step"), st.just(None)),
    st.tuples(st.just("step"), st.just(None)),
    st.tuples(st.just("abort"), st.tuples(st.integers(0, 20), st.sampled_from([None, 0, 1]))),
    st.tuples(st.just("fail"), st.sampled_from(["launch", "collect", "memory of collect"])),
    st.tuples(st.just("memory"), st.sampled_from([None, 0, 1, 2, 5])),
)


class Trace:
    """Runs commands on an engine and checks every promise after each of them."""

    def __init__(
        self,
        budget: int,
        max_seqs: int,
        caching: bool,
        capacity: int,
        runs_ahead: bool,
        windows: tuple[int | None, ...],
    ) -> None:
        self.pool = FakePool(capacity, {"x", "y", "z"})
        self.layout = kv_layout(windows, BLOCK_SIZE, MODEL.max_model_len)
        uncommitted = num_uncommitted(budget, runs_ahead=runs_ahead)
        self.num_blocks = self.layout.blocks_needed(MOST_TOKENS, uncommitted)
        self.runner = FakeRunner(self.num_blocks, BLOCK_SIZE, self.pool, MODEL, self.layout)
        self.runner.runs_ahead = runs_ahead
        config = make_config(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=budget,
            max_num_seqs=max_seqs,
            enable_prefix_caching=caching,
            max_adapter_overtakes=2,
        )
        self.engine = Engine(config, self.runner)
        self.blocks = self.engine.scheduler._tables.pool
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.endings: dict[tuple[str, int], str] = {}

    def add(self, spec: tuple[tuple[int, ...], SamplingParams, str | None, str]) -> None:
        request = Request(f"r{len(self.requests)}", *spec)
        self.requests[request.request_id] = request
        self.engine.add_request(request)

    def step(self) -> None:
        scheduler = self.engine.scheduler
        oldest = scheduler.running[0] if scheduler.running else None
        preemptions = oldest.num_preemptions if oldest else 0
        lacks_all = self.runner.most_tokens == 0
        lacks_all |= isinstance(self.runner.fail_next_collect, MemoryError)
        for output in self.engine.step().outputs:
            key = (output.request_id, output.choice)
            assert key not in self.endings
            assert output.offset == len(self.tokens[key])
            wanted = self.requests[output.request_id].params.prompt_logprobs is not None
            if wanted and output.offset == 0 and output.finish_reason in (None, "stop", "length"):
                prompt = self.requests[output.request_id].prompt_token_ids
                assert [p and p.token_id for p in output.prompt_logprobs] == [None, *prompt[1:]]
            self.tokens[key] += output.token_ids
            if output.error == NO_MEMORY:
                assert lacks_all, "a token at a time would have had room"
            if output.finish_reason:
                self.endings[key] = output.finish_reason
        assert oldest is None or oldest.num_preemptions == preemptions
        check_invariants(scheduler, self.blocks, self.pool, self.layout)

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "a request never ends"
        assert self.blocks.num_free == self.num_blocks
        assert not +self.pool.references
        for request in self.requests.values():
            for choice in range(request.params.n):
                self.check_choice(request, choice)

    def check_choice(self, request: Request, choice: int) -> None:
        key = (request.request_id, choice)
        expected = solo_tokens(request, choice, MODEL)
        if self.endings[key] in ("stop", "length"):
            assert tuple(self.tokens[key]) == expected
        else:
            assert tuple(self.tokens[key]) == expected[: len(self.tokens[key])]


@pytest.mark.slow
@settings(
    max_examples=2500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    commands=st.lists(command_strategy, max_size=40),
    budget=st.sampled_from([1, 3, 8, 30]),
    max_seqs=st.sampled_from([1, 3, 8]),
    caching=st.booleans(),
    capacity=st.integers(1, 3),
    runs_ahead=st.booleans(),
    windows=st.sampled_from(WINDOWS),
)
def test_random_traces_keep_every_promise(
    commands: list[tuple[str, object]],
    budget: int,
    max_seqs: int,
    caching: bool,
    capacity: int,
    runs_ahead: bool,
    windows: tuple[int | None, ...],
) -> None:
    trace = Trace(budget, max_seqs, caching, capacity, runs_ahead, windows)
    for name, argument in commands:
        if name == "add":
            trace.add(argument)  # type: ignore[arg-type]
        elif name == "abort":
            number, choice = argument  # type: ignore[misc]
            trace.engine.abort(f"r{number}", choice)
            check_invariants(trace.engine.scheduler, trace.blocks, trace.pool, trace.layout)
        elif name == "memory":
            trace.runner.most_tokens = argument  # type: ignore[assignment]
        else:
            if argument == "launch":
                trace.runner.fail_next = RuntimeError("device")
            elif argument == "collect":
                trace.runner.fail_next_collect = RuntimeError("device")
            elif argument == "memory of collect":
                trace.runner.fail_next_collect = MemoryError()
            trace.step()
            trace.runner.fail_next = trace.runner.fail_next_collect = None
    trace.finish()
