"""Every family on a CUDA device: graphs, pieces and kernels against the decoder on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.runner import ModelRunner
from engine.types import Request, SamplingParams
from tests.engine_agreement import TOLERANCE, assert_alike, make_engine, run_all
from tests.engine_helpers import acquire, make_runner, random_prompt
from tests.family_bases import VARIANTS, VOCABULARY, make_family_adapter, make_family_base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = [name for name, variant in VARIANTS.items() if variant.vision is None]
OWNERS = (None, "layers", "everything")
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
# What a layer adds is multiplied, and a soft cap squeezes what lies above it: rounding weighs more.
BF16_TOLERANCE = 2 * TOLERANCE[torch.bfloat16]


def open_runner(folder: Path, name: str, device: str, dtype: str) -> ModelRunner:
    variant = VARIANTS[name]
    base = folder / "base"
    if not base.exists():
        make_family_base(base, variant)
        make_family_adapter(folder / "layers", base, variant.linears, rank=8)
        everything = (*variant.linears, *VOCABULARY)
        make_family_adapter(folder / "everything", base, everything, rank=20, seed=1)
    runner = make_runner(base, device, dtype=dtype, block_size=16, max_num_seqs=32, num_blocks=256)
    for owner in OWNERS:
        if owner is not None:
            runner.load_adapter(owner, folder / owner)
            acquire(runner, owner)
    return runner


def requests() -> list[Request]:
    return [
        Request(f"r{i}", tuple(random_prompt(3 + 7 * i, seed=i)), PARAMS, OWNERS[i % 3])
        for i in range(9)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_the_device_is_that_of_the_cpu(name: str, dtype: str, tmp_path: Path) -> None:
    expected = run_all(make_engine(open_runner(tmp_path, name, "cpu", "float32")), requests())
    runner = open_runner(tmp_path, name, "cuda", dtype)
    tolerance = TOLERANCE[torch.float32] if dtype == "float32" else BF16_TOLERANCE
    for chunk in (512, 32):
        found = run_all(make_engine(runner, max_num_batched_tokens=chunk), requests())
        for one in requests():
            assert_alike(found[one.request_id], expected[one.request_id], tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_keeps_its_bits_beside_other_adapters(name: str, tmp_path: Path) -> None:
    runner = open_runner(tmp_path, name, "cuda", "bfloat16")
    own = requests()
    together = run_all(make_engine(runner), own)
    bare = [replace(one, adapter=None) if i % 3 else one for i, one in enumerate(own)]
    alone = run_all(make_engine(runner), bare)
    for one in own[::3]:
        assert together[one.request_id] == alone[one.request_id]
