"""A whole engine on a CUDA device: neighbours, graphs, prefix hits. Tiny random bases.

To the bit the same, tokens and log-probabilities: a request in steps of the same number of tokens,
for any neighbours, adapters and block positions; and a step that a graph of exactly its size
replays, compared with the same step launched kernel by kernel. Up to rounding only: steps of
another number of tokens (another batch, padding to a graph's size, a prefix hit, other chunks),
because the libraries choose another matrix product for them, and few rows in 16 bits use one of
ours. fp32 then gives the same greedy tokens here; bfloat16 differs where the two best are nearly
equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.decode_graphs import GraphKey, graph_sizes
from engine.device_step import DeviceSteps
from engine.inputs import LoraReach
from engine.runner import ModelRunner
from engine.types import Request, ResumedChoice, Sample, ScheduledBatch
from tests.engine_agreement import (
    NUM_TOKENS,
    OPTIONAL,
    OWNERS,
    PARAMS,
    TOLERANCE,
    Reply,
    assert_same,
    decoding,
    make_adapters,
    make_engine,
    neighbours,
    open_runner,
    probe,
    run_all,
)
from tests.engine_helpers import make_base, part, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
MAX_SEQS = 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_adapters(base)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(base: Path, adapters: dict[str, Path], request: pytest.FixtureRequest) -> ModelRunner:
    return open_runner(base, adapters, DEVICE, request.param, MAX_SEQS)


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[None]:
    assert isinstance(runner._steps, DeviceSteps)
    graphs, mixed = runner._steps._graphs, runner._steps._mixed_graphs
    kept, graphs._graphs, mixed._graphs = (graphs._graphs, mixed._graphs), {}, {}
    try:
        yield
    finally:
        graphs._graphs, mixed._graphs = kept


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


def test_what_is_resumed_goes_on_as_if_undisturbed(runner: ModelRunner) -> None:
    """Its old tokens are one chunk of a prompt, beside others that decode in graphs."""
    drawn = replace(PARAMS, temperature=1.0, seed=5, presence_penalty=0.5)
    probes = [
        replace(one, params=params, request_id=f"{one.request_id}-{name}")
        for one in (probe(i) for i in range(6))
        for name, params in (("greedy", PARAMS), ("drawn", drawn))
    ]
    whole = run_all(make_engine(runner), probes)
    for done in (1, NUM_TOKENS // 2, NUM_TOKENS - 1):
        resumed = [
            replace(one, resumed=(ResumedChoice(0, whole[one.request_id].tokens[:done]),))
            for one in probes
        ]
        replies = run_all(make_engine(runner), [*resumed, *neighbours(9, seed=done)])
        for one in probes:
            before, rest = whole[one.request_id], replies[one.request_id]
            expected = replace(before, tokens=before.tokens[done:], logprobs=before.logprobs[done:])
            if runner.dtype == torch.float32 or one.params is PARAMS:
                assert_same(runner, rest, expected)  # a draw in bfloat16 may part by rounding


@pytest.mark.parametrize("count", [8, 16])  # few rows have kernels of their own
def test_neighbours_of_the_same_size_change_no_bit(runner: ModelRunner, count: int) -> None:
    probes = [replace(probe(i, length=3), adapter=OWNERS[i]) for i in range(6)]
    others = count - len(probes)

    def among(others: list[Request], first: int = 0) -> dict[str, Reply]:
        replies = run_all(make_engine(runner), [*others[:first], *probes, *others[first:]])
        return {p.request_id: replies[p.request_id] for p in probes}

    expected = among(neighbours(others, 1, 3, (None,)))
    for seed in (2, 3, 4):
        assert among(neighbours(others, seed, 3, OWNERS), first=seed) == expected
    only_base = [replace(p, adapter=None) for p in probes[:1]] + neighbours(
        count - 1, 5, 3, (None,)
    )
    assert run_all(make_engine(runner), only_base)["probe-0"] == expected["probe-0"]


def test_what_nobody_wrote_is_never_read(runner: ModelRunner) -> None:
    requests = [*(probe(i) for i in range(6)), *neighbours(26, seed=8)]
    expected = run_all(make_engine(runner), requests)
    for tensor in (*runner._kv.k, *runner._kv.v):
        tensor.fill_(float("nan"))
    assert run_all(make_engine(runner), requests) == expected
    for tensor in (*runner._kv.k, *runner._kv.v):
        tensor.zero_()


def test_50_replays_with_changed_adapters_equal_steps_without_graphs(runner: ModelRunner) -> None:
    sequences = decoding(MAX_SEQS)
    step(runner, *(part(sequence) for sequence in sequences))
    draw, sizes = random.Random(6), graph_sizes(MAX_SEQS)
    for _ in range(50):
        count = draw.choice(sizes) if draw.random() < 0.8 else draw.randint(1, MAX_SEQS)
        chosen = [
            replace(s, request=replace(s.request, adapter=draw.choice(OWNERS)))
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


def test_a_head_or_an_embedding_keeps_a_decode_in_its_graph(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the base keep their bits beside them, rows with them do not have the base's."""
    assert isinstance(runner._steps, DeviceSteps)
    graphs, replayed = runner._steps._graphs, list[GraphKey]()
    replay = graphs.replay

    def noted(key: GraphKey) -> torch.Tensor:
        replayed.append(key)
        return replay(key)

    monkeypatch.setattr(graphs, "replay", noted)
    sequences = decoding(32)
    for count in (4, 32):
        step(runner, *(part(sequence) for sequence in sequences[:count]))

        def decoded(*owners: str | None, count: int = count) -> tuple[Sample, ...]:
            chosen = [
                replace(s, request=replace(s.request, adapter=owners[i * len(owners) // count]))
                for i, s in enumerate(sequences[:count])
            ]
            return runner.execute(ScheduledBatch(tuple(part(s) for s in chosen)))

        replayed.clear()
        base, mixed = decoded(None), decoded(None, *OPTIONAL)
        assert replayed == [GraphKey(count, LoraReach.NONE), GraphKey(count, LoraReach.ALL)]
        others = count // 3
        assert mixed[:others] == base[:others]
        with without_graphs(runner):
            assert decoded(None, *OPTIONAL) == mixed
        for ours, theirs in zip(mixed[others + 1 :], base[others + 1 :], strict=True):
            assert ours.logprobs != theirs.logprobs


def test_every_owner_is_asked() -> None:
    assert {probe(i).adapter for i in range(6)} == set(OWNERS)
    assert PARAMS.max_tokens == NUM_TOKENS
