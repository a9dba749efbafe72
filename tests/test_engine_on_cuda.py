"""A whole engine on a CUDA device: company, graphs, prefix hits, faults. Tiny random bases.

To the bit the same, tokens and log-probabilities: a request in steps of the same number of tokens,
whoever its neighbours are, whatever adapters they have, wherever its blocks lie; and a step that a
graph of just its size replays, beside the same step launched kernel by kernel. Up to rounding only:
steps of another number of tokens (another batch, padding to a graph's size, a prefix hit, other
chunks), because the libraries choose another matrix product for them. fp32 then gives the same
greedy tokens here; bfloat16 parts where the two best are hardly apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.decode_graphs import graph_sizes
from engine.device_step import DeviceSteps
from engine.errors import EngineMemoryError
from engine.runner import ModelRunner
from engine.types import Request, Sample, SamplingParams, ScheduledBatch, Sequence
from lora.pool import PAGE_ROWS
from tests.engine_agreement import (
    ADAPTERS,
    NUM_TOKENS,
    OWNERS,
    PARAMS,
    Reply,
    assert_alike,
    make_adapters,
    make_engine,
    neighbours,
    probe,
    run_all,
)
from tests.engine_helpers import make_base, make_runner, make_sequence, part, random_prompt, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
MAX_SEQS = 64
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
IN_GRAPHS = (None, *ADAPTERS)  # those that need no other site


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_adapters(base)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(base: Path, adapters: dict[str, Path], request: pytest.FixtureRequest) -> ModelRunner:
    runner = make_runner(
        base,
        DEVICE,
        backend="triton",
        dtype=request.param,
        block_size=16,
        max_num_seqs=MAX_SEQS,
        num_blocks=320,
    )
    for name, path in adapters.items():
        runner.load_adapter(name, path)
        while not runner.adapters.acquire(name):
            runner.adapters.wait_pending()
    return runner


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[None]:
    assert isinstance(runner._steps, DeviceSteps)
    graphs = runner._steps._graphs
    kept, graphs._graphs = graphs._graphs, {}
    try:
        yield
    finally:
        graphs._graphs = kept


def assert_same(runner: ModelRunner, found: Reply, expected: Reply) -> None:
    assert_alike(found, expected, TOLERANCE[runner.dtype])
    if runner.dtype == torch.float32:
        assert found.tokens == expected.tokens


def test_a_request_gets_its_tokens_in_any_company(runner: ModelRunner) -> None:
    probes = [probe(i) for i in range(6)]
    alone = {p.request_id: run_all(make_engine(runner), [p])[p.request_id] for p in probes}
    assert len({reply.tokens for reply in alone.values()}) == len(probes)
    pairs = [[p, *neighbours(1, seed)] for seed, p in enumerate(probes)]
    crowds = [[*neighbours(count - 6, count), *probes] for count in (17, MAX_SEQS)]
    settings: dict[str, dict[str, object]] = {
        "as it comes": {},
        "one step at a time": {"is_ahead": False},
        "short chunks": {"max_num_batched_tokens": MAX_SEQS},
        "kernel by kernel": {},
    }
    for name, changes in settings.items():
        for requests in [*pairs, *crowds] if not changes else crowds:
            engine = make_engine(runner, **changes)  # type: ignore[arg-type]
            if name == "kernel by kernel":
                with without_graphs(runner):
                    replies = run_all(engine, requests)
            else:
                replies = run_all(engine, requests)
            for p in probes:
                if p in requests:
                    assert_same(runner, replies[p.request_id], alone[p.request_id])


def test_a_prefix_hit_changes_no_token(runner: ModelRunner) -> None:
    probes = [probe(i, length=33 + i) for i in range(6)]
    engine = make_engine(runner)
    first = run_all(engine, probes)
    assert {reply.num_cached for reply in first.values()} == {0}
    for crowd in (0, 11):
        again = run_all(engine, [*probes, *neighbours(crowd, seed=1)])
        for p in probes:
            assert again[p.request_id].num_cached == 32
            assert_same(runner, again[p.request_id], first[p.request_id])


def test_neighbours_of_the_same_size_change_no_bit(runner: ModelRunner) -> None:
    probes = [replace(probe(i, length=3), adapter=IN_GRAPHS[i % 4]) for i in range(6)]

    def among(others: list[Request], first: int = 0) -> dict[str, Reply]:
        replies = run_all(make_engine(runner), [*others[:first], *probes, *others[first:]])
        return {p.request_id: replies[p.request_id] for p in probes}

    expected = among(neighbours(10, 1, 3, (None,)))
    for seed in (2, 3, 4):
        assert among(neighbours(10, seed, 3, IN_GRAPHS), first=seed) == expected
    only_base = [replace(p, adapter=None) for p in probes[:1]] + neighbours(15, 5, 3, (None,))
    assert run_all(make_engine(runner), only_base)["probe-0"] == expected["probe-0"]


def test_what_nobody_wrote_is_never_read(runner: ModelRunner) -> None:
    requests = [*(probe(i) for i in range(6)), *neighbours(26, seed=8)]
    expected = run_all(make_engine(runner), requests)
    for tensor in (*runner._kv.k, *runner._kv.v):
        tensor.fill_(float("nan"))
    assert run_all(make_engine(runner), requests) == expected
    for tensor in (*runner._kv.k, *runner._kv.v):
        tensor.zero_()


def decoding(count: int) -> list[Sequence]:
    """With two blocks each, their prompts not computed yet."""
    params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=9)
    drawn = replace(params, temperature=0.9, top_p=0.9)
    return [
        make_sequence(
            random_prompt(1 + i % 30, seed=i), 2 * i, (params, drawn)[i % 2], seed=i, num_blocks=2
        )
        for i in range(count)
    ]


def test_50_replays_with_changed_adapters_equal_steps_without_graphs(runner: ModelRunner) -> None:
    sequences = decoding(MAX_SEQS)
    step(runner, *(part(sequence) for sequence in sequences))
    draw, sizes = random.Random(6), graph_sizes(MAX_SEQS)
    for _ in range(50):
        count = draw.choice(sizes) if draw.random() < 0.8 else draw.randint(1, MAX_SEQS)
        chosen = [
            replace(s, request=replace(s.request, adapter=draw.choice(IN_GRAPHS)))
            for s in draw.sample(sequences, count)
        ]
        chosen.sort(key=lambda s: s.request.adapter or "")
        batch = ScheduledBatch(tuple(part(s) for s in chosen))
        replayed = runner.execute(batch)
        with without_graphs(runner):
            launched = runner.execute(batch)
        if count in sizes:
            assert replayed == launched
        for ours, theirs in zip(replayed, launched, strict=True):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            difference = ours.logprobs.top[0][1] - theirs.logprobs.top[0][1]
            assert abs(difference) < TOLERANCE[runner.dtype]


def test_an_adapter_that_is_not_finite_fails_its_own_requests(runner: ModelRunner) -> None:
    requests = [probe(i, length=9) for i in range(6)] + neighbours(10, seed=9, owners=(None,))
    expected = run_all(make_engine(runner), requests)
    broken = {r.request_id for r in requests if r.adapter == "mlp"}
    assert broken
    kept = []
    for site in runner._sites:
        pool = runner.adapters.site_pool(site.name)
        for a in pool.a if pool else ():
            for page in runner.adapters.pages("mlp"):
                rows = a[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
                kept.append((rows, rows.clone()))
                rows.fill_(float("nan"))
    found = run_all(make_engine(runner), requests)
    for rows, values in kept:
        rows.copy_(values)
    for request_id, reply in found.items():
        if request_id in broken:
            assert reply.error is not None
            assert "not finite" in reply.error
        else:
            assert_same(runner, reply, expected[request_id])
    assert run_all(make_engine(runner), requests) == expected  # on the blocks that held NaN


def test_keys_that_are_not_finite_fail_their_own_request(runner: ModelRunner) -> None:
    def answers(broken: int | None) -> tuple[Sample, ...]:
        sequences = decoding(8)
        step(runner, *(part(sequence) for sequence in sequences))
        if broken is not None:
            runner._kv.k[1][sequences[broken].block_table[0], 0] = float("nan")
        return step(runner, *(part(sequence) for sequence in sequences))

    healthy, found = answers(None), answers(5)
    assert found[5] == Sample(None, is_finite=False)
    assert found[:5] + found[6:] == healthy[:5] + healthy[6:]


def all_that_is_left() -> list[torch.Tensor]:
    held: list[torch.Tensor] = []
    for size in (2**24, 2**20, 2**16, 2**9):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            continue
    return held


@contextmanager
def no_memory() -> Iterator[None]:
    """Of the device, for this process: not a byte."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = all_that_is_left()
    try:
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_without_memory_fails_its_batch_and_the_engine_goes_on(runner: ModelRunner) -> None:
    expected = run_all(make_engine(runner), [probe(1), probe(2)])
    engine = make_engine(runner)
    lost = [replace(probe(i), request_id=f"lost-{i}") for i in (0, 1)]
    for request in lost:
        engine.add_request(request)
    outputs = [*engine.step().outputs, *engine.step().outputs]  # a decode is in flight
    with no_memory():
        while engine.has_work:
            outputs += engine.step().outputs
    errors = {output.request_id: output.error for output in outputs if output.finish_reason}
    assert len(errors) == 2
    assert all(error and "failed in a step" in error for error in errors.values())
    assert sum(len(output.token_ids) for output in outputs) < 2 * NUM_TOKENS
    assert run_all(engine, [probe(1), probe(2)]) == expected


def test_a_share_too_small_is_refused_with_the_sum(base: Path) -> None:
    with pytest.raises(EngineMemoryError, match="no KV block fits") as caught:
        make_runner(base, DEVICE, num_blocks=None, gpu_memory_utilization=1e-5, max_num_seqs=4)
    for line in ("- weights", "- adapter pool", "- activations", "- graphs", "= left for KV"):
        assert line in str(caught.value)
    assert "raise gpu_memory_utilization" in str(caught.value)


def test_every_owner_is_asked() -> None:
    assert {probe(i).adapter for i in range(6)} == set(OWNERS)
    assert PARAMS.max_tokens == NUM_TOKENS
