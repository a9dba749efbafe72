"""The host tier of KV without tensors: two tiers against a dict, engines with slow copies."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_copies import runs_of
from engine.config import EngineConfig
from engine.core import Engine
from engine.host_blocks import HostBlocks, OffloadedPool
from engine.host_tables import HostTables
from engine.kv_layout import kv_layout, num_uncommitted
from engine.kv_offload import KVOffload
from engine.step_cost import StepCost
from engine.types import Request, SamplingParams, ScheduledSequence, Sequence, TokenOutput
from tests.fakes import FakePool, FakeRunner, held_blocks, make_config, make_request, solo_tokens
from tests.kv_host_helpers import (
    Content,
    SlowCopier,
    always_copies,
    check_no_leak,
    runner_with_host,
)

LAYOUTS: dict[str, tuple[int | None, ...]] = {
    "full": (None, None, None),
    "all windowed": (5, 5),
    "half": (7, None),
    "a few": (None, None, None, 9),
}
QUICK = settings(max_examples=120, deadline=None, derandomize=True, database=None)


# -- two tiers against a dict ----------------------------------------------------------------------


def content_of(name: bytes) -> Content:
    return list(name)


class Tiers:
    """Sequences in a few device blocks before a host tier; `content` is what each block holds."""

    def __init__(self, windows: tuple[int | None, ...], num_slots: int, polls: list[int]) -> None:
        self.layout = kv_layout(windows, 2, 1000, is_contiguous=True)
        self.uncommitted = num_uncommitted(8, runs_ahead=True)
        self.num_blocks = self.layout.blocks_needed(30, self.uncommitted) + 4
        self.host = HostBlocks(num_slots)
        self.pool = OffloadedPool(self.num_blocks, 2, "base", self.host)
        self.tables = HostTables(self.pool, self.layout, self.uncommitted)
        self.content: dict[int, Content | None] = {}  # by device block
        left = iter(polls * 1000)
        self.copier = SlowCopier(self.read, self.write, num_slots, lambda: next(left))
        self.offload = KVOffload(self.pool, self.host, self.tables, self.copier, StepCost(), 4)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_hits = 0

    def read(self, block: int) -> Content:
        found = self.content.get(block)
        assert found is not None, f"block {block} is copied before it is whole"
        return list(found)

    def write(self, block: int, content: Content | None) -> None:
        self.content[block] = content

    def add(self, tokens: list[int]) -> None:
        request = Request("r", tuple(tokens), SamplingParams())
        self.waiting.append(Sequence(request, 0, 0, list(tokens)))

    def admit(self) -> None:
        for sequence in tuple(self.waiting):
            wait = self.offload.wait_for(sequence, is_alone=not self.running)
            if wait == "loading":
                continue
            if wait == "full" or not self.tables.place(sequence, 1000):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.num_hits += sequence.num_computed_tokens
            end = len(sequence.token_ids)
            self._compute(sequence, end)
            item = ScheduledSequence(sequence, sequence.num_computed_tokens, end, True)
            self.tables.commit(*item[:3])
            sequence.num_computed_tokens = end

    def _compute(self, sequence: Sequence, end: int) -> None:
        """Writes the blocks that were not found, as a step does."""
        self.tables._extend_chain(sequence, end)
        for index, group in self.tables._groups:
            first = self.tables._first_live(sequence, index) // group.num_spans
            for i, block in enumerate(self.tables._blocks(sequence, index), first):
                if self.pool.name_of(block) is None:
                    is_full = (i + 1) * group.size <= end
                    name = self.tables._name(sequence, index, i) if is_full else b"partial"
                    self.content[block] = content_of(name)

    def leave(self, index: int, *, swaps: bool) -> None:
        sequence = self.running.pop(index % len(self.running))
        if swaps:
            self.offload.swap_out(sequence)
        self.tables.release(sequence)

    def check(self) -> None:
        held = Counter(b for s in self.running for b in held_blocks(s, self.layout))
        loading = Counter(
            block for load in self.offload._loads for block in (*load.kept, *load.blocks)
        )
        for block in range(self.num_blocks):
            assert self.pool.num_references(block) == held[block] + loading[block]
            name = self.pool.name_of(block)
            if name is not None:
                assert self.content[block] == content_of(name), "found before it has landed"
        for load in self.offload._loads:
            names = [self.pool.name_of(block) for block in load.blocks]
            assert all(names) if load.is_awaited else not any(names)
        for name, slot in [*self.host._idle.items()]:
            assert self.copier.slots[slot] == content_of(name)
        slots = [*self.host._free, *self.host._storing.values(), *self.host._idle.values()]
        slots += [slot for slot, _ in self.host._held.values()]
        assert sorted(slots) == list(range(self.host.num_slots))
        lacking = {
            block
            for block in filter(self.pool.is_idle, range(self.num_blocks))
            if not self.host.knows(self.pool.name_of(block) or b"")
        }
        assert self.pool._unsaved == lacking


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 26), st.sampled_from([0, 0, 1, 2])),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(1)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("drain"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@QUICK
@given(
    windows=st.sampled_from(list(LAYOUTS.values())),
    num_slots=st.sampled_from([1, 3, 30]),
    polls=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    commands=COMMANDS,
)
def test_both_tiers_hold_what_a_dict_holds(
    windows: tuple[int | None, ...],
    num_slots: int,
    polls: list[int],
    commands: list[tuple[str, int, int]],
) -> None:
    tiers = Tiers(windows, num_slots, polls)
    for name, number, kind in commands:
        if name == "add":
            tiers.add([(i * 7 + kind) % 5 if i > 3 * kind else i % 3 for i in range(number)])
        elif name == "step":
            tiers.offload.begin_step()
            tiers.admit()
        elif name == "end" and tiers.running:
            tiers.leave(number, swaps=bool(kind))
        elif name == "abort" and tiers.waiting:
            tiers.waiting.pop(number % len(tiers.waiting))
        elif name == "drain":
            tiers.offload.drain()
        tiers.check()
    while tiers.running:
        tiers.leave(0, swaps=False)
    tiers.offload.drain()
    while tiers.host.num_storing:
        tiers.offload.begin_step()
    tiers.check()
    assert tiers.pool.num_free == tiers.num_blocks
    assert not tiers.host.num_held


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique=True, min_size=1))
def test_neighbours_are_one_copy(pairs: list[tuple[int, int]]) -> None:
    runs = list(runs_of(*zip(*pairs, strict=True)))
    assert [(a + i, b + i) for a, b, count in runs for i in range(count)] == pairs
    for (a, b, count), (next_a, next_b, _) in pairwise(runs):
        assert (next_a, next_b) != (a + count, b + count)


# -- engines with slow copies ----------------------------------------------------------------------


def open_host_engine(
    num_blocks: int,
    windows: tuple[int | None, ...] = (None,),
    num_slots: int = 60,
    seed: int = 0,
    adapters: FakePool | None = None,
    **config: int | bool | str | None,
) -> tuple[Engine, FakeRunner, SlowCopier]:
    layout = kv_layout(windows, 4, 1 << 20, is_contiguous=True)
    runner = FakeRunner(num_blocks, adapters=adapters, layout=layout)
    draws = Random(seed)
    copier = runner_with_host(runner, num_slots, lambda: draws.randrange(1, 9))
    made: EngineConfig = make_config(**config)
    return Engine(made, runner), runner, copier


def run(engine: Engine) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
        assert not engine.is_stuck or not engine.has_work
    return outputs


def tokens_of(outputs: list[TokenOutput], request_id: str, choice: int = 0) -> tuple[int, ...]:
    return tuple(
        token
        for output in outputs
        if (output.request_id, output.choice) == (request_id, choice)
        for token in output.token_ids
    )


def test_a_prefix_that_the_device_has_lost_comes_from_the_host() -> None:
    engine, runner, _ = open_host_engine(24, num_slots=120)
    prompt = [1 + i % 13 for i in range(41)]
    engine.add_request(make_request("a", prompt))
    run(engine)
    for other in range(6):  # takes all blocks, and lets the stores land
        engine.add_request(make_request(f"other {other}", [14, other, *prompt[:38]]))
        run(engine)
    engine.add_request(make_request("b", prompt))
    outputs = run(engine)
    first = next(o for o in outputs if o.request_id == "b")
    assert first.num_cached_tokens == 40
    load = engine.load()
    assert load.kv_host.hit_tokens == 40
    assert load.kv_host.loaded_bytes >= 10 << 20
    assert load.kv_host.stored_bytes > load.kv_host.loaded_bytes
    assert [one for one in runner.batches[-4] if one[0] == "b"] == [("b", 0, 40, 41)]
    assert tokens_of(outputs, "b") == solo_tokens(make_request("b", prompt), 0, runner.model_config)
    check_no_leak(engine)


def test_a_device_with_room_copies_nothing() -> None:
    engine, _, _ = open_host_engine(200)
    for i in range(8):
        engine.add_request(make_request(f"r{i}", [i, *range(1, 15)]))
    run(engine)
    assert engine.load().kv_host.num_used_blocks == 0


def test_what_came_from_the_host_is_not_taken_for_what_is_evicted_next() -> None:
    """Loaded blocks are the last to be evicted: those before them are stored all the same."""
    engine, _, _ = open_host_engine(100, num_slots=2000, max_num_batched_tokens=16, max_num_seqs=2)
    always_copies(engine)
    prompts = [[1 + i % 15, i // 15, *([7] * 39)] for i in range(30)]
    for turn in (range(14), range(3), range(14, 30), range(30)):  # three of them are loaded early
        for i in turn:
            engine.add_request(make_request(f"{turn} {i}", prompts[i], max_tokens=1))
            (output,) = run(engine)
            assert output.num_cached_tokens == (0 if turn in (range(14), range(14, 30)) else 40)
    assert engine.load().kv_host.hit_tokens > 1000
    assert engine.load().kv_host.num_dropped_blocks == 0
    check_no_leak(engine)


@pytest.mark.parametrize("num_later", [10, 14, 18])
def test_what_the_host_drops_is_stored_again_before_the_device_evicts_it(num_later: int) -> None:
    engine, _, _ = open_host_engine(100, num_slots=100, max_num_batched_tokens=16, max_num_seqs=2)
    always_copies(engine)

    def ask(name: str, number: int) -> int:
        prompt = [1 + number % 15, number // 15, *([7] * 39)]
        engine.add_request(make_request(name, prompt, max_tokens=1))
        (output,) = run(engine)
        return output.num_cached_tokens

    for i in range(10):  # the last of them has blocks of the first stored
        assert ask(f"r{i}", i) == 0
    assert ask("again", 0) == 40  # the device evicts it last, the host as its oldest
    for i in range(10, 10 + num_later):
        assert ask(f"r{i}", i) == 0
    assert engine.load().kv_host.num_dropped_blocks == 0
    assert ask("once more", 0) == 36  # its last block was the host's alone, and the oldest


def test_a_host_of_fewer_blocks_than_a_step_copies_each_once() -> None:
    engine, _, _ = open_host_engine(100, num_slots=3, max_num_batched_tokens=16, max_num_seqs=2)
    for i in range(12):
        engine.add_request(make_request(f"r{i}", [1 + i, *([7] * 40)], max_tokens=1))
        run(engine)
    before = engine.load().kv_host.stored_bytes
    engine.add_request(make_request("long", 3, max_tokens=60))
    run(engine)
    stored = engine.load().kv_host.stored_bytes - before
    assert stored <= 30 << 20  # 15 blocks are allocated meanwhile, and as many are stored in turns


def test_a_preempted_sequence_returns_without_computing_its_blocks_again() -> None:
    engine, runner, _ = open_host_engine(24, max_num_batched_tokens=48)
    requests = [make_request(f"r{i}", [i, *range(1, 12), i], max_tokens=40) for i in range(4)]
    for request in requests:
        engine.add_request(request)
    outputs = run(engine)
    load = engine.load()
    assert load.num_preemptions
    assert load.kv_host.num_swapped_blocks
    computed: Counter[tuple[str, int]] = Counter()
    for batch in runner.batches:
        for name, _, start, end in batch:
            computed.update((name, position) for position in range(start, end))
    again = sum(count - 1 for count in computed.values())
    # At most a block and the token in flight of each preemption.
    assert again <= load.num_preemptions * 5
    for request in requests:
        expected = solo_tokens(request, 0, runner.model_config)
        assert tokens_of(outputs, request.request_id) == expected
    check_no_leak(engine)


def test_younger_ones_pass_a_sequence_that_waits_for_its_load() -> None:
    engine, _, copier = open_host_engine(24, num_slots=120)
    prompt = [1 + i % 13 for i in range(41)]
    for i in range(7):
        engine.add_request(make_request(f"r{i}", [*prompt[:40], 1] if not i else [14, i] * 20))
        run(engine)
    offload = engine._offload
    assert offload is not None
    while not copier.is_idle:
        offload.begin_step()
    copier._left = 30  # the next copy is slow
    engine.add_request(make_request("late", prompt, max_tokens=2))
    engine.add_request(make_request("quick", 3, max_tokens=1))
    engine.step()
    assert {s.request.request_id for s in engine.scheduler.waiting} == {"late"}
    assert {o.request_id for o in run(engine)} >= {"late"}
    assert engine.load().kv_host.hit_tokens


@pytest.mark.parametrize("windows", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_tokens_are_those_without_a_host_whatever_comes_between(
    windows: tuple[int | None, ...], runs_ahead: bool
) -> None:
    """Random requests of adapters, tenants and several choices, aborted at any time, in few blocks;
    the runner checks each key that a step reads."""
    hits = swaps = loads = 0
    for seed in range(4):
        draws = Random(seed)
        layout = kv_layout(windows, 4, 1 << 20, is_contiguous=True)
        uncommitted = num_uncommitted(16, runs_ahead=runs_ahead)
        num_blocks = layout.blocks_needed(64, uncommitted) + 6
        adapters = FakePool(capacity=2, known={"x", "y", "z"})
        engine, runner, _ = open_host_engine(
            num_blocks, windows, 80, seed, adapters, max_num_batched_tokens=16
        )
        runner.runs_ahead = runs_ahead
        engine._runs_ahead = runs_ahead
        requests: dict[str, Request] = {}
        aborted: set[str] = set()
        outputs: list[TokenOutput] = []
        for turn in range(120):
            if draws.random() < 0.3:
                kind = draws.randrange(4)
                request = make_request(
                    f"r{turn}",
                    [kind, *([1 + kind] * draws.randrange(4, 40))],
                    draws.choice([None, "x", "y", "z"]),
                    draws.choice(["", "tenant"]),
                    n=draws.choice([1, 1, 2]),
                    max_tokens=draws.randrange(1, 20),
                )
                requests[request.request_id] = request
                engine.add_request(request)
            if requests and draws.random() < 0.05:
                aborted.add(gone := draws.choice(list(requests)))
                engine.abort(gone)
            outputs += engine.step().outputs if engine.has_work else ()
        outputs += run(engine)
        for name, request in requests.items():
            for choice in range(request.params.n):
                expected = solo_tokens(request, choice, runner.model_config)
                found = tokens_of(outputs, name, choice)
                assert found == (expected[: len(found)] if name in aborted else expected)
        check_no_leak(engine)
        load = engine.load().kv_host
        hits, swaps = hits + load.hit_tokens, swaps + load.num_swapped_blocks
        loads += load.loaded_bytes
    assert hits
    assert loads
    assert swaps or layout.groups[0].window  # windows alone leave room for all
