"""Bases in the formats of compressed-tensors and of fp8 are read as their libraries read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from engine.checkpoint import Checkpoint
from engine.errors import UnsupportedModelError
from engine.json_values import MAX_DIMENSION
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
    Tensors,
    check_equal,
    set_quantization,
    write_plain,
    write_quantized,
)

E4M3 = torch.float8_e4m3fn
INT = {"num_bits": 8, "type": "int"}
FLOAT = {"num_bits": 8, "type": "float"}
NVFP4 = {"a": {"targets": ["Linear"], "weights": {"strategy": "tensor_group"}}}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 per channel": ("float-quantized", FLOAT | {"strategy": "channel"}),
    "fp8 per tensor": ("float-quantized", FLOAT | {"strategy": "tensor"}),
    "fp8 in groups": ("naive-quantized", FLOAT | {"strategy": "group", "group_size": 16}),
    "fp8 in blocks": (
        "float-quantized",
        FLOAT | {"strategy": "block", "block_structure": [32, 24]},
    ),
    "int8 per channel": ("int-quantized", INT | {"strategy": "channel"}),
    "int8 per tensor, asymmetric": (
        "int-quantized",
        INT | {"strategy": "tensor", "symmetric": False},
    ),
    "int8 in groups, asymmetric": (
        "naive-quantized",
        INT | {"strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "int4 in groups": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
    ),
    "int4 in groups, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "group_size": 16, "symmetric": False},
    ),
    "int4 per channel, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "int8 packed in groups": ("pack-quantized", INT | {"strategy": "group", "group_size": 16}),
}


def compress(layout: str, args: dict[str, Any], weight: torch.Tensor) -> Quantized:
    """Stores and reads a weight by the library itself, with scales in bfloat16."""
    weights = QuantizationArgs(**args)
    rows, columns = weight.shape
    block = {"tensor": (rows, columns), "channel": (1, columns)}.get(str(weights.strategy)) or (
        (1, weights.group_size) if weights.group_size else tuple(weights.block_structure or ())
    )
    tall, wide = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    padded = torch.zeros(tall * block[0], wide * block[1])
    padded[:rows, :columns] = weight
    tiles = padded.view(tall, block[0], wide, block[1])
    scale, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), weights)
    scale = scale.to(torch.bfloat16)
    if weights.strategy == "tensor":
        scale, zero = scale.flatten(), zero.flatten()
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(layout)
    state = {"weight": weight.bfloat16(), "weight_scale": scale, "weight_zero_point": zero}
    parts = compressor.compress(state, scheme)
    return Quantized(parts, compressor.decompress(parts, scheme)["weight"])


def config_of(layout: str, args: dict[str, Any], **more: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def write_scheme(tmp_path: Path, name: str) -> tuple[Path, Tensors]:
    """Writes a base in one of SCHEMES. Returns its folder and the library's
    weights."""
    layout, args = SCHEMES[name]
    return write_quantized(
        make_base(tmp_path / "base"),
        tmp_path / "quantized",
        config_of(layout, args),
        lambda module, weight: compress(layout, args, weight),
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_equal_the_library_bit_for_bit(tmp_path: Path, name: str) -> None:
    folder, weights = write_scheme(tmp_path, name)
    assert len(weights) == 21
    check_equal(folder, weights)


@pytest.mark.parametrize("name", ["fp8 per channel", "int4 in groups, asymmetric"])
def test_a_quantized_base_answers_as_the_dequantized_one(tmp_path: Path, name: str) -> None:
    layout, args = SCHEMES[name]
    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(
        base,
        tmp_path / "quantized",
        config_of(layout, args),
        lambda module, weight: compress(layout, args, weight),
    )
    plain = write_plain(base, tmp_path / "plain", weights)
    prompt = [3, 14, 15, 92, 65]
    outputs = run_mixed(make_runner(folder), [Job(make_sequence(prompt))], 8)[0]
    assert outputs == hf_greedy(load_hf(plain), prompt, 8)


def test_columns_in_another_order_take_the_scale_of_their_group(tmp_path: Path) -> None:
    layout, args = SCHEMES["int4 in groups, asymmetric"]

    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        # What tools before 2026 stored for `actorder: group`: the columns in their own order, their
        # groups beside them.
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
        made = compress(layout, args, weight[:, order])
        back = torch.argsort(order)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        compressor = BaseCompressor.get_value_from_registry(layout)
        ones = dict(made.parts) | {"weight_scale": torch.ones_like(made.parts["weight_scale"])}
        del ones["weight_zero_point"]
        plain = QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(**(args | {"symmetric": True}))
        )
        numbers = compressor.decompress(ones, plain)["weight"][:, back].to(torch.int8)
        packed = compressor.compress(
            {"weight": numbers.bfloat16(), "weight_scale": ones["weight_scale"]}, plain
        )["weight_packed"]
        groups = (torch.arange(weight.shape[1]) // 16)[back].int()
        assert scheme.weights is not None
        return Quantized(
            dict(made.parts) | {"weight_packed": packed, "weight_g_idx": groups},
            made.weight[:, back],
        )

    config = config_of(layout, args | {"actorder": "group"})
    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(base, tmp_path / "quantized", config, quantize)
    check_equal(folder, weights)
    tensors = load_file(folder / SINGLE_FILE)
    name = "model.layers.1.mlp.down_proj.weight_g_idx"
    tensors[name][tensors[name] == 0] = 1
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"{name} has groups of other sizes than 16"):
        check_equal(folder, weights)


def test_modules_take_the_scheme_of_their_target(tmp_path: Path) -> None:
    """Exact names go before expressions and these before classes; an ignored module is plain."""
    by_name, by_expression, by_class = (
        SCHEMES[name] for name in ("int8 per channel", "fp8 per tensor", "int4 in groups")
    )
    exact = "model.layers.0.mlp.up_proj"
    groups = {
        f"group_{i}": {"targets": [target], "weights": args, "format": layout}
        for i, (target, (layout, args)) in enumerate(
            [("Linear", by_class), (r"re:.*\.mlp\.(gate|up)_", by_expression), (exact, by_name)]
        )
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head", r"re:.*layers\.2\..*"],
    }

    def quantize(module: str, weight: torch.Tensor) -> Quantized | None:
        if "layers.2." in module:
            return None
        found = by_name if module == exact else by_class
        if module != exact and module.endswith(("gate_proj", "up_proj")):
            found = by_expression
        return compress(*found, weight)

    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(base, tmp_path / "quantized", config, quantize)
    assert len(weights) == 14
    check_equal(folder, weights)


def test_schemes_of_activations_alone_leave_the_weights_as_they_are(tmp_path: Path) -> None:
    """Schemes of attention stand beside one of the weights; the KV cache has the only one."""
    layout, args = SCHEMES["fp8 per channel"]
    base = make_base(tmp_path / "base")
    config: dict[str, Any] = config_of(layout, args)
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": FLOAT}
    config["config_groups"]["group_1"] = attention
    folder, weights = write_quantized(
        base, tmp_path / "quantized", config, lambda module, weight: compress(layout, args, weight)
    )
    check_equal(folder, weights)
    cache = {"config_groups": {}, "kv_cache_scheme": FLOAT, "format": "dense"}
    set_quantization(base, config | cache)
    tensors = load_file(base / SINGLE_FILE)
    scales = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in ("k", "v", "kv")}
    save_file(tensors | scales, base / SINGLE_FILE, metadata={"format": "pt"})
    check_equal(base, {name: one for name, one in tensors.items() if "_proj" in name})


def fp8_block(weight: torch.Tensor, size: int) -> Quantized:
    rows, columns = weight.shape
    tall, wide = -(-rows // size), -(-columns // size)
    padded = torch.zeros(tall * size, wide * size)
    padded[:rows, :columns] = weight
    scale = padded.view(tall, size, wide, size).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
    stored = (padded / spread).to(E4M3)
    # The library takes whole blocks only.
    read = Fp8Dequantize(None)._dequantize_one(stored, scale, torch.bfloat16)
    stored, read = stored[:rows, :columns], read[:rows, :columns]
    return Quantized({"weight": stored, "weight_scale_inv": scale}, read)


def fp8_tensor(weight: torch.Tensor, name: str) -> Quantized:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(E4M3)
    more = {"input_scale": torch.tensor(0.5)}
    return Quantized({"weight": stored, name: scale} | more, stored.float() * scale)


@pytest.mark.parametrize("size", [16, 32])
def test_fp8_in_blocks_equals_transformers(tmp_path: Path, size: int) -> None:
    """The last blocks of 80 and 48 are cut where 32 does not divide them."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    folder, weights = write_quantized(
        make_base(tmp_path / "base"),
        tmp_path / "quantized",
        config | {"weight_block_size": [size, size], "modules_to_not_convert": ["lm_head"]},
        lambda module, weight: fp8_block(weight, size),
    )
    check_equal(folder, weights)
    model = Checkpoint(folder, read_model_config(folder))
    assert model.e4m3_rows("model.layers.0.mlp.up_proj") is None


