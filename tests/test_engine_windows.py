"""Block tables of windowed layers: against a naive model, in exact numbers, and whole engines
against Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.core import Engine
from engine.errors import ContextLengthError
from engine.kv_layout import kv_layout, num_uncommitted
from engine.model_config import read_model_config
from engine.types import Request, SamplingParams, ScheduledSequence, Sequence
from engine.window_tables import WindowTables
from tests.engine_agreement import Reply, make_engine, run_all
from tests.engine_helpers import BLOCK_SIZE, make_base, make_runner, random_prompt
from tests.fakes import (
    FakeRunner,
    held_blocks,
    make_request,
    make_scheduler,
    ranges,
    run_step,
)
from tests.family_bases import (
    VARIANTS,
    Variant,
    expected_logits,
    make_family_adapter,
    make_family_base,
)

LAYOUTS: dict[str, tuple[int | None, ...]] = {
    "all layers": (5, 5),
    "half": (7, None),
    "three of four": (6, 6, None, 6),
    "a few": (None, None, None, 9),
    "shorter than a block": (1, None, 1),
}


# -- a naive model ---------------------------------------------------------------------------------


class NaiveTables:
    """Sequences whose steps are planned one ahead, and what every key of every block holds."""

    def __init__(self, windows: tuple[int | None, ...], chunk: int, runs_ahead: bool) -> None:
        self.layout = kv_layout(windows, 2, 1000)
        self.runs_ahead, self.chunk = runs_ahead, chunk
        uncommitted = num_uncommitted(chunk, runs_ahead=runs_ahead)
        self.num_blocks = self.layout.blocks_needed(30, uncommitted) + 7
        self.pool = BlockPool(self.num_blocks, 2, "base")
        self.tables = WindowTables(self.pool, self.layout, uncommitted)
        self.running: list[Sequence] = []
        self.flying: dict[Sequence, ScheduledSequence] = {}
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}  # (entry, offset) -> the prefix

    def place(self, tokens: list[int]) -> None:
        request = Request("r", tuple(tokens), SamplingParams())
        sequence = Sequence(request, 0, 0, list(tokens))
        expected = self.longest_hit(sequence)
        free = self.pool.num_free
        count = self.tables.place(sequence, self.chunk)
        if not count:
            assert self.pool.num_free == free
            assert not sequence.block_table
            assert not sequence.window_table
            return
        assert sequence.num_computed_tokens == expected
        self.running.append(sequence)
        self.launch(sequence, expected, expected + count)

    def longest_hit(self, sequence: Sequence) -> int:
        """Returns the longest prefix of whole blocks of all groups that can be used, by trial."""
        size, last = self.layout.hit_size, len(sequence.token_ids) - 1
        self.pool.extend_chain(sequence.block_hashes, sequence.token_ids, last, None, "")
        ends = [
            end
            for end in range(size, last + 1, size)
            if all(
                self.pool.find_one(self.tables._name(sequence, index, block)) is not None
                for index, group in enumerate(self.layout.groups)
                for block in range(group.first_needed(end), end // group.size)
            )
        ]
        return max(ends, default=0)

    def step(self, sequence: Sequence) -> None:
        """Plans the next step, commits the one before."""
        start = sequence.num_scheduled_tokens
        count = min(self.chunk, len(sequence.token_ids) - start)
        if not count:
            sequence.token_ids.append(start % 3)  # decoded
            count = 1
        before = self.flying.pop(sequence, None)
        if not self.runs_ahead:
            self.commit(before)
        has_room = self.tables.grow(sequence, start + count)
        if has_room:
            self.launch(sequence, start, start + count)
        if self.runs_ahead:
            self.commit(before)
        if not has_room:
            self.end(sequence)

    def launch(self, sequence: Sequence, start: int, end: int) -> None:
        """Writes and reads as a device would, in the order of launches."""
        sequence.num_scheduled_tokens = end
        self.flying[sequence] = ScheduledSequence(sequence, start, end, True)
        tables = (sequence.block_table, sequence.window_table)
        for group, table in zip(self.layout.groups, tables, strict=False):
            for position in range(start, end):
                key = (table[position // 2], position % 2)
                assert key[0] // self.layout.stride < self.num_blocks, "the null block is written"
                self.content[key] = tuple(sequence.token_ids[: position + 1])
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                found = self.content[table[position // 2], position % 2]
                assert found == tuple(sequence.token_ids[: position + 1])

    def commit(self, item: ScheduledSequence | None) -> None:
        if item is not None:
            self.tables.commit(*item[:3])
            item.sequence.num_computed_tokens = item.end

    def end(self, sequence: Sequence) -> None:
        self.flying.pop(sequence, None)
        self.running.remove(sequence)
        self.tables.release(sequence)

    def check(self) -> None:
        held: dict[int, int] = {}
        for sequence in self.running:
            blocks = held_blocks(sequence, self.layout)
            assert len(set(blocks)) == len(blocks), "a block is twice in a sequence"
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        assert {b: self.pool.num_references(b) for b in range(self.num_blocks)} == {
            b: held.get(b, 0) for b in range(self.num_blocks)
        }
        assert self.pool.num_free == self.num_blocks - len(held)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    windows=st.sampled_from(list(LAYOUTS.values())),
    chunk=st.sampled_from([1, 3, 8, 40]),
    runs_ahead=st.booleans(),
    commands=st.lists(
        st.one_of(
            st.tuples(st.just("place"), st.integers(1, 26), st.sampled_from([0, 0, 1])),
            st.tuples(st.just("step"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("step"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
        ),
        max_size=60,
    ),
)
def test_tables_keep_what_a_naive_model_keeps(
    windows: tuple[int | None, ...],
    chunk: int,
    runs_ahead: bool,
    commands: list[tuple[str, int, int]],
) -> None:
    """Sequences of two prefixes are placed, computed in chunks, decoded and ended or preempted."""
    naive = NaiveTables(windows, chunk, runs_ahead)
    for name, number, kind in commands:
        if name == "place":
            naive.place([(i * 7 + kind) % 5 if i > 3 * kind else i % 3 for i in range(number)])
        elif naive.running:
            sequence = naive.running[number % len(naive.running)]
            naive.end(sequence) if name == "end" else naive.step(sequence)
        naive.check()
    for sequence in tuple(naive.running):
        naive.end(sequence)
    assert naive.pool.num_free == naive.num_blocks


# -- exact numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs_ahead", "most"), [(False, 384), (True, 512)])
def test_a_long_prompt_holds_a_window_and_the_chunks_of_its_steps(
    runs_ahead: bool, most: int
) -> None:
    """Holds all 2048 blocks without windows."""
    layout = kv_layout([4096], 16, 1 << 17)
    pool = BlockPool(2048, 16, "base")
    tables = WindowTables(pool, layout, num_uncommitted(2048, runs_ahead=runs_ahead))
    sequence = Sequence(Request("r", (5,) * 32_768, SamplingParams()), 0, 0, [5] * 32_768)
    assert tables.place(sequence, 2048) == 2048
    flying = [ScheduledSequence(sequence, 0, 2048, False)]
    found = 0
    for start in range(2048, 32_768, 2048):
        if not runs_ahead:
            tables.commit(*flying.pop()[:3])
        assert tables.grow(sequence, start + 2048)
        found = max(found, len(held_blocks(sequence, layout)))
        flying.append(ScheduledSequence(sequence, start, start + 2048, False))
        if runs_ahead:
            tables.commit(*flying.pop(0)[:3])
    assert (
        found == most <= layout.blocks_needed(32_768, num_uncommitted(2048, runs_ahead=runs_ahead))
    )


def test_a_prefix_is_found_though_the_blocks_before_its_window_are_evicted() -> None:
    layout = kv_layout([6], 4, 1000)
    scheduler, pool = make_scheduler(7, layout=layout, max_num_batched_tokens=4)
    scheduler.add(make_request("a", [3] * 21, max_tokens=1), 0)
    while scheduler.has_work:
        run_step(scheduler)
    pool.release(pool.allocate(2))  # the least recently used: the head of the prompt
    scheduler.add(make_request("b", [3] * 21, max_tokens=1), 0)
    batch, _ = run_step(scheduler)
    assert ranges(batch) == [("b", 0, 20, 21)]
    sequence = batch.sequences[0].sequence
    assert sequence.num_cached_tokens == 20


def test_a_window_whose_blocks_are_evicted_is_no_hit_but_an_earlier_one_is() -> None:
    """Full layers have all their blocks."""
    layout = kv_layout([4, None], 4, 1000)
    scheduler, pool = make_scheduler(40, layout=layout, max_num_batched_tokens=64)
    scheduler.add(make_request("a", [3] * 9, max_tokens=1), 0)
    scheduler.add(make_request("b", [3] * 21, max_tokens=1), 0)
    run_step(scheduler)
    while scheduler.has_work:
        run_step(scheduler)
    (probe,) = (Sequence(make_request("p", [3] * 21), 0, 0, [3] * 21),)
    tables = scheduler._tables
    assert isinstance(tables, WindowTables)
    assert tables._find_hit(probe)[0] == 20
    name = tables._name(probe, 1, 4)
    block = pool.find_one(name)
    assert block is not None
    while pool.find_one(name) is not None:  # evicted in the order of use
        pool.allocate(1)
    assert tables._find_hit(probe)[0] < 20


def test_choices_share_the_window_of_their_prompt() -> None:
    layout = kv_layout([6, None, 6], 4, 1000)
    scheduler, pool = make_scheduler(60, layout=layout, max_num_batched_tokens=64)
    scheduler.add(make_request("a", 33, n=3, max_tokens=20), 0)
    assert ranges(run_step(scheduler)[0]) == [("a", 0, 0, 33)]
    batch, _ = run_step(scheduler)
    assert ranges(batch) == [("a", 0, 33, 34), ("a", 1, 32, 33), ("a", 2, 32, 33)]
    shared = held_blocks(batch.sequences[1].sequence, layout)
    assert [pool.num_references(block) for block in shared].count(3) >= 4  # all full ones
    while scheduler.has_work:
        run_step(scheduler)
    assert pool.num_free == 60


def test_a_blocked_head_of_the_queue_looks_up_few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for a prompt of 131,072 tokens, which is not in the cache."""
    layout = kv_layout([1024, None, 1024], 16, 1 << 18)
    pool = BlockPool(100, 16, "base")
    tables = WindowTables(pool, layout, num_uncommitted(2048, runs_ahead=True))
    sequence = Sequence(Request("r", (5,) * 131_072, SamplingParams()), 0, 0, [5] * 131_072)
    looked_up = []
    find = BlockPool.find_one
    monkeypatch.setattr(
        BlockPool, "find_one", lambda own, name: looked_up.append(name) or find(own, name)
    )
    assert tables.place(sequence, 2048) == 0
    assert not looked_up  # the full layers have none
    windowed = WindowTables(pool, kv_layout([1024], 16, 1 << 18), 2048)
    assert windowed.place(sequence, 2048) == 0
    assert len(looked_up) <= 131_072 // 1024 + 1


