"""Random bases: complete, deterministic, read back by the engine's own reader."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.families import FAMILIES
from engine.model_config import read_model_config
from engine.parallel.shards import Shard
from engine.tools.random_base import RandomShape, write_random_base
from engine.weights import WeightBuilder

SHAPE = RandomShape(
    architecture="Qwen3ForCausalLM",
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def tokenizer_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 96, "eos_token_id": 2, "bos_token_id": 1}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_random_base_is_read_by_the_engine_and_is_the_same_every_time(tmp_path: Path) -> None:
    source = tokenizer_folder(tmp_path / "source")
    for name in ("one", "two"):
        write_random_base(SHAPE, source, tmp_path / name, seed=3)
    config = read_model_config(tmp_path / "one")
    weights = WeightBuilder(Shard(config), torch.float32, torch.device("cpu")).load(
        tmp_path / "one"
    )
    assert weights.embedding.shape == (96, 32)
    assert (tmp_path / "one" / "tokenizer.json").read_text() == "{}"
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    source = tokenizer_folder(tmp_path / "source")
    write_random_base(SHAPE, source, tmp_path / "one", seed=1)
    write_random_base(SHAPE, source, tmp_path / "two", seed=2)
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two"))
    assert one != two


@pytest.mark.parametrize("architecture", FAMILIES)
def test_norms_of_a_random_base_are_one_in_every_family(architecture: str, tmp_path: Path) -> None:
    """Both in a folder, whose norms some families store less one, and without files."""
    folder = tmp_path / "base"
    write_random_base(
        replace(SHAPE, architecture=architecture), tokenizer_folder(tmp_path / "source"), folder
    )
    config = read_model_config(folder)
    read = WeightBuilder(Shard(config), torch.float32, torch.device("cpu")).load(folder)
    dummy = WeightBuilder(Shard(config), torch.float32, torch.device("cpu")).fill_randomly()
    for weights in (read, dummy):
        layer = weights.layers[1]
        norms = (layer.input_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm)
        found = [norm for norm in (*norms, layer.q_norm, weights.norm) if norm is not None]
        assert len(found) >= 3
        assert all(torch.equal(norm, torch.ones_like(norm)) for norm in found)
