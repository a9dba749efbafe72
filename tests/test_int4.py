"""Bases that stay in 4 bits, on the reference backend: values, engines, refusals, estimates."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from engine.checkpoint import Checkpoint
from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.int4_forms import likely_forms, possible_forms, resolve_int4, stored_forms
from engine.model_config import ModelConfig, read_model_config
from engine.parallel.shards import Shard
from engine.types import Request
from engine.weight_files import SINGLE_FILE
from engine.weights import WeightBuilder, Weights
from kernels.int4 import Int4Format, Int4Rows, empty_int4, nearest
from kernels.linear import linear
from lora.dora import dora_gains
from tests.engine_agreement import PARAMS, make_engine, run_all
from tests.engine_helpers import (
    acquire,
    hf_greedy,
    load_hf,
    make_adapter,
    make_base,
    make_runner,
    random_prompt,
)
from tests.fp8_cases import relative
from tests.int4_bases import STORED, gptq, write_int4
from tests.int4_cases import FORMATS, drawn_integers, drawn_rows, exact_product
from tests.peft_kinds import save_peft
from tests.quantized_bases import read_all, write_plain, write_quantized
from tests.test_engine_gptq_awq import gptq_config

CPU = torch.device("cpu")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FORMS = {
    "gptq": Int4Format(128, torch.float16),
    "gptq, asymmetric": Int4Format(32, torch.float16, has_zeros=True),
    "gptq, sorted": Int4Format(64, torch.float16, has_zeros=True, has_order=True),
    "gptq per channel": Int4Format(128, torch.float16),
    "awq": Int4Format(64, torch.float16, has_zeros=True),
    "packed": Int4Format(128, torch.bfloat16),
    "packed, asymmetric": Int4Format(32, torch.bfloat16, has_zeros=True),
    "packed per channel, asymmetric": Int4Format(128, torch.bfloat16, has_zeros=True),
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Weights]:
    config = read_model_config(folder)
    forms, _ = stored_forms(config, Checkpoint(folder, config))
    return config, WeightBuilder(Shard(config), dtype, CPU, int4=forms).load(folder)


def int4(matrix: object) -> Int4Rows:
    assert isinstance(matrix, Int4Rows)
    return matrix


# -- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("columns", [256, 336, 48])
def test_packed_rows_hold_every_value(form: Int4Format, columns: int) -> None:
    made = drawn_integers(24, columns, form)
    rows = empty_int4(24, columns, form, CPU)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    if rows.order is not None:
        rows.order.copy_(order)
    for part, size in zip(rows.split([10, 14]), ((0, 10), (10, 24)), strict=True):
        own = slice(*size)
        zeros = None if made.zeros is None else made.zeros[own]
        part.write_(replace(made, q=made.q[own], scales=made.scales[own], zeros=zeros))
    wanted = torch.empty(24, columns)
    wanted[:, order if form.has_order else slice(None)] = made.float(form.group_size)
    assert torch.equal(rows.float(), wanted)
    assert torch.equal(rows[torch.tensor([3, 17])].float(), wanted[[3, 17]])
    assert rows[torch.tensor([], dtype=torch.long)].float().shape == (0, columns)
    assert torch.equal(torch.cat([part.float() for part in rows.split(7)]), wanted)
    assert rows.nbytes == form.num_bytes(24, columns)
    assert rows.shape == (24, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_product_is_that_of_the_values(form: Int4Format, dtype: torch.dtype) -> None:
    weight = drawn_rows(96, 512, form)
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.randn(96).to(dtype)
    for own in (None, bias):
        y = linear(x, weight, own)
        assert y.dtype == dtype
        assert relative(y, exact_product(x, weight, own)) < {4: 1e-6, 2: 3e-3}[dtype.itemsize]


def test_the_nearest_integers_are_within_half_a_step() -> None:
    weight = torch.randn(16, 200, generator=torch.Generator().manual_seed(3))
    found = nearest(weight, 64, torch.float16)
    step = found.scales.float()[:, torch.arange(200) // 64]
    assert ((found.float(64) - weight).abs() <= step * 0.51).all()
    rows = empty_int4(16, 200, Int4Format(64, torch.float16, has_order=True), CPU)
    rows.write_nearest_(weight)
    assert torch.equal(rows.float(), found.float(64))


def test_gains_of_dora_are_those_of_the_weight_that_is_served() -> None:
    rows = drawn_rows(48, 64, FORMATS["groups of 32, zero points, sorted"])
    a, b = torch.randn(4, 64), torch.randn(48, 4)
    magnitude = rows.float().norm(dim=1)
    found, wanted = (dora_gains(one, a, b, 0.5, magnitude) for one in (rows, rows.float()))
    assert torch.equal(found[0], wanted[0])


# -- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORED)
def test_values_are_those_of_the_exact_reading(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder, library = write_int4(tmp_path, name)
    config = read_model_config(folder)
    forms, reasons = stored_forms(config, Checkpoint(folder, config))
    assert not reasons
    assert len(forms) == 8
    assert set(forms.values()) == {FORMS[name]}
    monkeypatch.setattr("engine.checkpoint._SLICE_ELEMENTS", 5000)
    weights, wanted = load(folder)[1], read_all(folder)
    for module, parameter in weights.parameters.items():
        if module.endswith("_proj.weight"):
            found = int4(parameter).float()
            assert torch.equal(found, wanted[module])
            assert torch.equal(found.to(library[module].dtype), library[module])
        else:
            assert torch.equal(parameter, wanted[module])  # type: ignore[arg-type]
    layer = weights.layers[1]
    own = int4(weights.parameters["model.layers.1.self_attn.k_proj.weight"])
    assert own.values.data_ptr() == int4(layer.qkv)[128:].values.data_ptr()  # a view, no copy
    assert int4(layer.down).nbytes < 128 * 256 * 0.8


def test_matrices_whose_parts_differ_are_dequantized_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, folder, _ = write_int4(tmp_path, "gptq, sorted")
    tensors = load_file(folder / SINGLE_FILE)
    tensors["model.layers.0.self_attn.k_proj.g_idx"] = torch.arange(128).int() // 64
    name = "model.layers.1.mlp.down_proj.scales"
    tensors[name] = tensors[name].float()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    config = read_model_config(folder)
    asked = EngineConfig(str(folder), "", quantization="int4")
    with caplog.at_level(logging.WARNING):
        forms = resolve_int4(asked, config, torch.float32, None)
    assert len(forms) == 6
    assert "2 of 8 matrices of the layers are dequantized" in caplog.text
    assert "q_proj, k_proj, v_proj sort their columns differently" in caplog.text
    assert "down_proj: its scales are F32" in caplog.text
    weights, wanted = (
        WeightBuilder(Shard(config), torch.float32, CPU, int4=forms).load(folder),
        read_all(folder),
    )
    for module, parameter in weights.parameters.items():
        wide = parameter if isinstance(parameter, torch.Tensor) else parameter.float()
        assert torch.equal(wide, wanted[module])
    assert isinstance(weights.layers[0].qkv, torch.Tensor)
    assert isinstance(weights.layers[1].down, torch.Tensor)
    assert isinstance(weights.layers[1].qkv, Int4Rows)


def test_random_weights_are_those_of_the_other_type_in_4_bits(tmp_path: Path) -> None:
    folder = write_int4(tmp_path, "awq")[1]
    config = read_model_config(folder)
    forms = likely_forms(config)
    assert set(forms.values()) == {FORMS["awq"]}
    plain = WeightBuilder(Shard(config), torch.bfloat16, CPU).fill_randomly()
    weights = WeightBuilder(Shard(config), torch.bfloat16, CPU, int4=forms).fill_randomly()
    for before, after in zip(plain.layers, weights.layers, strict=True):
        wanted = nearest(before.down, 64, torch.float16).float(64)  # type: ignore[arg-type]
        assert torch.equal(int4(after.down).float(), wanted)
    assert torch.equal(plain.head, weights.head)


# -- engines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gptq, sorted", "awq", "packed"])
@torch.inference_mode()
def test_answers_are_those_of_transformers_with_the_values(tmp_path: Path, name: str) -> None:
    """Plain LoRA, and DoRA, whose gains are those of the weights that are served."""
    base, folder, _ = write_int4(tmp_path, name, "qwen2")
    plain = write_plain(base, tmp_path / "plain", read_all(folder))
    adapters = {
        "one": make_adapter(tmp_path / "one", plain, 8, LINEARS, seed=1),
        "dora": save_peft(
            tmp_path / "dora",
            plain,
            LoraConfig(r=4, target_modules=list(LINEARS), use_dora=True),
        ),
    }
    runner = make_runner(folder, quantization="int4", block_size=16)
    assert isinstance(runner._rank.weights.layers[0].qkv, Int4Rows)
    prompts = {owner: random_prompt(9 + i, seed=i) for i, owner in enumerate((None, *adapters))}
    for owner, path in adapters.items():
        runner.load_adapter(owner, path)
        acquire(runner, owner)
    requests = [Request(str(own), tuple(ids), PARAMS, own) for own, ids in prompts.items()]
    replies = run_all(make_engine(runner), requests)
    for owner, prompt in prompts.items():
        model = load_hf(plain)
        if owner is not None:
            model = PeftModel.from_pretrained(model, adapters[owner]).eval()
        wanted = hf_greedy(model, prompt, PARAMS.max_tokens)
        assert list(replies[str(owner)].tokens) == wanted


# -- configuration ------------------------------------------------------------------------------


def test_auto_keeps_4_bits_where_kernels_multiply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_int4(tmp_path, "gptq")[1]
    model = read_model_config(folder)
    config = EngineConfig(str(folder), "", quantization="auto")
    assert len(resolve_int4(config, model, torch.bfloat16, (9, 0))) == 8
    assert len(resolve_int4(config, model, torch.float16, (8, 0))) == 8
    with caplog.at_level(logging.INFO):
        assert not resolve_int4(config, model, torch.bfloat16, (7, 5))
        assert not resolve_int4(config, model, torch.float32, (9, 0))
        assert not resolve_int4(config, model, torch.float32, None)
    assert "compute capability 8.0 or higher, this one has 7.5" in caplog.text
    assert "dtype bfloat16 or float16, which is float32" in caplog.text
    assert "only kernels multiply" in caplog.text
    for other in ("none", "fp8"):
        own = replace(config, quantization=other)
        assert not resolve_int4(own, model, torch.bfloat16, (9, 0))
    asked = replace(config, quantization="int4")
    assert len(resolve_int4(asked, model, torch.float32, None)) == 8
    with pytest.raises(UnsupportedModelError, match="quantization is int4: it needs dtype"):
        resolve_int4(asked, model, torch.float32, (9, 0))
    dummy = replace(config, load_format="dummy", model_path="/nowhere")
    assert len(resolve_int4(dummy, model, torch.bfloat16, (9, 0))) == 8


@pytest.mark.parametrize("name", STORED)
def test_kernels_can_be_compiled_from_config_json_alone(tmp_path: Path, name: str) -> None:
    """The stored form is among the possible ones, but for the order of columns, which no kernel
    sees."""
    folder = write_int4(tmp_path, name)[1]
    model = read_model_config(folder)
    (folder / SINGLE_FILE).unlink()
    config = EngineConfig(str(folder), "", quantization="auto")
    found = possible_forms(config, model, torch.bfloat16, (9, 0))
    wanted = dict.fromkeys(found[0], replace(FORMS[name], has_order=False))
    assert len(wanted) == 8
    assert wanted in found
    assert len(found) == (4 if name.startswith("gptq") else 2)
    own = replace(config, quantization="none")
    assert possible_forms(own, model, torch.bfloat16, (9, 0)) == ({},)


def test_what_is_not_stored_in_4_bits_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    with pytest.raises(UnsupportedModelError, match="this base is stored as plain weights"):
        make_runner(base, quantization="int4")
    assert not make_runner(base)._rank.int4
    for bits, reason in (
        (8, "stored as gptq gptq, 8 bits in groups of 16"),
        (4, "kernels read groups of 32, 64, 128 or multiples of 128"),
    ):
        quantize = gptq(16, symmetric=True, num_bits=bits)
        folder = tmp_path / f"{bits} bits"
        write_quantized(base, folder, gptq_config(bits, 16), quantize)
        asked = EngineConfig(str(folder), "", quantization="int4")
        with pytest.raises(UnsupportedModelError, match=reason):
            resolve_int4(asked, read_model_config(folder), torch.float32, None)