def test_the_limits_are_those_of_the_longest_sequence_that_fits() -> None:
    layout = kv_layout([8, None, 8], 4, 4096)
    runner = FakeRunner(20, 4, layout=layout)
    engine, _ = make_engine_of(runner, 8)
    assert engine.limits.max_kv_tokens == layout.longest(20, 8, 4096) == 120
    assert engine.limits.max_request_tokens == 120
    assert engine.limits.prefix_chunk == 32
    roomy, _ = make_engine_of(FakeRunner(4000, 4, layout=layout), 8)
    assert roomy.limits.max_request_tokens == 4096


@pytest.mark.parametrize("num_blocks", [17, 24, 31, 32])
def test_no_request_waits_for_more_blocks_than_there_are(num_blocks: int) -> None:
    """All blocks hold 128 tokens of sequences that decode, and less of a prompt of which a chunk of
    64 tokens is computed at a time beside its window."""
    layout = kv_layout([64], 4, 128)
    runner = FakeRunner(num_blocks, 4, layout=layout)
    runner.max_model_len = 128
    engine, _ = make_engine_of(runner, 64)
    longest = layout.longest(num_blocks, 64, 128)
    assert engine.limits.max_kv_tokens == 128
    assert engine.limits.max_request_tokens == longest
    if longest < 128:
        with pytest.raises(ContextLengthError, match=f"hold {longest} tokens"):
            engine.add_request(make_request("long", longest + 1, max_tokens=0))
    engine.add_request(make_request("most", longest - 1, max_tokens=1))
    outputs = [output for _ in range(4) for output in engine.step().outputs]
    assert [(one.request_id, len(one.token_ids)) for one in outputs] == [("most", 1)]
    assert not engine.has_work