def test_a_block_that_is_wider_than_a_matrix_takes_the_memory_of_the_matrix(
    tmp_path: Path,
) -> None:
    """Spread over its own columns, the one scale of each row of blocks would take 4 GiB."""

    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        made = fp8_tensor(weight, "weight_scale_inv")
        scale = made.parts["weight_scale_inv"].view(1, 1)
        return Quantized({"weight": made.parts["weight"], "weight_scale_inv": scale}, made.weight)

    folder, weights = write_quantized(
        make_base(tmp_path / "base"),
        tmp_path / "quantized",
        {"quant_method": "fp8", "weight_block_size": [MAX_DIMENSION, MAX_DIMENSION]},
        quantize,
    )
    check_equal(folder, weights)


@pytest.mark.parametrize(
    "size", [[0, 16], [16], [2**40, 16], [16, 2**70], "1x", "128x128x", "9" * 5000 + "x16"]
)
def test_an_absurd_size_of_a_block_is_refused_with_its_key(tmp_path: Path, size: object) -> None:
    folder = make_base(tmp_path / "base")
    set_quantization(folder, {"quant_method": "fp8", "weight_block_size": size})
    with pytest.raises(UnsupportedModelError, match=r"weight_block_size is .*from 1 to 16777216"):
        read_model_config(folder)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_per_tensor_is_read_and_its_activation_scales_are_not(
    tmp_path: Path, name: str
) -> None:
    folder, weights = write_quantized(
        make_base(tmp_path / "base"),
        tmp_path / "quantized",
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda module, weight: fp8_tensor(weight, name),
    )
    check_equal(folder, weights)


