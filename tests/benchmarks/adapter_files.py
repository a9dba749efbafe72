"""Random PEFT folders for a shape: one file of numbers, linked into a folder for each adapter.

The folders differ in `lora_alpha`, so that their content digests differ: they are different
adapters to whoever reads them, and only the disk holds the numbers once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.benchmarks.shapes import ModelShape


def write_adapters(root: Path, shape: ModelShape, rank: int, count: int, device: str) -> list[Path]:
    """Folders that are there already are kept."""
    source = root / f"r{rank}.safetensors"
    root.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        save_file(_tensors(shape, rank, device), source, metadata={"format": "pt"})
    folders = []
    for index in range(count):
        folder = root / f"r{rank}-{index}"
        folder.mkdir(exist_ok=True)
        weights = folder / "adapter_model.safetensors"
        if not weights.exists():
            os.link(source, weights)
        config = shape.adapter_config(rank, 2 * rank + index)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        folders.append(folder)
    return folders


def _tensors(shape: ModelShape, rank: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(rank)

    def draw(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device) * 0.01
        return drawn.to(torch.bfloat16).cpu()

    tensors = {}
    for layer in range(shape.num_layers):
        for module, (in_features, out_features) in shape.linears.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = draw(rank, in_features)
            tensors[f"{prefix}.lora_B.weight"] = draw(out_features, rank)
    return tensors
