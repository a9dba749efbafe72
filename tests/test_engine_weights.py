"""Weights: shards equal one file, and every tensor must be there, once, in its shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import base_reader
from engine.errors import UnsupportedModelError
from engine.model_config import read_model_config
from engine.parallel.shards import Shard
from engine.weight_files import INDEX_FILE, SINGLE_FILE
from engine.weights import WeightBuilder, Weights
from tests.engine_helpers import VOCAB, load_hf, make_base
from tests.quantized_bases import check_equal, write_quantized
from tests.test_engine_compressed_tensors import SCHEMES, compress, config_of

Tensors = dict[str, torch.Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return WeightBuilder(Shard(read_model_config(folder)), dtype, torch.device("cpu")).load(folder)


def change(folder: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder


def test_shards_equal_one_file(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    sharded = tmp_path / "sharded"
    load_hf(base).save_pretrained(sharded, max_shard_size="60KB")
    assert not (sharded / SINGLE_FILE).exists()
    assert len(set(json.loads((sharded / INDEX_FILE).read_text())["weight_map"].values())) > 2
    one, many = load(base), load(sharded)
    for a, b in zip(one.layers, many.layers, strict=True):
        assert torch.equal(a.qkv, b.qkv)
        assert torch.equal(a.gate_up, b.gate_up)
        assert torch.equal(a.down, b.down)
    assert torch.equal(one.head, many.head)


def test_fused_parameters_hold_their_parts_in_order(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2")
    tensors = load_file(base / SINGLE_FILE)
    layer = load(base).layers[1]
    attention = "model.layers.1.self_attn"
    parts = [tensors[f"{attention}.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(parts))
    assert layer.qkv_bias is not None
    biases = [tensors[f"{attention}.{name}_proj.bias"] for name in "qkv"]
    assert torch.equal(layer.qkv_bias, torch.cat(biases))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    weights = load(make_base(tmp_path / "base", tie_word_embeddings=True), torch.bfloat16)
    assert weights.head is weights.embedding
    assert weights.head.dtype == torch.bfloat16


def _copy_head(tensors: Tensors, edit: Callable[[torch.Tensor], object]) -> None:
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head
    edit(head)


def test_a_tied_head_that_is_stored_too_is_left_out(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    expected = load(base).embedding
    change(base, lambda tensors: _copy_head(tensors, lambda head: None))
    weights = load(base)
    assert weights.head is weights.embedding
    assert torch.equal(weights.embedding, expected)


@pytest.mark.parametrize("wider", [torch.float16, torch.float32])
def test_a_tied_head_of_the_same_values_may_be_of_another_type(
    tmp_path: Path, wider: torch.dtype
) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    embedding = torch.arange(VOCAB * 48).view(VOCAB, 48).remainder(251).bfloat16() / 64
    stored = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.to(wider)}
    weights = load(change(base, lambda tensors: tensors.update(stored)))
    assert weights.head is weights.embedding
    assert torch.equal(weights.embedding, embedding.float())


def test_a_quantized_tied_head_of_the_same_parts_is_left_out(tmp_path: Path) -> None:
    scheme = SCHEMES["int4 in groups"]
    groups = {"a": {"targets": ["Linear", "Embedding"], "weights": scheme[1]}}
    config = config_of("pack-quantized", {}) | {"config_groups": groups}
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    folder, weights = write_quantized(
        base, tmp_path / "quantized", config, lambda module, weight: compress(*scheme, weight)
    )

    def store(tensors: Tensors) -> None:
        made = compress(*scheme, tensors.pop("model.embed_tokens.weight"))
        for name, part in made.parts.items():
            tensors[f"model.embed_tokens.{name}"] = part.contiguous()
            tensors[f"lm_head.{name}"] = part.clone().contiguous()
        weights["model.embed_tokens.weight"] = made.weight

    check_equal(change(folder, store), weights)
    for edit in (
        lambda t: t["lm_head.weight_packed"][-1].add_(1),
        lambda t: t.pop("lm_head.weight_scale"),
        lambda t: [t.pop(name) for name in list(t) if "embed_tokens" in name],
    ):
        change(folder, edit)
        with pytest.raises(UnsupportedModelError, match=r"lm_head\..*, which is not the embedding"):
            load(folder)


def test_a_bias_of_zeros_beside_a_tied_head_is_dropped_and_another_is_unknown(
    tmp_path: Path,
) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    bias = torch.zeros(VOCAB)
    change(base, lambda tensors: tensors.update({"lm_head.bias": bias}))
    load(base)
    change(base, lambda tensors: _copy_head(tensors, lambda head: None))
    load(base)
    bias[-1] = 1
    change(base, lambda tensors: tensors.update({"lm_head.bias": bias}))
    with pytest.raises(UnsupportedModelError, match=r"holds lm_head\.bias, which is unknown"):
        load(base)


def test_a_tied_head_that_is_stored_alone_is_the_embedding(tmp_path: Path) -> None:
    """transformers 5 ties them this way round, too."""
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    expected = load(base).embedding
    name = "model.embed_tokens.weight"
    change(base, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(name)}))
    assert torch.equal(load_hf(base).get_input_embeddings().weight, expected)
    assert torch.equal(load(base).embedding, expected)


def test_the_only_file_of_weights_under_another_name_is_named(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (base / SINGLE_FILE).rename(base / "gptq_model-4bit-128g.safetensors")
    message = r": gptq_model-4bit-128g\.safetensors has to be renamed to model\.safetensors"
    with pytest.raises(UnsupportedModelError, match=message):
        load(base)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "consolidated.safetensors"])
def test_a_file_that_would_not_be_read_under_the_name_is_not_to_be_renamed(
    tmp_path: Path, name: str
) -> None:
    base = make_base(tmp_path / "base")
    whole = base / "model-00001-of-00001.safetensors"
    (base / SINGLE_FILE).rename(whole)
    with pytest.raises(UnsupportedModelError, match=r"-of-00001\.safetensors has to be renamed"):
        load(base)
    whole.rename(base / name)
    with pytest.raises(UnsupportedModelError, match=r"has neither .*index\.json$"):
        load(base)


@pytest.mark.parametrize("name", [SINGLE_FILE, INDEX_FILE])
def test_a_link_to_no_file_is_named_with_its_target(tmp_path: Path, name: str) -> None:
    """A folder of Hugging Face's cache without the blobs."""
    base = make_base(tmp_path / "base")
    (base / SINGLE_FILE).unlink()
    (base / name).symlink_to("../../blobs/1234")
    message = rf": {name} is a link to '../../blobs/1234', which is no file"
    with pytest.raises(UnsupportedModelError, match=message):
        load(base)


