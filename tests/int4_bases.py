"""Bases of 4-bit integers in every stored form, with groups that stay as they are in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.engine_helpers import make_base
from tests.quantized_bases import Quantized, Tensors, write_quantized
from tests.test_engine_compressed_tensors import compress, config_of
from tests.test_engine_gptq_awq import AWQ, awq_parts, gptq_config, gptq_parts, make_integers

SIZES: dict[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
Quantize = Callable[[str, torch.Tensor], Quantized | None]


def gptq(
    size: int,
    version: int = 1,
    *,
    symmetric: bool,
    is_sorted: bool = False,
    num_bits: int = 4,
) -> Quantize:
    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        width = weight.shape[1] if size == -1 else size
        made = make_integers(weight, num_bits, width, symmetric, sorted_columns=False)
        if is_sorted:  # one order for all weights that read the same input
            draw = torch.Generator().manual_seed(weight.shape[1])
            group = made.group[torch.randperm(weight.shape[1], generator=draw)]
            made = replace(made, group=group)
        return Quantized(gptq_parts(made, num_bits, version), made.weight)

    return quantize


def awq(size: int) -> Quantize:
    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        made = make_integers(weight, 4, size, symmetric=False, sorted_columns=False)
        return Quantized(awq_parts(made), made.weight)

    return quantize


def packed(**args: object) -> tuple[dict[str, object], Quantize]:
    values = {"num_bits": 4, "type": "int", **args}

    def quantize(module: str, weight: torch.Tensor) -> Quantized:
        return compress("pack-quantized", values, weight)

    return config_of("pack-quantized", values), quantize


STORED: dict[str, tuple[dict[str, object], Quantize]] = {
    "gptq": (gptq_config(4, 128), gptq(128, symmetric=True)),
    "gptq, asymmetric": (gptq_config(4, 32), gptq(32, symmetric=False)),
    "gptq, sorted": (gptq_config(4, 64, 2), gptq(64, 2, symmetric=False, is_sorted=True)),
    "gptq per channel": (gptq_config(4, -1), gptq(-1, symmetric=True)),
    "awq": (AWQ | {"group_size": 64}, awq(64)),
    "packed": packed(strategy="group", group_size=128),
    "packed, asymmetric": packed(strategy="group", group_size=32, symmetric=False),
    "packed per channel, asymmetric": packed(strategy="channel", symmetric=False),
}


def write_int4(folder: Path, name: str, family: str = "llama") -> tuple[Path, Path, Tensors]:
    """Writes a base in one of STORED. Returns the plain base, the quantized one, and the weights as
    the format's library reads them."""
    config, quantize = STORED[name]
    base = make_base(folder / "base", family, **SIZES)
    stored, weights = write_quantized(base, folder / "quantized", config, quantize)
    return base, stored, weights
