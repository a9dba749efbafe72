"""Bases of GPTQ and AWQ, packed here from known integers, are read exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
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

Quantize = Callable[[str, torch.Tensor], Quantized]


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight as unsigned integers: (q - zero) * scale of the group of each column."""

    q: torch.Tensor  # [out, in]
    zero: torch.Tensor  # [out, groups]
    scale: torch.Tensor  # [out, groups], float16
    group: torch.Tensor  # [in], the group of each column

    @property
    def weight(self) -> torch.Tensor:
        difference = (self.q - self.zero[:, self.group]).half()  # exact
        return difference * self.scale[:, self.group]


def make_integers(
    weight: torch.Tensor, num_bits: int, size: int, symmetric: bool, sorted_columns: bool
) -> Integers:
    generator = torch.Generator().manual_seed(weight.numel())
    rows, columns = weight.shape
    order = torch.arange(columns)
    if sorted_columns:
        order = torch.randperm(columns, generator=generator)
    group = torch.empty(columns, dtype=torch.long)
    group[order] = torch.arange(columns) // size
    groups = int(group.max()) + 1
    largest = 2**num_bits - 1
    scale = torch.empty(rows, groups).uniform_(0.01, 0.04, generator=generator).half()
    zero = torch.full((rows, groups), (largest + 1) // 2)
    if not symmetric:
        zero = torch.randint(1, largest + 1, (rows, groups), generator=generator)
    q = (weight / scale[:, group].float()).round() + zero[:, group]
    return Integers(q.clamp(0, largest).int(), zero.int(), scale, group)


def pack_rows(numbers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Packs [n, m] along the first dimension as AutoGPTQ does: the first in the lowest bits."""
    per_word = 32 // num_bits
    words = torch.zeros(numbers.shape[0] // per_word, numbers.shape[1], dtype=torch.int64)
    for i in range(per_word):
        words |= numbers[i::per_word].long() << (num_bits * i)
    return words.to(torch.uint32).view(torch.int32)


def gptq_parts(made: Integers, num_bits: int, version: int) -> dict[str, torch.Tensor]:
    stored_zero = made.zero - (1 if version == 1 else 0)
    return {
        "qweight": pack_rows(made.q.T, num_bits),
        "qzeros": pack_rows(stored_zero, num_bits).T.contiguous(),
        "scales": made.scale.T.contiguous(),
        "g_idx": made.group.int(),
    }


def gptq_config(num_bits: int, group_size: int, version: int = 1) -> dict[str, object]:
    layout = "gptq" if version == 1 else "gptq_v2"
    return {
        "quant_method": "gptq",
        "bits": num_bits,
        "group_size": group_size,
        "checkpoint_format": layout,
    }


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize(
    ("size", "symmetric", "sorted_columns"),
    [(16, True, False), (16, False, False), (16, False, True), (-1, True, False)],
)
def test_gptq_is_read_exactly(
    tmp_path: Path, version: int, num_bits: int, size: int, symmetric: bool, sorted_columns: bool
) -> None:
    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        width = weight.shape[1] if size == -1 else size
        made = make_integers(weight, num_bits, width, symmetric, sorted_columns)
        parts = gptq_parts(made, num_bits, version)
        if not sorted_columns:
            del parts["g_idx"]
        return Quantized(parts | {"bias": torch.zeros(weight.shape[0])}, made.weight)

    base = make_base(tmp_path / "base")
    config = gptq_config(num_bits, size, version)
    folder, weights = write_quantized(base, tmp_path / "quantized", config, quantize)
    check_equal(folder, weights)


def test_gptq_answers_as_the_dequantized_base(tmp_path: Path) -> None:
    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        made = make_integers(weight, 4, 16, symmetric=False, sorted_columns=True)
        return Quantized(gptq_parts(made, 4, 1), made.weight)

    base = make_base(tmp_path / "base", "qwen2")
    folder, weights = write_quantized(base, tmp_path / "quantized", gptq_config(4, 16), quantize)
    check_answers(folder, write_plain(base, tmp_path / "plain", weights))


def check_answers(folder: Path, plain: Path) -> None:
    prompt = [3, 14, 15, 92, 65]
    outputs = run_mixed(make_runner(folder), [Job(make_sequence(prompt))], 8)[0]
    assert outputs == hf_greedy(load_hf(plain), prompt, 8)


def awq_parts(made: Integers) -> dict[str, torch.Tensor]:
    """Packs as AutoAWQ's WQLinear_GEMM.from_linear: nibble i of a word is column ORDER[i]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(numbers: torch.Tensor) -> torch.Tensor:  # [k, n] to [k, n / 8]
        words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
        for i, column in enumerate(order):
            words |= numbers[:, column::8].long() << (4 * i)
        return words.to(torch.uint32).view(torch.int32)

    return {
        "qweight": pack(made.q.T),
        "qzeros": pack(made.zero.T),
        "scales": made.scale.T.contiguous(),
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def gptq(module: str, weight: torch.Tensor) -> Quantized:
    made = make_integers(weight, 4, 16, symmetric=True, sorted_columns=False)
    return Quantized(gptq_parts(made, 4, 1), made.weight)


def awq(module: str, weight: torch.Tensor) -> Quantized:
    made = make_integers(weight, 4, 16, symmetric=False, sorted_columns=False)
    return Quantized(awq_parts(made), made.weight)


def test_awq_is_read_exactly_and_as_compressed_tensors_converts_it(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(base, tmp_path / "quantized", AWQ, awq)
    check_equal(folder, weights)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, type="int", symmetric=False, group_size=16),
    )
    converted = AutoAWQConverter(group_size=16).process(load_file(folder / SINGLE_FILE))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    for name, weight in weights.items():
        parts = {
            key.removeprefix(f"{name}_"): tensor
            for key, tensor in converted.items()
            if key.startswith(f"{name}_")
        }
        parts = {f"weight_{key}": tensor for key, tensor in parts.items()}
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], weight)


