"""Several ranks on CUDA devices: exchanges to the bit, engines beside one of one rank, the death of
a rank. Tiny random bases. A rank that fails writes its traceback to standard error."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device_step import DeviceSteps
from engine.devices import describe_links
from engine.model import Model
from engine.runner import ModelRunner
from engine.types import Request
from kernels.collective import Collective
from kernels.cuda_collective import SymmetricMemory
from kernels.exchange_norm import all_reduce_add_rms_norm, lora_all_reduce_add_rms_norm
from kernels.lora_add_rms_norm import lora_add_rms_norm
from kernels.lora_shrink_expand import lora_shrink
from kernels.rendezvous import meet
from kernels.rms_norm import add_rms_norm
from tests.engine_agreement import (
    ADAPTERS,
    OPTIONAL,
    OWNERS,
    PARAMS,
    Reply,
    assert_alike,
    assert_same,
    make_engine,
    neighbours,
    probe,
    run_all,
)
from tests.engine_helpers import make_base, make_named_adapters, make_runner, random_prompt
from tests.kv_host_helpers import always_copies, check_no_leak
from tests.lora_kernel_cases import make_case
from tests.rank_processes import checksum, on_processes, record_residuals, recording_main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
_SIZES = [8 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20]  # bytes
_COLUMNS = 1024


def _exchange(rank: int, size: int, store: Path) -> dict[str, list[int]]:
    """Returns, for the usual way and for both of shared memory, checksums of sums and gathers of
    all sizes, out of a graph and in one, after a check of the values."""
    device = torch.device("cuda", rank)
    ranks = meet(store, rank, size, device, 16 << 20)
    assert isinstance(ranks, SymmetricMemory), "the devices share no memory"
    numbers = torch.full((7,), rank, dtype=torch.int32, device=device)
    ranks.broadcast_(numbers)
    assert numbers.tolist() == [0] * 7
    found = {"usual": _sums(ranks)}
    for way, one_shot_bytes in (("two shots", 0), ("one shot", 1 << 60)):
        ranks._one_shot_bytes = one_shot_bytes
        found[way] = _sums(ranks)
    return found


def _sums(ranks: Collective) -> list[int]:
    rank, size, device = ranks.rank, ranks.size, torch.device("cuda", ranks.rank)
    found: list[int] = []
    for dtype in (torch.bfloat16, torch.float32):
        for num_bytes in _SIZES:
            rows = num_bytes // (_COLUMNS * dtype.itemsize)
            parts = []
            for one in range(size):
                generator = torch.Generator(device).manual_seed(one)
                shape = (rows, _COLUMNS)
                parts.append(torch.randn(shape, generator=generator, device=device).to(dtype))
            expected = (parts[0].float() + parts[1].float()).to(dtype)
            x = parts[rank]
            total = ranks.all_reduce(x.clone()).clone()
            assert torch.equal(total, expected), (dtype, num_bytes, "outside of a graph")
            columns = x[: max(1, rows // 8), :100]
            gathered = ranks.all_gather(columns)
            own = gathered[:, 100 * rank : 100 * (rank + 1)]
            assert torch.equal(own, columns), (dtype, num_bytes, "gathered")
            found += [checksum(total), checksum(gathered)]
            found += _exchange_in_graph(ranks, x, columns, expected)
    return found


def _exchange_in_graph(
    ranks: Collective, x: torch.Tensor, columns: torch.Tensor, expected: torch.Tensor
) -> list[int]:
    """Two exchanges that follow each other in one graph, replayed several times."""
    ranks.all_reduce(x + 0).clone()  # loads kernels, which must not happen in a capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        first = ranks.all_reduce(x.clone()).clone()
        second = ranks.all_reduce(x + 0).clone()
        gathered = ranks.all_gather(columns)
        graph.capture_end()
    torch.cuda.synchronize()
    for _ in range(3):
        for one in (first, second, gathered):
            one.zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)
    return [checksum(first), checksum(second), checksum(gathered)]


def test_the_connections_of_the_devices_are_known() -> None:
    links = describe_links()
    count = torch.cuda.device_count()
    assert len(links) == count * (count - 1) // 2
    assert all(link.kind for link in links)


def test_all_ranks_have_the_same_bits_in_and_out_of_graphs() -> None:
    first, second = on_processes(2, _exchange, timeout_s=90.0)
    assert first == second
    assert first["one shot"] == first["two shots"], "of two ranks, each way rounds once"


def _exchange_rows(rank: int, size: int, store: Path) -> list[int]:
    """Returns checksums of normed sums: rows of kernels that exchange them by themselves, beside an
    exchange and a norm, alone and many in a graph, while one rank is late."""
    device, found = torch.device("cuda", rank), list[int]()
    for number, (hidden, dtype) in enumerate(
        [(4096, torch.bfloat16), (8192, torch.bfloat16), (576, torch.float32)]
    ):
        row_bytes = hidden * dtype.itemsize
        ranks = meet(store.with_name(f"store-{number}"), rank, size, device, 1 << 20, row_bytes)
        assert isinstance(ranks, SymmetricMemory), "the devices share no memory"
        for rows in (1, 2, 7, 64, 256):
            drawn = [
                torch.randn(
                    (rows, hidden), generator=torch.Generator(device).manual_seed(i), device=device
                ).to(dtype)
                for i in range(size + 2)
            ]
            x, residual, weight = drawn[rank], drawn[size], drawn[size + 1][0].contiguous()
            assert ranks.row_memory(x, 0) is not None
            total = sum(one.float() for one in drawn[:size])
            assert isinstance(total, torch.Tensor)
            expected, added = add_rms_norm(total.to(dtype), residual.clone(), weight, 1e-5)
            for kind in (0, 1):
                mine = residual.clone()
                out, new = all_reduce_add_rms_norm(ranks, x, mine, weight, 1e-5, 1.0, kind)
                assert torch.equal(new, added), (hidden, rows, kind)
                assert torch.equal(out, expected), (hidden, rows, kind)
            found += _chain_of_exchanges(ranks, x, residual, weight)
    return found


def _chain_of_exchanges(
    ranks: Collective, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> list[int]:
    """Forty layers in a graph, each of which reads the one before, of all rows and of fewer."""
    few = max(1, len(x) // 3)

    def run() -> torch.Tensor:
        out, added = x, residual.clone()
        for layer in range(40):
            own = out * (1.0 + ranks.rank)
            out, added = all_reduce_add_rms_norm(ranks, own, added, weight, 1e-5, 0.1, layer % 2)
            if layer % 2:
                part = all_reduce_add_rms_norm(
                    ranks, own[:few].contiguous(), added[:few].clone(), weight, 1e-5, 0.1, 0
                )[0]
                out[:few] += part
                part = all_reduce_add_rms_norm(
                    ranks, part, added[:few].clone(), weight, 1e-5, 0.1, 1
                )[0]
                out[:few] += part
        return out

    expected = run().clone()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        out = run()
        graph.capture_end()
    found = [checksum(expected)]
    for turn in range(6):
        torch.cuda.synchronize()
        out.zero_()
        if turn % 2 == ranks.rank:
            torch.cuda._sleep(3_000_000)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    return found


def test_rows_that_kernels_exchange_have_the_bits_of_a_sum_and_a_norm() -> None:
    first, second = on_processes(2, _exchange_rows, timeout_s=120.0)
    assert first == second


def _exchange_bridges(rank: int, size: int, store: Path, is_int8: bool) -> list[int]:
    """Returns checksums of sums of rows and bridges; the bits are those of one rank whose bridge
    has the planes of all."""
    device, hidden, found = torch.device("cuda", rank), 4096, list[int]()
    ranks = meet(store, rank, size, device, 1 << 20, 2 * hidden)
    for rows in (1, 9, 64):
        adapters = [16] * 32 if rows == 64 else [8, 40, 16, 64, 512]
        runs: list[tuple[int | None, int]] = {
            1: [(3, 1)],
            9: [(0, 2), (None, 1), (1, 2), (3, 1), (4, 2), (2, 1)],
            64: [(i if i % 5 else None, 2) for i in range(32)],
        }[rows]
        case = make_case(
            adapters,
            runs,
            in_features=128,
            sizes=(hidden,),
            dtype=torch.bfloat16,
            device=str(device),
            is_int8=is_int8,
        )
        plan, site = case.plan(large=False), case.site
        drawn = [torch.Generator(device).manual_seed(i) for i in range(size + 1)]
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        inputs = [torch.randn((rows, 128), generator=one, **options) for one in drawn]
        parts = [torch.randn((rows, hidden), generator=one, **options) for one in drawn]
        bridges = [lora_shrink(x, site, plan) for x in inputs[:size]]
        assert len(bridges[0].planes) <= 2, "sums of more would depend on their order"
        weight = torch.ones(hidden, **options)
        planes = torch.stack([one.planes.sum(0) for one in bridges])
        total = sum(one.float() for one in parts[:size])
        assert isinstance(total, torch.Tensor)
        expected = total.to(torch.bfloat16), parts[size].clone()
        both = lora_add_rms_norm(
            *expected, weight, 1e-5, replace(bridges[rank], planes=planes), site, plan
        )
        for turn in range(8):
            if turn % 2 == rank:
                torch.cuda._sleep(2_000_000)
            residual = parts[size].clone()
            out, new = lora_all_reduce_add_rms_norm(
                ranks, parts[rank], residual, weight, 1e-5, bridges[rank], site, plan, 1.0, turn % 2
            )
            assert torch.equal(out, both[0]), (rows, turn)
            assert torch.equal(new, both[1]), (rows, turn)
            found.append(checksum(out))
    return found


@pytest.mark.parametrize("is_int8", [False, True])
def test_bridges_travel_beside_the_rows(is_int8: bool) -> None:
    first, second = on_processes(2, _exchange_bridges, is_int8, timeout_s=120.0)
    assert first == second


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    return make_base(
        folder,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_named_adapters(base, ADAPTERS | OPTIONAL)


def _open(base: Path, adapters: dict[str, Path], size: int, **changes: object) -> ModelRunner:
    values: dict[str, object] = {
        "backend": "triton",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "num_blocks": 80,
        "gpu_memory_utilization": 0.3,
        "tensor_parallel_size": size,
        "adapter_pool_bytes": 16 << 20,
    }
    runner = make_runner(base, "cuda", **(values | changes))
    for name, path in adapters.items():
        runner.load_adapter(name, path)
    return runner


def _requests() -> list[Request]:
    """Greedy and drawn ones, with and without adapters, penalties and logits that change."""
    probes = [probe(i) for i in range(len(OWNERS))]
    others = neighbours(24, seed=5)
    drawn = [
        replace(one, params=replace(one.params, temperature=0.8, seed=i, top_p=0.9))
        for i, one in enumerate(others[:8])
    ]
    late = [
        replace(one, params=replace(one.params, repetition_penalty=1.3, logit_bias=((7, 2.0),)))
        for one in others[8:14]
    ]
    asked = [replace(one, params=replace(one.params, prompt_logprobs=1)) for one in others[14:18]]
    return [*probes, *drawn, *late, *asked, *others[18:]]


def _replies(runner: ModelRunner) -> dict[str, Reply]:
    """Returns those of two rounds; the second finds prefixes of the first."""
    engine = make_engine(runner, max_num_seqs=16, max_num_batched_tokens=96)
    first = run_all(engine, _requests())
    again = [replace(one, request_id=f"again-{one.request_id}") for one in _requests()]
    return first | run_all(engine, again)


@pytest.fixture(scope="module")
def alone(base: Path, adapters: dict[str, Path]) -> dict[str, Reply]:
    return _replies(_open(base, adapters, 1))


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_two_ranks_give_the_tokens_of_one_and_have_equal_residuals(
    base: Path,
    adapters: dict[str, Path],
    alone: dict[str, Reply],
    is_eager: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, other = tmp_path / "rank-0", tmp_path / "rank-1"
    monkeypatch.setattr("engine.parallel.group._MAIN", recording_main(str(other)))
    for owner, name in ((Model, "logits"), (DeviceSteps, "_run")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    record_residuals(str(own))
    runner = _open(base, adapters, 2, enforce_eager=is_eager, mixed_graphs=not is_eager)
    try:
        found = _replies(runner)
        lines = own.read_text().splitlines()
        ends_s = time.monotonic() + 10
        while len(other.read_text().splitlines()) < len(lines) and time.monotonic() < ends_s:
            time.sleep(0.05)  # the other rank's last record may be under way
    finally:
        runner.close()
    for name, reply in found.items():
        assert_same(runner, reply, alone[name])
    assert len(lines) > 50
    assert other.read_text().splitlines() == lines


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_two_ranks_in_fewer_bits_answer_as_one(
    base: Path, adapters: dict[str, Path], is_eager: bool
) -> None:
    settings = {
        "dtype": "bfloat16",
        "quantization": "fp8",
        "lora_dtype": "int8",
        "kv_cache_dtype": "fp8",
        "enforce_eager": is_eager,
    }
    found = []
    for size in (1, 2):
        runner = _open(base, adapters, size, **settings)
        with closing(runner):
            late = runner.num_late_compilations
            found.append(_replies(runner))
            assert runner.num_late_compilations == late
    alone, both = found
    for name, reply in both.items():
        if name.removeprefix("again-").startswith("probe"):  # greedy, and nothing changes logits
            assert_alike(reply, alone[name], 0.9)
        assert reply.error is None


def _loops(runner: ModelRunner, mode: str) -> dict[str, Reply]:
    """Returns the answers to prompts that repeat themselves: drafts are found in them."""
    engine = make_engine(runner, max_num_seqs=16, max_num_batched_tokens=96, speculation=mode)
    asked = []
    for turn in range(2):
        for i, owner in enumerate((*OWNERS, *OWNERS)):
            params = replace(
                PARAMS, max_tokens=24, temperature=0.7 * (i % 2), seed=i, logprobs=None
            )
            prompt = tuple(random_prompt(6, seed=i) * 6)
            asked.append(Request(f"{turn}-{i}", prompt, params, owner))
    found = run_all(engine, asked)
    load = engine.load()
    assert (load.num_accepted_tokens > 0) == (mode != "off")
    return found


def test_drafts_on_two_ranks_change_no_token(base: Path, adapters: dict[str, Path]) -> None:
    with closing(_open(base, adapters, 1)) as runner:
        expected = _loops(runner, "off")
    with closing(_open(base, adapters, 2, speculation="suffix")) as runner:
        found = _loops(runner, "suffix")
    for name, reply in expected.items():
        assert reply.error is None
        assert found[name].tokens == reply.tokens


def test_a_host_tier_on_two_ranks_changes_no_token(base: Path, adapters: dict[str, Path]) -> None:
    """Prefixes leave the devices and return, and sequences are preempted."""

    def answers(size: int, num_blocks: int, host: int) -> dict[str, Reply]:
        runner = _open(base, adapters, size, num_blocks=num_blocks, kv_host_bytes=host)
        with closing(runner):
            engine = make_engine(runner, max_num_batched_tokens=128, max_num_seqs=8)
            if host:
                always_copies(engine)
            found: dict[str, Reply] = {}
            for turn in range(3):
                longer = replace(PARAMS, max_tokens=40)
                found |= run_all(
                    engine,
                    [
                        Request(f"{turn} {i}", tuple(random_prompt(77 + i % 8, i)), longer, owner)
                        for i, owner in enumerate((*OWNERS, None, "all", "wide"))
                    ],
                )
            load = engine.load()
            if host:
                assert load.num_preemptions
                assert load.kv_host.loaded_bytes
                check_no_leak(engine)
            return found

    expected, found = answers(1, 400, 0), answers(2, 36, 8 << 20)
    for name, reply in expected.items():
        assert reply.error is None
        assert found[name].tokens == reply.tokens


_KILL = """
import asyncio, os, signal, sys, threading, time
from engine.config import EngineConfig
from engine.factory import FolderReader, open_engine
from engine.types import Request, SamplingParams

