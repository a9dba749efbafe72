"""A model over several ranks has the logits of one: families, adapters; what cannot be cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint import Checkpoint
from engine.errors import UnsupportedModelError
from engine.model_config import read_model_config
from engine.parallel.shards import Shard
from engine.weights import WeightBuilder
from tests.engine_helpers import make_base, random_prompt
from tests.family_bases import (
    CPU,
    LINEARS,
    VARIANTS,
    VOCABULARY,
    Decoder,
    make_family_adapter,
    make_family_base,
)
from tests.parallel_helpers import logits_of_ranks

_PROMPTS = (random_prompt(21, seed=1), random_prompt(13, seed=2), random_prompt(9, seed=3))


def _check(base: Path, folders: list[Path], size: int, chunk: int = 8) -> None:
    names = [None, *(one.name for one in folders), None]
    prompts = list(zip(_PROMPTS, names, strict=False))
    expected = Decoder(base, folders).logits(prompts, chunk)
    found = logits_of_ranks(base, folders, prompts, size, chunk)
    for ours, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_give_the_logits_of_one_in_every_family(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    if name == "phi 4":  # three heads there
        more = {"num_attention_heads": 6, "hidden_size": 96}
        variant = replace(variant, changes=variant.changes | more)
    base = make_family_base(tmp_path / "base", variant)
    adapter = make_family_adapter(tmp_path / "all", base, (*variant.linears, *VOCABULARY))
    some = make_family_adapter(tmp_path / "some", base, variant.linears[-2:], rank=17, seed=1)
    _check(base, [adapter, some], size=2)


@pytest.mark.parametrize("family", ["llama", "olmo 2"])
def test_four_ranks_share_two_kv_heads(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
    if family == "llama":
        base = make_base(tmp_path / "base", **sizes, tie_word_embeddings=True)
    else:
        variant = VARIANTS[family]
        variant = replace(variant, changes=variant.changes | sizes)
        base = make_family_base(tmp_path / "base", variant)
    adapter = make_family_adapter(tmp_path / "all", base, (*LINEARS, *VOCABULARY))
    some = make_family_adapter(tmp_path / "some", base, ("k_proj", "o_proj"), rank=20, seed=1)
    _check(base, [adapter, some], size=4)


def test_gains_and_biases_of_adapters_are_applied_once(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["granite"])
    dora = make_family_adapter(tmp_path / "dora", base, LINEARS, use_dora=True)
    biases = make_family_adapter(tmp_path / "biases", base, LINEARS, lora_bias=True)
    _check(base, [dora, biases], size=2)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_rank_reads_its_part_only(is_tied: bool, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=is_tied)
    config, read = read_model_config(base), []

    class Counted(Checkpoint):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            read.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.weights.Checkpoint", Counted)
        held = [
            WeightBuilder(Shard(config, rank, 2), torch.float32, CPU).load(base)
            for rank in range(2)
        ]
    for weights, checkpoint in zip(held, read, strict=True):
        names = weights.parameters.keys() - ({"lm_head.weight"} if is_tied else set())
        num_bytes = sum(weights.parameters[name].nbytes for name in names)
        assert num_bytes < 0.7 * checkpoint.num_bytes
        assert checkpoint.num_bytes_read <= 1.05 * num_bytes


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({"num_attention_heads": 6}, 4, "does not divide num_attention_heads 6"),
        ({"num_attention_heads": 8, "intermediate_size": 82}, 4, "intermediate_size 82"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            "neither divides num_key_value_heads 3 nor is a multiple of it",
        ),
    ],
)
def test_a_base_that_cannot_be_cut_is_refused(
    changes: dict[str, Any], size: int, words: str, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", **changes)
    with pytest.raises(UnsupportedModelError, match=f"tensor_parallel_size is {size}.*{words}"):
        Shard(read_model_config(base), 0, size)