@pytest.mark.parametrize("name", ["fp8 per channel", "fp8 per tensor"])
def test_stored_rows_of_e4m3_can_be_taken_as_they_are(tmp_path: Path, name: str) -> None:
    folder, weights = write_scheme(tmp_path, name)
    checkpoint = Checkpoint(folder, read_model_config(folder))
    module = "model.layers.1.mlp.down_proj"
    found = checkpoint.e4m3_rows(module)
    assert found is not None
    stored, scale = found
    assert (stored.dtype, stored.shape) == (E4M3, (48, 80))
    assert (scale.dtype, scale.shape) == (torch.float32, (48,))
    assert torch.equal((stored.float() * scale[:, None]).bfloat16(), weights[f"{module}.weight"])
    assert checkpoint.e4m3_rows("lm_head") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "marlin-24"}, 'format is "marlin-24": known are float-quantized'),
        ({"format": "nvfp4", "config_groups": NVFP4}, 'format is "nvfp4": known are float'),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is"),
        ({"config_groups": {}}, "config_groups is {}"),
        ({"quantization_status": "initialized"}, 'quantization_status is "initialized"'),
        (
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}}},
            'weights is {"num_bits": 3}',
        ),
        (
            {"config_groups": {"a": {"targets": ["re:(a|b"], "weights": INT | {"group_size": 16}}}},
            "not a regular expression",
        ),
    ],
)
def test_a_scheme_that_is_not_read_is_refused_with_its_key(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = make_base(tmp_path / "base")
    layout, args = SCHEMES["int4 in groups"]
    set_quantization(folder, config_of(layout, args) | change)
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(folder, read_model_config(folder))


def test_weights_of_no_target_are_named_with_their_parts(tmp_path: Path) -> None:
    folder, _ = write_scheme(tmp_path, "int4 in groups")
    config = config_of(*SCHEMES["int4 in groups"])
    groups = {"group_0": {"targets": ["LlamaMLP"], "weights": SCHEMES["int4 in groups"][1]}}
    set_quantization(folder, config | {"config_groups": groups})
    message = r"q_proj\.weight and 20 more is missing; the files have its weight_packed, weight_sc"
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(folder, read_model_config(folder))


@pytest.mark.parametrize(
    ("scheme", "part", "tensor", "message"),
    [
        ("int4 in groups", "weight_scale", None, "weight_scale is missing"),
        ("int4 in groups", "weight_packed", None, "weight_packed is missing"),
        ("int4 in groups", "weight_shape", torch.tensor([80, 49]), r"weight_shape is \[80, 49\]"),
        ("int4 in groups", "weight_packed", torch.zeros(80, 5).int(), r"makes it \[80, 6\]"),
        ("int4 in groups", "weight_zero_point", torch.zeros(80, 3).char(), "is unknown"),
        ("fp8 per channel", "weight_scale", torch.ones(79, 1), r"\[80, 1\] or \[80\]"),
        ("fp8 per channel", "weight", torch.zeros(80, 48).char(), "has type I8, known are F8_E4M3"),
        ("fp8 per channel", "weight", torch.zeros(80, 48), "is unknown"),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    tmp_path: Path, scheme: str, part: str, tensor: torch.Tensor | None, message: str
) -> None:
    layout, args = SCHEMES[scheme]
    folder, _ = write_quantized(
        make_base(tmp_path / "base"),
        tmp_path / "quantized",
        config_of(layout, args),
        lambda module, weight: compress(layout, args, weight),
    )
    tensors = load_file(folder / SINGLE_FILE)
    name = f"model.layers.1.mlp.up_proj.{part}"
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(folder, read_model_config(folder))
