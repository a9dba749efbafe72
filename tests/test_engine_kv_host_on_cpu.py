"""The host tier of KV on the reference backend: the tokens are those of an engine with room."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from engine.block_copies import runs_of
from engine.block_tables import BlockTables
from engine.blocks import BlockPool
from engine.core import Engine
from engine.errors import EngineMemoryError, UnsupportedModelError
from engine.kv_cache import LayerArrivals
from engine.kv_layout import kv_layout
from engine.runner import ModelRunner
from engine.types import Request, ResumedChoice, SamplingParams
from tests.engine_helpers import (
    BLOCK_SIZE,
    make_base,
    make_named_adapters,
    make_runner,
    random_prompt,
)
from tests.fakes import FakeRunner, make_config, make_engine, make_request
from tests.family_bases import VARIANTS, make_family_base
from tests.kv_host_helpers import (
    SlowCopy,
    always_copies,
    answers_in_turns,
    check_no_leak,
    layered_copies,
    runner_with_host,
    slow_copies,
)

HOST = 4 << 20  # bytes
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=16, seed=5, ignore_eos=True)
Found = dict[tuple[str, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("host") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_named_adapters(base, {"x": (3, ("q_proj", "v_proj")), "y": (8, ("k_proj",))})


def open_runner(base: Path, adapters: dict[str, Path], num_blocks: int, host: int) -> ModelRunner:
    runner = make_runner(base, num_blocks=num_blocks, kv_host_bytes=host)
    for name, path in adapters.items():
        runner.load_adapter(name, path)
    return runner


def open_engine(runner: ModelRunner) -> Engine:
    return Engine(make_config(block_size=BLOCK_SIZE, max_num_batched_tokens=32), runner)


def requests() -> list[Request]:
    """Requests of three prefixes, two adapters and two tenants, with choices and resumed ones."""
    draws = Random(3)
    found = []
    for i in range(18):
        prompt = (*random_prompt(45, seed=i % 3), *random_prompt(draws.randrange(1, 9), seed=i))
        params = replace(draws.choice([GREEDY, DRAWN]), n=draws.choice([1, 1, 2]))
        adapter, salt = draws.choice([None, "x", "y"]), draws.choice(["", "", "tenant"])
        resumed: tuple[ResumedChoice, ...] = ()
        if i % 9 == 4:  # it comes from another engine
            params = replace(params, n=1)
            resumed = (ResumedChoice(0, tuple(random_prompt(7, seed=i))),)
        found.append(Request(f"r{i}", prompt, params, adapter, salt, resumed=resumed))
    return found


def run(engine: Engine, aborted: tuple[str, ...] = ()) -> Found:
    """Adds a request in each fourth step, so that prefixes leave the device and return."""
    found: Found = {}
    left = requests()
    turn = 0
    while left or engine.has_work:
        if left and turn % 4 == 0:
            request = left.pop(0)
            engine.add_request(request)
        if turn % 7 == 0 and aborted:
            name, *rest = aborted
            engine.abort(name)
            aborted = tuple(rest)
        turn += 1
        for output in engine.step().outputs if engine.has_work else ():
            assert output.error is None
            key = output.request_id, output.choice
            found[key] = found.get(key, ()) + output.token_ids
    return found


@pytest.fixture(scope="module")
def expected(base: Path, adapters: dict[str, Path]) -> Found:
    engine = open_engine(open_runner(base, adapters, 800, 0))
    found = run(engine)
    assert engine.load().num_preemptions == 0
    return found


@pytest.mark.parametrize("is_slow", [False, True])
def test_tokens_are_those_of_an_engine_with_room(
    base: Path, adapters: dict[str, Path], expected: Found, is_slow: bool
) -> None:
    runner = open_runner(base, adapters, 32, HOST)
    draws = Random(1)
    if is_slow:
        slow_copies(runner, lambda: draws.randrange(1, 12))
    engine = open_engine(runner)
    always_copies(engine)
    assert run(engine) == expected
    load = engine.load()
    assert load.num_preemptions
    assert load.kv_host.hit_tokens
    assert load.kv_host.num_swapped_blocks
    assert load.kv_host.load_s > 0 < load.kv_host.store_s
    check_no_leak(engine)


def test_aborts_in_the_middle_of_loads_leave_nothing(
    base: Path, adapters: dict[str, Path], expected: Found
) -> None:
    runner = open_runner(base, adapters, 32, HOST)
    slow_copies(runner, lambda: 9)
    engine = open_engine(runner)
    gone = ("r3", "r5", "r8", "r9", "r11", "r12", "r15")
    found = run(engine, gone)
    for key, tokens in expected.items():
        if key[0] in gone:
            assert found.get(key, ()) == tokens[: len(found.get(key, ()))]
        else:
            assert found[key] == tokens
    assert engine.load().kv_host.loaded_bytes
    check_no_leak(engine)


def test_a_load_of_more_blocks_than_a_step_evicts_none_that_is_not_stored() -> None:
    runner = FakeRunner(100, layout=kv_layout((None,), 4, 1 << 20, is_contiguous=True))
    copier = runner_with_host(runner, 2000)
    engine, _ = make_engine(runner, max_num_batched_tokens=16, max_num_seqs=2)
    always_copies(engine)
    prompts = [[1 + i, *([7] * 160)] for i in range(5)]  # 40 blocks each
    answers_in_turns(engine, prompts, SamplingParams(max_tokens=1), 1)
    num_held = copier.num_held
    answers_in_turns(engine, prompts, SamplingParams(max_tokens=1), 2)
    load = engine.load()
    assert load.kv_host.num_dropped_blocks == 0
    # A step waits for the load of its prompt, and for stores of blocks that it writes, one a
    # prompt: not for those of the blocks of the load.
    assert 10 < copier.num_held - num_held <= 20
    assert load.kv_host.hit_tokens == 10 * 160
    check_no_leak(engine)


def test_a_load_waits_for_the_stores_of_a_step_and_not_of_a_long_prompt() -> None:
    runner = FakeRunner(1000, layout=kv_layout((None,), 4, 1 << 20, is_contiguous=True))
    copier = runner_with_host(runner, 4000)
    engine, _ = make_engine(runner, max_num_batched_tokens=16, max_num_seqs=2)
    always_copies(engine)
    prefix = [1 + i % 7 for i in range(40)]
    others = [[9 + i % 6, i // 6, *([7] * 200)] for i in range(30)]  # as many blocks as there are
    answers_in_turns(engine, [prefix, *others], SamplingParams(max_tokens=1), 1)
    offload = engine._offload
    assert offload is not None
    offload.begin_step()
    copier._left = 1000  # no copy ends by itself
    stored = offload._host.num_storing
    engine.add_request(make_request("long", [*prefix, *([8] * 3000)]))
    (item,) = engine.scheduler.schedule().sequences
    assert item.start == 40
    assert offload._host.num_storing - stored <= 10 + offload._step_blocks
    assert engine.load().kv_host.num_dropped_blocks == 0


def test_a_load_is_a_few_copies_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is stored from its end on: in its own order no two blocks are neighbours."""
    runner = FakeRunner(100, layout=kv_layout((None,), 4, 1 << 20, is_contiguous=True))
    copier = runner_with_host(runner, 2000)
    engine, _ = make_engine(runner, max_num_batched_tokens=64, max_num_seqs=2)
    always_copies(engine)
    counts: list[tuple[int, int]] = []
    load = copier.load

    def count(slots: list[int], blocks: list[int], *, in_parts: bool = False) -> SlowCopy:
        counts.append((len(slots), len(list(runs_of(slots, blocks)))))
        return load(slots, blocks, in_parts=in_parts)

    monkeypatch.setattr(copier, "load", count)
    prompts = [[1 + i, *([7] * 160)] for i in range(5)]  # 40 blocks each
    answers_in_turns(engine, prompts, SamplingParams(max_tokens=1), 4)
    assert len(counts) == 15
    assert all(num_blocks == 40 and num_runs <= 8 for num_blocks, num_runs in counts)


