"""A home with thousands of adapters of random numbers, registered quickly.

Each adapter has numbers of its own, so that the disk cache holds bytes for each. They are published
without the checks of `register`: the catalog, the files and the tags are the same. Two bases of one
shape, their weights of another seed: their engines live side by side in one server.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from registry import listing
from registry.client import Registry
from registry.entities import AdapterFacts, BaseVersion
from registry.flavor import ADAPTER_CONFIG
from registry.manifest import MAX_ADAPTER_BYTES, no_progress, scan_folder
from registry.publish import Publication, publish
from registry.store import MlflowStore
from serve_app import config
from serve_app.cli.registration import register_base
from tests.benchmarks.serve_base import write_tokenizer, write_weights
from tests.benchmarks.shapes import ModelShape

RANK = 16
SHAPE = ModelShape(
    "small", "LlamaForCausalLM", 128, 352, 4, 4, 2, 32, 1024, 10000.0, 1e-5, max_len=512
)
TIERED, RESIDENT = "tiered", "resident"


def prepare(home: Path, counts: dict[str, int]) -> None:
    """Base -> number of adapters. A home that is complete is kept as it is."""
    mark = home / "complete.json"
    if mark.is_file() and json.loads(mark.read_text()) == counts:
        return
    uri = config.tracking_uri(config.RegistryArgs())
    registry, store = Registry(uri), MlflowStore(uri, None, 10, 2)
    for seed, (base_name, count) in enumerate(counts.items()):
        folder = SHAPE.write_config(home / "made" / base_name)
        write_tokenizer(folder, SHAPE.vocab_size)
        write_weights(folder, seed)
        base = register_base(registry, folder, base_name).version
        began_s = time.monotonic()
        for index in range(count):
            publish(store, _publication(home, base, index), no_progress)
            if index % 100 == 99:
                rate = (index + 1) / (time.monotonic() - began_s)
                sys.stderr.write(f"{base_name}: {index + 1} adapters, {rate:.0f}/s\n")
    mark.write_text(json.dumps(counts))


def adapter_name(base: str, index: int) -> str:
    return f"{base}-{index:04}"


def adapter_file_bytes() -> int:
    return sum(RANK * (rows + columns) * 2 for rows, columns in SHAPE.linears.values()) * (
        SHAPE.num_layers
    )


def _publication(home: Path, base: BaseVersion, index: int) -> Publication:
    name = adapter_name(base.name, index)
    folder = home / "made" / name
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(index)
    tensors = {}
    for layer in range(SHAPE.num_layers):
        for module, (columns, rows) in SHAPE.linears.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            for side, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                drawn = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{prefix}.lora_{side}.weight"] = drawn.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = SHAPE.adapter_config(RANK, 2 * RANK)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings))
    targets = tuple(sorted(module.split(".")[1] for module in SHAPE.linears))
    facts = listing.adapter_tags(AdapterFacts(RANK, targets), base)
    manifest = scan_folder(folder, ADAPTER_CONFIG, MAX_ADAPTER_BYTES)
    return Publication(folder, name, "adapter", manifest, facts, (), None, False, base.name)
