"""A base of random weights in a given shape: a real folder, for trials, tests and benchmarks.

Its output is noise; its shapes, files and speed are those of a real base. The tokenizer is copied
from another base folder, and the vocabulary is that tokenizer's.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.json_values import read_json
from engine.model_config import parse_model_config
from engine.weight_files import SINGLE_FILE, new_folder
from engine.weight_shapes import expected_shapes

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class RandomShape:
    architecture: str  # as in config.json, e.g. Qwen3ForCausalLM
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048


def write_random_base(
    shape: RandomShape, tokenizer_folder: Path, out_dir: Path, *, seed: int = 0
) -> None:
    """Writes `out_dir` as a whole or not at all; the same arguments give the same bytes, in
    bfloat16."""
    source = read_json(tokenizer_folder / "config.json")
    if source is None:
        raise FileNotFoundError(f"{tokenizer_folder} holds no config.json")
    raw: dict[str, object] = {
        "architectures": [shape.architecture],
        "model_type": shape.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": source["vocab_size"],
        "eos_token_id": source.get("eos_token_id"),
        "bos_token_id": source.get("bos_token_id"),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    config = parse_model_config(raw, {})
    generator = torch.Generator().manual_seed(seed)
    norm = 1.0 - config.family.norm_offset
    tensors = {
        name: random_tensor(name, dims, generator, norm).to(torch.bfloat16)
        for name, dims in expected_shapes(config).items()
    }
    with new_folder(out_dir) as partial:
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        save_file(tensors, partial / SINGLE_FILE, metadata={"format": "pt"})
        for name in TEXT_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, partial / name)


def random_tensor(
    name: str, dims: tuple[int, ...], generator: torch.Generator, norm: float
) -> torch.Tensor:
    """Returns a tensor scaled so that activations keep their size from layer to layer, drawn on the
    generator's device. `norm`: the stored weight of a norm that is one."""
    if name.endswith("norm.weight"):
        return torch.full(dims, norm)
    if name.endswith(".bias"):
        return torch.zeros(dims)
    scale = 1.0 if "embed_tokens" in name else dims[-1] ** -0.5
    return torch.randn(dims, generator=generator, device=generator.device) * scale