def make_engine_of(runner: FakeRunner, budget: int) -> tuple[Engine, FakeRunner]:
    from tests.fakes import make_engine as make_fake_engine

    return make_fake_engine(runner, max_num_batched_tokens=budget)


# -- engines against Hugging Face ------------------------------------------------------------------

WINDOWED = {
    "gemma 2": VARIANTS["gemma 2"],
    "gemma 3, five of six": Variant(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "num_hidden_layers": 7,
            "layer_types": ["full_attention" if i == 5 else "sliding_attention" for i in range(7)],
        },
    ),
    "olmo 3": VARIANTS["olmo 3"],
    "phi 3": VARIANTS["phi 3"],
    "shorter than a block": Variant(
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"sliding_window": 3, "layer_types": ["full_attention", *["sliding_attention"] * 2]},
    ),
}
PARAMS = SamplingParams(12, temperature=0.0, logprobs=3, ignore_eos=True)
PROMPTS = [(41, None), (30, "adapter"), (5, None), (41, "adapter")]


def check_reply(scores: torch.Tensor, num_prompt: int, reply: Reply) -> None:
    """`scores` [tokens, V]: the log-probabilities of Hugging Face along prompt and output."""
    places = torch.arange(num_prompt - 1, scores.shape[0] - 1)
    assert list(reply.tokens) == scores[places].argmax(-1).tolist()
    found = torch.tensor([one.logprob for one in reply.logprobs])
    expected = scores[places, torch.tensor(reply.tokens)]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def requests(prefix: str) -> list[Request]:
    return [
        Request(f"{prefix}{i}", tuple(random_prompt(length, seed=i)), PARAMS, owner)
        for i, (length, owner) in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("name", WINDOWED)
def test_an_engine_that_frees_what_windows_passed_gives_what_hugging_face_gives(
    name: str, tmp_path: Path
) -> None:
    """Prompts whole, from the cache and in chunks, beside others, with and without an adapter, in
    many blocks and in those of the longest sequence alone."""
    variant = WINDOWED[name]
    base = make_family_base(tmp_path / "base", variant)
    adapter = make_family_adapter(tmp_path / "adapter", base, variant.linears)
    expected: list[Reply] = []
    layout = kv_layout(read_model_config(base).sliding_windows, BLOCK_SIZE, 96)
    few = layout.blocks_needed(41 + 12, 11)
    for num_blocks, chunk in ((96, 1000), (96, 7), (few, 11)):
        runner = make_runner(base, max_model_len=96, num_blocks=num_blocks)
        runner.load_adapter("adapter", adapter)
        assert runner.kv_layout == layout
        assert layout.has_windows
        engine = make_engine(runner, block_size=BLOCK_SIZE, max_num_batched_tokens=chunk)
        for turn in range(2):
            replies = run_all(engine, requests(f"{turn}-"))
            for i, one in enumerate(requests(f"{turn}-")):
                reply, length = replies[one.request_id], len(one.prompt_token_ids)
                if len(expected) == i:
                    ids = [*one.prompt_token_ids, *reply.tokens]
                    scores = expected_logits(base, one.adapter and adapter, ids).log_softmax(-1)
                    check_reply(scores, length, reply)
                    expected.append(reply)
                assert reply.tokens == expected[i].tokens
                pairs = zip(reply.logprobs, expected[i].logprobs, strict=True)
                assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)
        load = engine.load()
        assert load.prefix_hits > 0 or num_blocks == few
        assert load.num_free_blocks == load.num_blocks == num_blocks
        for tensors in (runner._kv.k, runner._kv.v):
            for layer, tensor in enumerate(tensors):
                null = layout.entry(runner._kv.table_of[layer], num_blocks)
                assert not tensor[null:].any(), "the null block is written"


def test_a_mistral_with_a_window_answers_beyond_what_its_blocks_would_hold(tmp_path: Path) -> None:
    """100 tokens in 9 blocks of 4."""
    base = make_base(tmp_path / "base", "mistral", sliding_window=8)
    engine = make_engine(
        make_runner(base, num_blocks=9, max_num_batched_tokens=8),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=8,
    )
    assert engine.limits.max_request_tokens == 128
    request = Request("long", tuple(random_prompt(88, seed=2)), PARAMS)
    (reply,) = run_all(engine, [request]).values()
    scores = expected_logits(base, None, [*request.prompt_token_ids, *reply.tokens])
    check_reply(scores.log_softmax(-1), 88, reply)
