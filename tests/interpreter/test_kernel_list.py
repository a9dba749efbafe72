"""Real traffic, kernels interpreted, launches no kernel beyond the list that is compiled before an
engine is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig

from engine.config import EngineConfig
from engine.core import Engine
from engine.kernel_trace import trace_kernels
from engine.types import Request, SamplingParams
from kernels.triton_launch import recorded_calls
from tests.engine_helpers import make_adapter, make_runner, make_small_base, random_prompt
from tests.int4_bases import gptq
from tests.peft_kinds import save_peft
from tests.quantized_bases import write_quantized
from tests.test_engine_gptq_awq import gptq_config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    "narrow": (8, LINEARS),
    "wide": (40, ("q_proj", "down_proj")),
    "mlp": (16, LINEARS[4:]),
    "words": (3, ("lm_head", "embed_tokens")),
}
POOL_BYTES = 4 * 1024 * 1024
PARAMS = (
    SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=2, temperature=0.9, top_k=5, top_p=0.8, logprobs=2),
    SamplingParams(max_tokens=2, temperature=1.0, min_p=0.1, prompt_logprobs=1),
    SamplingParams(max_tokens=2, repetition_penalty=1.2, logit_bias=((3, 1.0),), min_tokens=1),
)


@pytest.mark.parametrize(  # few rows in 16 bits: other kernels
    ("dtype", "quantization", "lora_dtype"),
    [
        ("float32", "none", "auto"),
        ("float16", "none", "auto"),
        ("float16", "none", "int8"),
        ("float16", "fp8", "auto"),
        ("float16", "int4", "auto"),
    ],
)
def test_traffic_launches_listed_kernels_only(
    tmp_path: Path, dtype: str, quantization: str, lora_dtype: str
) -> None:
    base = make_small_base(tmp_path / "base")
    plain = base
    if quantization == "int4":
        quantize = gptq(32, symmetric=False)
        base, _ = write_quantized(plain, tmp_path / "gptq", gptq_config(4, 32), quantize)
    values: dict[str, object] = {
        "backend": "triton",
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": "fp8" if quantization == "fp8" else "auto",
        "lora_dtype": lora_dtype,
        "block_size": 16,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 80,
        "adapter_pool_bytes": POOL_BYTES,
    }
    runner = make_runner(base, **values)  # type: ignore[arg-type]
    for i, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
        runner.load_adapter(name, make_adapter(tmp_path / name, plain, rank, targets, seed=i))
    for name, rank in (("dora", 8), ("wide dora", 20)):
        kind = LoraConfig(r=rank, target_modules=list(LINEARS), use_dora=True)
        runner.load_adapter(name, save_peft(tmp_path / name, plain, kind))
    config = EngineConfig(model_path=str(base), base_digest="base", **values)  # type: ignore[arg-type]
    engine = Engine(config, runner)
    owners = (None, "narrow", "wide", "mlp", "words", "dora", "wide dora")
    for i, (length, owner) in enumerate(zip((5, 66, 1, 9, 2, 70, 3), owners, strict=True)):
        prompt = tuple(random_prompt(length, seed=i))
        engine.add_request(Request(f"request-{i}", prompt, PARAMS[i % 4], owner))
    with recorded_calls() as launched:
        while engine.has_work:
            assert not [output for output in engine.step().outputs if output.error]
    for is_eager in (False, True):
        wanted = replace(config, enforce_eager=is_eager)
        model, length = runner.model_config, runner.max_model_len
        listed = trace_kernels(wanted, model, runner.dtype, length, (9, 0), runner._rank.int4)
        assert launched - listed == frozenset()
    assert len(launched) > 14