def test_awq_answers_as_the_dequantized_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(base, tmp_path / "quantized", AWQ, awq)
    check_answers(folder, write_plain(base, tmp_path / "plain", weights))


def test_modules_that_rules_of_gptqmodel_leave_out_are_plain(tmp_path: Path) -> None:
    def quantize(module: str, weight: torch.Tensor) -> Quantized | None:
        return None if "down" in module else gptq(module, weight)

    base = make_base(tmp_path / "base")
    config = gptq_config(4, 16) | {"dynamic": {r"-:.*\.down.*": {}}}
    folder, weights = write_quantized(base, tmp_path / "quantized", config, quantize)
    assert len(weights) == 18
    check_equal(folder, weights)


@pytest.mark.parametrize("size", [16, -1])
def test_sorted_columns_without_their_groups_are_refused(tmp_path: Path, size: int) -> None:
    """Read in the order of the file, each column would have the scale of another group."""

    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        width = weight.shape[1] if size == -1 else size
        made = make_integers(weight, 4, width, symmetric=True, sorted_columns=True)
        parts = gptq_parts(made, 4, 1)
        del parts["g_idx"]
        return Quantized(parts, made.weight)

    base = make_base(tmp_path / "base")
    config = gptq_config(4, size) | {"desc_act": True}
    folder, weights = write_quantized(base, tmp_path / "quantized", config, quantize)
    if size == -1:  # one group has no order
        check_equal(folder, weights)
        return
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.g_idx is missing"):
        Checkpoint(folder, read_model_config(folder))


@pytest.mark.parametrize(
    ("file", "values", "quantize"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 16, "desc_act": False}, gptq),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}, awq),
        ("quantize_config.json", {"w_bit": 4, "q_group_size": 16, "zero_point": True}, awq),
    ],
)
def test_a_scheme_in_a_file_of_its_own_is_read_unless_the_weights_are_plain(
    tmp_path: Path, file: str, values: dict[str, object], quantize: Quantize
) -> None:
    """Older versions of AutoGPTQ and AutoAWQ wrote the file beside config.json."""
    base = make_base(tmp_path / "base")
    folder, weights = write_quantized(base, tmp_path / "quantized", {}, quantize)
    (folder / file).write_text(json.dumps(values))
    check_equal(folder, weights)
    for text in (json.dumps(values), "[]"):
        (base / file).write_text(text)
        assert read_model_config(base).quantization is None
    (base / file).write_text(json.dumps(values))
    (base / SINGLE_FILE).unlink()  # as for weights that are drawn
    assert read_model_config(base).quantization == read_model_config(folder).quantization
    (folder / file).write_text(json.dumps(values | {"bits": 3, "w_bit": 3}))
    with pytest.raises(UnsupportedModelError, match=rf"^{file}: bits is 3"):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq_config(3, 16), "bits is 3: 4 and 8"),
        (gptq_config(4, 16) | {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"'),
        (gptq_config(4, 16) | {"dynamic": {"-:.*": {}, "+:.*": {"bits": 8}}}, "dynamic is"),
        (gptq_config(4, 0), "group_size is 0"),
        (AWQ | {"version": "gemv"}, 'version is "gemv"'),
        (AWQ | {"bits": 8}, "bits is 8"),
        (AWQ | {"zero_point": False}, "zero_point is false"),
    ],
)
def test_a_layout_that_is_not_read_is_refused_with_its_key(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    folder = make_base(tmp_path / "base")
    set_quantization(folder, config)
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("part", "edit", "message"),
    [
        ("qzeros", lambda t: t.fill_(-1), "qzeros holds 15, .* a zero point of 16 or of 0"),
        ("g_idx", lambda t: t.fill_(0), "g_idx has groups of other sizes than 16"),
        ("g_idx", lambda t: t.fill_(9), "g_idx names groups outside 0 to 2"),
        ("bias", lambda t: t.fill_(1), "up_proj.bias, which is unknown"),
        ("scales", lambda t: t.resize_(1, 80), r"scales has shape \[1, 80\]"),
    ],
)
def test_numbers_that_cannot_be_read_surely_are_refused(
    tmp_path: Path, part: str, edit: object, message: str
) -> None:
    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        made = make_integers(weight, 4, 16, symmetric=True, sorted_columns=False)
        parts = gptq_parts(made, 4, 1) | {"bias": torch.zeros(weight.shape[0])}
        return Quantized(parts, made.weight)

    base = make_base(tmp_path / "base")
    folder, _ = write_quantized(base, tmp_path / "quantized", gptq_config(4, 16), quantize)
    tensors = load_file(folder / SINGLE_FILE)
    assert callable(edit)
    edit(tensors[f"model.layers.0.mlp.up_proj.{part}"])
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(folder, read_model_config(folder))


def test_groups_that_do_not_divide_the_columns_are_refused_with_the_part(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    folder, _ = write_quantized(base, tmp_path / "quantized", AWQ | {"group_size": 32}, awq)
    with pytest.raises(UnsupportedModelError, match=r"scales cannot have groups of 32: .* 48 col"):
        Checkpoint(folder, read_model_config(folder))