config = EngineConfig(
    sys.argv[1], "base", device="cuda", dtype="float32", block_size=16, num_blocks=512,
    max_num_seqs=8, max_num_batched_tokens=64, tensor_parallel_size=2, gpu_memory_utilization=0.3,
    adapter_pool_bytes=0, mixed_graphs=False,
)
runners = []

def reader_of(runner):
    runners.append(runner)
    return FolderReader(runner)

engine = open_engine(config, reader_of)
died = threading.Event()
engine.on_death(lambda _: died.set())
engine.start()

async def read(i):
    async for _ in engine.generate(Request(f"r{i}", (3, 4, 5), SamplingParams(
        max_tokens=100, ignore_eos=True))):
        pass

async def main():
    async def forever(i):
        while True:
            await read(f"{i}-{time.monotonic()}")
    tasks = [asyncio.create_task(forever(i)) for i in range(2)]
    await asyncio.sleep(1.0)
    began_s = time.monotonic()
    os.kill(runners[0].group.pids[0], signal.SIGKILL)
    while not died.is_set() and time.monotonic() - began_s < 30:
        await asyncio.sleep(0.01)
    print("died", died.is_set(), time.monotonic() - began_s, flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_the_death_of_another_rank_ends_the_engine(base: Path) -> None:
    """Runs in a process of its own, whose device may be left waiting."""
    done = subprocess.run(
        [sys.executable, "-c", _KILL, str(base)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("died")]
    assert said, done.stdout[-2000:] + done.stderr[-4000:]
    _, is_dead, took_s = said[0].split()
    assert is_dead == "True", done.stderr[-4000:]
    assert float(took_s) < 12
