"""Random PEFT folders for a shape: one file of numbers for all adapters of a rank and its targets,
linked into a folder for each.

The folders differ in `lora_alpha`, so that their content digests differ: they are different
adapters to every reader, and only the disk holds the numbers once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.benchmarks.cases import AdapterSpec
from tests.benchmarks.shapes import ModelShape, is_target


def write_adapters(
    root: Path, shape: ModelShape, adapters: Sequence[AdapterSpec], device: str
) -> list[Path]:
    """Returns a folder for each adapter, named by its digest. Folders that are there are kept.
    Raises ValueError for an adapter of some layers only, or of a kind that has more than A and B:
    PEFT's settings here name neither."""
    root.mkdir(parents=True, exist_ok=True)
    folders = []
    for spec in adapters:
        if spec.every != 1:
            raise ValueError(f"{spec.digest} adapts every {spec.every}th layer: not as files")
        if spec.kind != "plain":
            raise ValueError(f"{spec.digest} is of the kind {spec.kind}: not as files")
        folder = root / spec.digest
        folder.mkdir(exist_ok=True)
        weights = folder / "adapter_model.safetensors"
        if not weights.exists():
            os.link(_numbers(root, shape, spec, device), weights)
        config = shape.adapter_config(spec.rank, 2 * spec.rank + spec.index, spec.targets)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        folders.append(folder)
    return folders


def _numbers(root: Path, shape: ModelShape, spec: AdapterSpec, device: str) -> Path:
    path = root / f"r{spec.rank}-{spec.targets}.safetensors"
    if not path.exists():
        save_file(_tensors(shape, spec, device), path, metadata={"format": "pt"})
    return path


def _tensors(shape: ModelShape, spec: AdapterSpec, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(spec.rank)

    def draw(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device) * 0.01
        return drawn.to(torch.bfloat16).cpu()

    tensors = {}
    for layer in range(shape.num_layers):
        for module, (in_features, out_features) in shape.linears.items():
            if not is_target(module, spec.targets):
                continue
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = draw(spec.rank, in_features)
            tensors[f"{prefix}.lora_B.weight"] = draw(out_features, spec.rank)
    return tensors
