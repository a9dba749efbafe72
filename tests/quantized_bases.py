"""Tiny bases with quantized linear layers, written as other tools store them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import Checkpoint, Cut
from engine.model_config import read_model_config
from engine.weight_files import SINGLE_FILE
from engine.weight_shapes import expected_shapes

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight: the parts that a file stores, by their names below the module, and the numbers
    that the format's own library reads from them."""

    parts: Mapping[str, torch.Tensor]
    weight: torch.Tensor  # [out, in]


# Across groups, words and slices.
_ROWS, _COLUMNS = ((3, 29), (1, 2), (8, 16)), (5, 27)


def write_quantized(
    base: Path,
    out: Path,
    quantization: Mapping[str, object],
    quantize: Callable[[str, torch.Tensor], Quantized | None],
) -> tuple[Path, Tensors]:
    """Writes the base to `out` with its linear layers quantized by `quantize(module, weight)`, None
    for those that stay. Returns `out` and the weights as the library reads them."""
    shutil.copytree(base, out)
    tensors = load_file(base / SINGLE_FILE)
    stored: Tensors = {}
    weights: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        made = quantize(module, tensor) if "_proj" in module and module != name else None
        if made is None:
            stored[name] = tensor
            continue
        stored |= {f"{module}.{part}": one.contiguous().clone() for part, one in made.parts.items()}
        weights[name] = made.weight
    save_file(stored, out / SINGLE_FILE, metadata={"format": "pt"})
    set_quantization(out, quantization)
    return out, weights


def set_quantization(folder: Path, quantization: Mapping[str, object] | None) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": quantization}))


def write_plain(base: Path, out: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """Writes the base with other weights, in float32."""
    shutil.copytree(base, out)
    tensors = load_file(base / SINGLE_FILE)
    plain = {name: weights.get(name, tensor).float() for name, tensor in tensors.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in plain.items()},
        out / SINGLE_FILE,
        metadata={"format": "pt"},
    )
    return out


def read_all(folder: Path) -> Tensors:
    """Returns every tensor of a base as the engine reads it, put together from its slices."""
    config = read_model_config(folder)
    found = {name: torch.full(shape, torch.nan) for name, shape in expected_shapes(config).items()}
    for name, rows, tensor in Checkpoint(folder, config).stream(CPU):
        found[name][rows] = tensor.float()
    return found


def check_equal(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Checks that the engine reads each weight as the library does, bit for bit in its type,
    whether in one slice or in the smallest, and parts of it as the whole."""
    whole = read_all(folder)
    with patch("engine.checkpoint._SLICE_ELEMENTS", 1):
        sliced, cut = read_all(folder), _read_cut(folder)
    assert weights
    for name, weight in weights.items():
        assert torch.equal(whole[name].to(weight.dtype), weight), name
        assert torch.equal(sliced[name], whole[name]), name
        parts = [whole[name][slice(*rows), slice(*_COLUMNS)] for rows in _ROWS]
        assert torch.equal(cut[name], torch.cat(parts)), name


def _read_cut(folder: Path) -> Tensors:
    """Returns the same rows and columns of every matrix, as a rank of several reads its part."""
    config, found = read_model_config(folder), dict[str, list[torch.Tensor]]()
    matrices = {name for name, shape in expected_shapes(config).items() if len(shape) == 2}
    others = expected_shapes(config).keys() - matrices
    for name, rows, tensor in Checkpoint(folder, config).stream(
        CPU, leave_out=others, cut_of=lambda _: Cut(_ROWS, _COLUMNS)
    ):
        parts = found.setdefault(name, [])
        assert rows == slice(sum(map(len, parts)), sum(map(len, parts)) + len(tensor))
        parts.append(tensor.float())
    return {name: torch.cat(parts) for name, parts in found.items()}