@pytest.mark.parametrize("row", [0, VOCAB - 1])
def test_a_tied_head_of_other_values_is_refused_with_both_ways_out(
    tmp_path: Path, row: int
) -> None:
    """The head of a tied model was trained and saved: transformers 5 computes with it."""
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    change(base, lambda tensors: _copy_head(tensors, lambda head: head[row].add_(0.5)))
    message = r"holds lm_head\.weight, .* tie_word_embeddings is true: set it to false"
    with patch("engine.checkpoint._SLICE_ELEMENTS", 100):
        with pytest.raises(UnsupportedModelError, match=message):
            load(base)
        config = json.loads((base / "config.json").read_text())
        untied = config | {"tie_word_embeddings": False}
        (base / "config.json").write_text(json.dumps(untied))
        head = load_file(base / SINGLE_FILE)["lm_head.weight"]
        assert torch.equal(load(base).head, head)
        (base / "config.json").write_text(json.dumps(config))
        change(base, lambda tensors: tensors.pop("lm_head.weight"))
        assert load(base).head.shape == head.shape


def test_a_tied_head_that_is_read_is_the_embedding_that_is_held(tmp_path: Path) -> None:
    """Two threads read adapters, and the other one reads the base between."""
    folder = make_base(tmp_path, tie_word_embeddings=True)
    base = base_reader(folder, read_model_config(folder))
    embedding = base("model.embed_tokens.weight")
    assert embedding is not None
    assert base("model.norm.weight") is not embedding
    assert base("lm_head.weight") is embedding


def test_tensors_without_a_meaning_do_no_harm(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load(change(base, lambda tensors: tensors.update(extra)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
        (lambda t: [t.pop(k) for k in list(t) if "mlp" in k], "and 8 more is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "holds extra, which is unknown"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(47)}),
            r"model.norm.weight has shape \[47\], config.json makes it \[48\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}),
            "model.norm.weight has type I8",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, edit: Callable[[Tensors], object], message: str
) -> None:
    base = change(make_base(tmp_path / "base"), edit)
    with pytest.raises(UnsupportedModelError, match=message):
        load(base)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    path = base / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors cannot be read"):
        load(base)


def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    path = base / SINGLE_FILE
    path.rename(tmp_path / SINGLE_FILE)
    for name, message in (
        (f"../{SINGLE_FILE}", "not a file of the folder"),
        ("gone.safetensors", "gone.safetensors, which is missing"),
    ):
        (base / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(UnsupportedModelError, match=message):
            load(base)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (base / SINGLE_FILE).rename(base / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pickle \(pytorch_model.bin\)"):
        load(base)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("zero_to_fp32.py", r"index\.json, it is DeepSpeed's: python zero_to_fp32\.py \. FOLDER"),
        ("fsdp_0/__0_0.distcp", r"index\.json, it is FSDP's: accelerate merge-weights fsdp_0 FOL"),
        ("training_args.bin", r"model\.safetensors\.index\.json$"),
    ],
)
def test_the_state_of_a_trainer_is_not_taken_for_the_weights(
    tmp_path: Path, file: str, message: str
) -> None:
    base = make_base(tmp_path / "base")
    (base / SINGLE_FILE).unlink()
    for name in ("optimizer_0", "fsdp_0"):  # in either order of the file system
        (base / name).mkdir()
    if "distcp" in file:
        (base / "optimizer_0" / "__0_0.distcp").touch()
    for name in (file, "training_args.bin", "rng_state.pth", "rng_state_0.pth", "optimizer.bin"):
        (base / name).write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=message):
        load(base)