def test_a_step_computes_the_first_layers_while_the_last_ones_arrive(tmp_path: Path) -> None:
    """A part of a load that is read before it is waited for is not a number."""
    base = make_base(tmp_path / "base", num_hidden_layers=6)
    prompts = [random_prompt(70, seed=seed) for seed in range(4)]

    def answers(host: int) -> list[tuple[int, ...]]:
        runner = make_runner(base, num_blocks=50 if host else 900, kv_host_bytes=host)
        copier = layered_copies(runner) if host else None
        engine = open_engine(runner)
        if host:
            always_copies(engine)
        found = answers_in_turns(engine, prompts, GREEDY, 3)
        if copier is not None:
            assert copier.num_in_parts == 2 * len(prompts)
            assert engine.load().kv_host.hit_tokens > 2 * 4 * 60
            check_no_leak(engine)
        return found

    assert answers(HOST) == answers(0)


def test_the_next_step_waits_for_a_load_whose_request_is_gone(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", num_hidden_layers=6)
    prompts = [random_prompt(70, seed=seed) for seed in range(4)]
    expected = answers_in_turns(open_engine(make_runner(base, num_blocks=900)), prompts, GREEDY, 1)
    runner = make_runner(base, num_blocks=50, kv_host_bytes=HOST)
    copier = layered_copies(runner)
    engine = open_engine(runner)
    always_copies(engine)
    answers_in_turns(engine, prompts, GREEDY, 1)
    engine.add_request(Request("gone", tuple(prompts[0]), GREEDY))
    batch = engine.scheduler.schedule()
    assert [item.sequence.request.request_id for item in batch.sequences] == ["gone"]
    assert copier.num_in_parts == 1
    copier._left = 1000  # no copy ends by itself
    engine.abort("gone")
    assert answers_in_turns(engine, prompts[:1], GREEDY, 1) == expected[:1]
    check_no_leak(engine)


def test_layers_wait_for_their_parts_in_order() -> None:
    waits: list[tuple[str, int]] = []

    def parts(name: str) -> list[tuple[int, SimpleNamespace]]:
        return [
            (first, SimpleNamespace(wait=partial(waits.append, (name, first))))
            for first in (0, 3, 5)
        ]

    arrivals = LayerArrivals()
    arrivals.wait(0)
    arrivals.wait_for_all()
    assert not waits
    arrivals.expect(parts("a"))
    for layer in range(5):
        arrivals.wait(layer)
        assert waits == [("a", 0), ("a", 3)][: 1 + (layer >= 3)]
    arrivals.expect(parts("b"))  # the step before failed: these end after its last part
    arrivals.wait(0)
    arrivals.wait_for_all()
    arrivals.wait(7)
    assert waits[2:] == [("b", 0), ("b", 5)]


def test_a_step_that_waits_for_a_load_measures_nothing() -> None:
    runner = FakeRunner(24, layout=kv_layout((None,), 4, 1 << 20, is_contiguous=True))
    runner_with_host(runner, 120)
    engine, _ = make_engine(runner)
    always_copies(engine)
    prompts = [[1 + i, *([7] * 40)] for i in range(7)]
    answers_in_turns(engine, prompts, SamplingParams(max_tokens=1), 1)
    measured: list[int] = []
    engine._cost.observe = lambda *numbers: measured.append(numbers[0])  # type: ignore[method-assign]
    answers_in_turns(engine, prompts[:1], SamplingParams(max_tokens=2), 1)
    assert engine.load().kv_host.loaded_bytes
    assert measured == [0]  # the decode alone


def test_a_load_that_nobody_waits_for_holds_no_block_of_an_idle_engine() -> None:
    runner = FakeRunner(24, layout=kv_layout((None,), 4, 1 << 20, is_contiguous=True))
    copier = runner_with_host(runner, 120)
    engine, _ = make_engine(runner)
    always_copies(engine)
    prompts = [[1 + i, *([7] * 40)] for i in range(7)]
    answers_in_turns(engine, prompts, SamplingParams(max_tokens=1), 1)
    copier._left = 1000  # no further copy ends by itself
    engine.add_request(make_request("short", 3, max_tokens=3))
    engine.step()
    engine.add_request(make_request("long", prompts[0]))
    engine.step()
    assert [one.request.request_id for one in engine.scheduler.waiting] == ["long"]
    engine.abort("long")
    while engine.has_work:
        engine.step()
    assert engine.load().kv_usage == 0.0


def test_groups_of_full_and_windowed_layers_come_back(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["gemma 3"])
    prompts = [random_prompt(70, seed=seed) for seed in range(4)]

    def answers(host: int) -> list[tuple[int, ...]]:
        runner = make_runner(base, num_blocks=50 if host else 900, kv_host_bytes=host)
        assert len(runner.kv_layout.groups) == 2
        engine = open_engine(runner)
        if host:
            always_copies(engine)
        found = answers_in_turns(engine, prompts, GREEDY, 2)
        if host:
            assert engine.load().kv_host.hit_tokens > 2 * 60
            check_no_leak(engine)
        return found

    assert answers(HOST) == answers(0)


def test_restored_blocks_are_equal_to_the_bit(base: Path) -> None:
    runner = make_runner(base, num_blocks=8, kv_host_bytes=HOST)
    blocks, copies = runner._kv.blocks, runner.kv_copies
    assert blocks is not None
    assert copies is not None
    # Each layer's K and V of a block are in it, and nothing else.
    for layer, (k, v) in enumerate(zip(runner._kv.k, runner._kv.v, strict=True)):
        for block in range(8):
            entry = runner.kv_layout.entry(0, block)
            k[entry], v[entry] = 100 * layer + block, -100 * layer - block
    before = blocks.clone()
    values = {float(value) for value in blocks[3].view(torch.float32)}
    assert values == {3.0, -3.0, 103.0, -103.0}
    copies.store([3, 4, 5, 1], [0, 1, 2, 9])
    blocks.zero_()
    copies.load([2, 1, 0, 9], [5, 4, 3, 1])
    assert torch.equal(blocks[[1, 3, 4, 5]], before[[1, 3, 4, 5]])
    assert not blocks[[0, 2, 6, 7]].any()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"kv_host_bytes": 100}, UnsupportedModelError, "kv_host_bytes is 100, and a KV"),
        (
            {"kv_host_bytes": HOST, "enable_prefix_caching": False},
            UnsupportedModelError,
            "enable_prefix_caching is False",
        ),
        (
            {"kv_host_bytes": 1 << 50, "adapter_host_bytes": 1 << 20},
            EngineMemoryError,
            "kv_host_bytes is 1048576.000 GiB, but this machine has",
        ),
    ],
)
def test_a_host_tier_that_cannot_be_is_refused(
    base: Path, changes: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        make_runner(base, **changes)


def test_an_engine_without_a_host_tier_has_nothing_of_it(base: Path) -> None:
    runner = make_runner(base)
    engine = open_engine(runner)
    tables = engine.scheduler._tables
    assert (type(engine._blocks), type(tables)) == (BlockPool, BlockTables)
    assert (engine._offload, runner.kv_copies, runner._kv.blocks) == (None, None, None)
    assert runner.kv_layout.stride == 1
    assert len({one.untyped_storage().data_ptr() for one in (*runner._kv.k, *runner._kv.v)}) == 4
