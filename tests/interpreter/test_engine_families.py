"""The device's steps of every family, kernels interpreted, against the reference backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.runner import ModelRunner
from tests.engine_helpers import Job, make_runner, make_sequence, random_prompt, run_mixed
from tests.family_bases import VARIANTS, Variant, make_family_adapter, make_family_base
from tests.int4_bases import gptq
from tests.quantized_bases import write_quantized
from tests.test_engine_gptq_awq import gptq_config

OWNERS = (None, "adapter", "adapter")
# A type for each: few rows in 16 bits have other kernels.
CASES = {
    "granite": "float16",
    "smollm3": "float16",
    "ministral 3 with a window": "float16",
    "phi 4": "float16",
    "gemma 2": "float32",
    "gemma 3": "float16",
    "olmo 3": "float16",
}


def outputs(
    base: Path, adapter: Path, backend: str, dtype: str, quantization: str = "none"
) -> list[list[int]]:
    """Returns the tokens of prompts in chunks beside decodes, with and without an adapter."""
    runner: ModelRunner = make_runner(
        base,
        backend=backend,
        dtype=dtype,
        quantization=quantization,
        block_size=16,
        max_num_seqs=8,
    )
    runner.load_adapter("adapter", adapter)
    assert runner.adapters.acquire("adapter")
    jobs = [
        Job(
            make_sequence(
                random_prompt(9 + 8 * i, seed=20 + i),
                8 * i,
                adapter=name,
                num_blocks=8,
                layout=runner.kv_layout,
            ),
            starts_at=i % 2,
            chunk=7 + 9 * i,
        )
        for i, name in enumerate(OWNERS)
    ]
    return run_mixed(runner, jobs, num_tokens=3)


def of_two_layers(name: str) -> Variant:
    changes: dict[str, object] = {"num_hidden_layers": 2}
    if "layer_types" in VARIANTS[name].changes:
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    return replace(VARIANTS[name], changes=VARIANTS[name].changes | changes)


@pytest.mark.parametrize(("name", "dtype"), CASES.items())
def test_mixed_steps_of_a_family_give_what_the_reference_gives(
    name: str, dtype: str, tmp_path: Path
) -> None:
    variant = of_two_layers(name)
    base = make_family_base(tmp_path / "base", variant)
    adapter = make_family_adapter(tmp_path / "adapter", base, variant.linears, rank=8)
    expected = outputs(base, adapter, "reference", dtype)
    assert outputs(base, adapter, "triton", dtype) == expected
    assert len(set(map(tuple, expected))) == len(OWNERS)


@pytest.mark.parametrize("name", ["granite", "olmo 3"])
def test_mixed_steps_in_fp8_give_what_the_reference_gives(name: str, tmp_path: Path) -> None:
    """A family with biases, and one with norms after its products."""
    variant = of_two_layers(name)
    base = make_family_base(tmp_path / "base", variant)
    adapter = make_family_adapter(tmp_path / "adapter", base, variant.linears, rank=8)
    expected = outputs(base, adapter, "reference", "float16", "fp8")
    assert outputs(base, adapter, "triton", "float16", "fp8") == expected
    assert len(set(map(tuple, expected))) == len(OWNERS)


@pytest.mark.parametrize("name", ["granite", "olmo 3"])
def test_mixed_steps_in_4_bits_give_what_the_reference_gives(name: str, tmp_path: Path) -> None:
    """A family with biases, and one with norms after its products."""
    variant = of_two_layers(name)
    plain = make_family_base(tmp_path / "base", variant)
    quantize = gptq(32, symmetric=False)
    base, weights = write_quantized(plain, tmp_path / "gptq", gptq_config(4, 32), quantize)
    assert weights
    adapter = make_family_adapter(tmp_path / "adapter", plain, variant.linears, rank=8)
    expected = outputs(base, adapter, "reference", "float16", "int4")
    assert outputs(base, adapter, "triton", "float16", "int4") == expected
    assert len(set(map(tuple, expected))) == len(OWNERS)
