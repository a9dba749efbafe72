"""Failures on a CUDA device stay with their request: adapters and keys that are not finite, steps
without memory. Permanent failures are reported: a share too small, a device that is lost.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from engine.errors import EngineMemoryError
from engine.runner import ModelRunner
from engine.types import NO_MEMORY, Request, Sample
from kernels.lora_shrink_expand import Delta
from tests.engine_agreement import (
    LINEARS,
    NUM_TOKENS,
    PARAMS,
    assert_same,
    decoding,
    make_adapters,
    make_engine,
    neighbours,
    open_runner,
    probe,
    run_all,
)
from tests.engine_helpers import make_adapter, make_base, make_runner, part, random_prompt, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_adapters(base)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(base: Path, adapters: dict[str, Path], request: pytest.FixtureRequest) -> ModelRunner:
    return open_runner(base, adapters, DEVICE, request.param, 16)


def test_an_adapter_that_is_not_finite_fails_its_own_requests(runner: ModelRunner) -> None:
    requests = [probe(i, length=9) for i in range(6)] + neighbours(10, seed=9, owners=(None,))
    expected = run_all(make_engine(runner), requests)
    broken = {r.request_id for r in requests if r.adapter == "mlp"}
    assert broken
    kept = []
    for site in runner._sites:
        for delta in runner.adapters.deltas("mlp").get(site.name, ()):
            assert isinstance(delta, Delta)
            kept.append((delta.a, delta.a.clone()))
            delta.a.fill_(float("nan"))
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
def little_memory(spare: int = 0) -> Iterator[None]:
    """Leaves a number of bytes of the device to this process, in one piece."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = all_that_is_left()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    try:
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_requests_that_fit_no_step_end_and_the_engine_goes_on(runner: ModelRunner) -> None:
    expected = run_all(make_engine(runner), [probe(1), probe(2)])
    engine = make_engine(runner, is_ahead=False)  # a step in flight would leave its memory
    lost = [replace(probe(i), request_id=f"lost-{i}") for i in (0, 1)]
    for request in lost:
        engine.add_request(request)
    outputs = [*engine.step().outputs, *engine.step().outputs]
    with little_memory():
        while engine.has_work:
            outputs += engine.step().outputs
    errors = {output.request_id: output.error for output in outputs if output.finish_reason}
    assert errors == {request.request_id: NO_MEMORY for request in lost}
    assert sum(len(output.token_ids) for output in outputs) < 2 * NUM_TOKENS
    assert run_all(engine, [probe(1), probe(2)]) == expected


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_long_prompt_without_memory_is_computed_in_parts_beside_others(
    tmp_path: Path, is_ahead: bool
) -> None:
    """Parts of a prompt begin with 512 tokens, whose widest activation has 32 MiB in float32; 16
    MiB are left beside the KV."""
    base = make_base(
        tmp_path / "base",
        num_hidden_layers=2,
        intermediate_size=8192,
        max_position_embeddings=4096,
    )
    runner = make_runner(
        base,
        DEVICE,
        backend="triton",
        num_blocks=300,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        mixed_graphs=False,  # the memory of their steps is there from the start
    )
    runner.load_adapter("mlp", make_adapter(tmp_path / "mlp", base, 16, LINEARS[4:]))
    others = [replace(probe(i), adapter=None) for i in range(8)]
    others.append(replace(probe(9), params=replace(PARAMS, prompt_logprobs=1), adapter=None))
    long = Request("long", tuple(random_prompt(3000, seed=5)), PARAMS, "mlp")

    def run(spare: int | None) -> dict[str, list[int]]:
        engine = make_engine(
            runner,
            is_ahead,
            max_num_seqs=16,
            max_num_batched_tokens=4096,
            max_decode_slowdown=1e9,  # the whole prompt beside them, not a part that has room
        )
        tokens: dict[str, list[int]] = {}
        for request in others:
            engine.add_request(request)
        outputs = [*engine.step().outputs, *engine.step().outputs]
        with nullcontext() if spare is None else little_memory(spare):
            engine.add_request(long)
            while engine.has_work:
                outputs += engine.step().outputs
        for output in outputs:
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        assert engine.load().num_preemptions == 0
        return tokens

    expected = run(None)
    assert {len(tokens) for tokens in expected.values()} == {NUM_TOKENS}
    with patch.object(runner, "free_cache", wraps=runner.free_cache) as freed:
        assert run(16 * 2**20) == expected
        assert freed.called


def test_a_share_too_small_is_refused_with_the_sum(base: Path) -> None:
    with pytest.raises(EngineMemoryError, match="no KV block fits") as caught:
        make_runner(base, DEVICE, num_blocks=None, gpu_memory_utilization=1e-5, max_num_seqs=4)
    for line in ("- weights", "- adapter pool", "- activations", "- graphs", "= left for KV"):
        assert line in str(caught.value)
    assert "raise gpu_memory_utilization" in str(caught.value)


FAULT = """
import faulthandler

import torch
from engine.device_step import device_faults
from engine.errors import EngineDeadError
from kernels.rms_norm import rms_norm

faulthandler.dump_traceback_later(60, exit=True)  # where the driver never reports the fault
x = torch.zeros(8, 64, device="cuda")
beyond = torch.full((1,), 1 << 20, device="cuda")  # PyTorch truncates to 32 bits
torch.cuda.synchronize()
x.index_select(0, beyond)  # an assertion in a kernel
try:
    with device_faults():
        while True:
            rms_norm(x, x[0], 1e-5)  # Triton launches, and is told
except EngineDeadError:
    print("dead")
"""


def test_a_lost_device_is_known_whoever_meets_it() -> None:
    """Runs in a process of its own: nothing there can use the device afterwards."""
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True)
    assert done.stdout == "dead\n", done.stderr[-2000:]
