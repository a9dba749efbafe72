"""Bases of bitsandbytes are read as its algorithm, and the library where installed, compute."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import Checkpoint
from engine.errors import UnsupportedModelError
from engine.model_config import read_model_config
from engine.weight_files import SINGLE_FILE
from tests.engine_helpers import (
    Job,
    hf_greedy,
    load_hf,
    make_base,
    make_runner,
    make_sequence,
    run_mixed,
)
from tests.quantized_bases import (
    Quantized,
    check_equal,
    set_quantization,
    write_plain,
    write_quantized,
)

# As QLoRA's paper and functional.get_4bit_type give them.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
]
FP4 = [value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
TABLES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor(FP4 + [-value for value in FP4])}


def quantize_4bit(
    kind: str, is_nested: bool, block_size: int, module: str, weight: torch.Tensor
) -> Quantized:
    table = TABLES[kind]
    flat = weight.flatten()
    element = torch.arange(flat.numel())
    absmax = torch.stack([part.abs().max() for part in flat.split(block_size)])
    codes = (flat / absmax[element // block_size])[:, None].sub(table).abs().argmin(1)
    packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block_size,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    parts = {"weight": packed, "weight.quant_map": table, "weight.absmax": absmax}
    if is_nested:
        offset = absmax.mean()
        second = torch.stack([part.abs().max() for part in (absmax - offset).split(256)])
        map8 = torch.linspace(-1, 1, 256) ** 3
        scale = second[torch.arange(absmax.numel()) // 256]
        bytes8 = ((absmax - offset) / scale)[:, None].sub(map8).abs().argmin(1)
        absmax = map8[bytes8] * scale + offset
        parts |= {"weight.absmax": bytes8.to(torch.uint8), "weight.nested_absmax": second}
        parts["weight.nested_quant_map"] = map8
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
    words = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = words
    read = (table[codes] * absmax[element // block_size]).bfloat16()
    return Quantized(parts, read.view_as(weight))


def config_4bit(kind: str) -> dict[str, object]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"],
    }


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("is_nested", "block_size"), [(False, 64), (True, 64), (True, 128)])
def test_4_bits_are_read_exactly(
    tmp_path: Path, kind: str, is_nested: bool, block_size: int
) -> None:
    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(
        base,
        tmp_path / "quantized",
        config_4bit(kind),
        partial(quantize_4bit, kind, is_nested, block_size),
    )
    check_equal(folder, weights)


def quantize_unsloth(module: str, weight: torch.Tensor) -> Quantized | None:
    """Leaves some modules plain, as Unsloth's dynamic quants do (`-unsloth-bnb-4bit`)."""
    return None if "layers.1.mlp" in module else quantize_4bit("nf4", True, 64, module, weight)


def test_skipped_modules_stay_plain_and_the_base_answers_as_the_dequantized(
    tmp_path: Path,
) -> None:
    base = make_base(tmp_path / "base", "qwen3")
    folder, weights = write_quantized(
        base, tmp_path / "quantized", config_4bit("nf4"), quantize_unsloth
    )
    assert len(weights) == 18
    plain = write_plain(base, tmp_path / "plain", weights)
    prompt = [3, 14, 15, 92, 65]
    outputs = run_mixed(make_runner(folder), [Job(make_sequence(prompt))], 8)[0]
    assert outputs == hf_greedy(load_hf(plain), prompt, 8)


def test_the_bytes_may_be_stored_as_floats(tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage: bfloat16`, which FSDP needs."""

    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        made = quantize_4bit("nf4", False, 64, module, weight)
        packed = made.parts["weight"].flatten().view(torch.bfloat16)[:, None]
        return Quantized(dict(made.parts) | {"weight": packed}, made.weight)

    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(base, tmp_path / "quantized", config_4bit("nf4"), quantize)
    check_equal(folder, weights)


def quantize_int8(module: str, weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax(1)
    stored = (weight / scale[:, None] * 127).round().to(torch.int8)
    read = stored.float() * scale[:, None] * 7.874015718698502e-3
    layout = torch.tensor(0, dtype=torch.uint8)
    return Quantized({"weight": stored, "SCB": scale, "weight_format": layout}, read)


INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}


def test_int8_is_read_exactly(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(base, tmp_path / "quantized", INT8, quantize_int8)
    check_equal(folder, weights)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_weights_equal_the_library(tmp_path: Path, kind: str, is_nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        if kind == "int8":
            stored, scale, _ = functional.int8_vectorwise_quant(weight.half())
            read = functional.int8_vectorwise_dequant(stored, scale)
            return Quantized({"weight": stored, "SCB": scale}, read)
        packed, state = functional.quantize_4bit(
            weight.bfloat16(), quant_type=kind, compress_statistics=is_nested
        )
        parts = {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
        return Quantized(parts | {"weight": packed}, functional.dequantize_4bit(packed, state))

    base = make_base(tmp_path / "base")
    config = INT8 if kind == "int8" else config_4bit(kind)
    folder, weights = write_quantized(base, tmp_path / "quantized", config, quantize)
    check_equal(folder, weights)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (INT8 | {"load_in_4bit": True}, "load_in_4bit is true: either it or load_in_8bit"),
        (config_4bit("af4"), 'bnb_4bit_quant_type is "af4"'),
    ],
)
def test_a_kind_that_is_not_read_is_refused_with_its_key(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    folder = make_base(tmp_path / "base")
    set_quantization(folder, config)
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(folder)


def _other_state(stored: torch.Tensor, **changes: object) -> torch.Tensor:
    values = json.loads(bytes(stored.tolist())) | changes
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("part", "edit", "message"),
    [
        (STATE, lambda t: _other_state(t, shape=[48, 80]), r"'nf4' \[48, 80\], config"),
        (STATE, lambda t: _other_state(t, blocksize=48), "has blocksize 48"),
        (STATE, lambda t: t[:-1].clone(), "cannot be read"),
        ("weight.absmax", lambda t: t[:-1].clone(), "absmax has 59 bytes, config.json makes it 60"),
        ("weight", lambda t: t[:-1].clone(), "weight has 1919 bytes, config.json makes it 1920"),
        ("weight.quant_map", lambda t: t + 0.1, "quant_map is not the table of nf4"),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    tmp_path: Path, part: str, edit: Any, message: str
) -> None:
    folder, _ = write_quantized(
        make_base(tmp_path / "base"),
        tmp_path / "quantized",
        config_4bit("nf4"),
        partial(quantize_4bit, "nf4", True, 64),
    )
    tensors = load_file(folder / SINGLE_FILE)
    name = f"model.layers.1.mlp.up_proj.{part}"
    tensors[name] = edit(tensors[name])
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(folder, read_model_config(folder))
