"""A base of random weights as a server needs it: registered, with a tokenizer and adapters.

The tokenizer is made up: letters, no merges, and a word for every other id of the vocabulary. A
random model's tokens are text then (no halves of characters): one token is one event. A base whose
weights the engine makes (`load_format: dummy`) has a placeholder for its weight file and goes past
the check that serving's own registration makes: the registry itself takes any file.
"""

from __future__ import annotations

import json
import os
import string
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.model_config import read_model_config
from engine.weight_files import SINGLE_FILE
from engine.weight_shapes import expected_shapes
from registry.cache import Cache
from registry.entities import BaseFacts
from serve_app.cli.commands.store import open_registry
from serve_app.cli.registration import register_adapter, register_base
from tests.benchmarks.adapter_files import write_adapters
from tests.benchmarks.cases import AdapterSpec
from tests.benchmarks.memory_adapters import pool_bytes
from tests.benchmarks.serve_home import write_serve_file
from tests.benchmarks.shapes import ModelShape

BASE = "random-base"
RANK = 16


def prepare_home(
    home: Path, shape: ModelShape, num_adapters: int, *, has_weights: bool, device: str
) -> list[str]:
    """Registers the base and its adapters in an empty home, with the adapters' files in the disk
    cache. Returns the adapters' names."""
    os.environ["LORAPLEX_HOME"] = str(home)
    folder = shape.write_config(home / "base")
    write_tokenizer(folder, shape.vocab_size)
    registry = open_registry(None)
    if has_weights:
        write_weights(folder)
        register_base(registry, folder, BASE, link=True)
    else:
        model = read_model_config(folder)
        count = sum(int(torch.Size(dims).numel()) for dims in expected_shapes(model).values())
        facts = BaseFacts(shape.architecture, count, shape.max_len)
        save_file({"placeholder": torch.zeros(1)}, folder / SINGLE_FILE)
        registry.register_base(folder, BASE, facts=facts)
    cache = Cache(home / "cache")
    adapters = [AdapterSpec(RANK, index) for index in range(num_adapters)]
    folders = write_adapters(home / "adapters", shape, adapters, device)
    for adapter in folders:
        registered = register_adapter(
            registry, adapter, adapter.name, BASE, cache=cache, probe="never"
        )
        cache.release(registry.fetch(registered.version, cache))
    return [adapter.name for adapter in folders]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    letters = (*string.ascii_letters, *string.digits, *string.punctuation, "Ġ")  # JSON needs all
    words = (f"Ġw{index}" for index in range(vocab_size - len(letters) - 1))
    vocab = {text: index for index, text in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}) + "\n")


def write_weights(folder: Path, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, dims in expected_shapes(read_model_config(folder)).items():
        values = torch.ones(dims)
        if not name.endswith("norm.weight"):
            values = torch.randn(dims, generator=generator) * dims[-1] ** -0.5
        tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def write_config(
    home: Path,
    port: int,
    *,
    ingresses: int,
    engine: dict[str, object],
    pages: int,
    import_path: str = "serve_app.app:build",
) -> Path:
    """Writes the Serve file. `engine`: settings beside those that the measured workload needs."""
    model = read_model_config(home / "base")
    settings: dict[str, object] = {
        "max_model_len": min(4096, model.max_len),
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.8,
        "adapter_pool_bytes": pool_bytes(model, pages, 2),
        "adapter_host_bytes": 16 * 1024**3,
    }
    arguments = {
        "registry": {"poll_interval_s": 2},
        "ingress": {"replicas": ingresses, "graceful_shutdown_timeout_s": 2},
        "models": [
            {
                "name": BASE,
                "max_ongoing_requests": 512,
                "max_queued_requests": 512,
                "graceful_shutdown_timeout_s": 2,
                "engine": settings | engine,
            }
        ],
    }
    return write_serve_file(home, port, arguments, import_path=import_path)
