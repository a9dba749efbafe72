"""The reports of validation on a folder, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from engine.checks.parity import measure_parity
from engine.checks.validation import check_adapter, check_base
from engine.errors import UnsupportedModelError
from engine.weight_files import SINGLE_FILE
from lora.errors import AdapterError
from tests.engine_helpers import VOCAB, load_hf, make_adapter, make_base, random_prompt
from tests.peft_kinds import save_peft


def make_whole_base(folder: Path, **changes: Any) -> Path:
    make_base(folder, **changes)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_base_is_described(tmp_path: Path) -> None:
    folder = make_whole_base(tmp_path / "base", tie_word_embeddings=True)
    report = check_base(folder)
    assert report.architecture == "LlamaForCausalLM"
    assert report.num_parameters == sum(p.numel() for p in load_hf(folder).parameters())
    assert (report.vocab_size, report.max_model_len) == (VOCAB, 128)
    assert not report.has_chat_template
    assert "chat" in report.warnings[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", '{"chat_template": "x"}'),
    ],
)
def test_a_chat_template_is_found_in_both_places(tmp_path: Path, name: str, text: str) -> None:
    folder = make_whole_base(tmp_path / "base")
    (folder / name).write_text(text)
    assert check_base(folder).has_chat_template


def test_a_base_that_could_not_be_served_is_refused(tmp_path: Path) -> None:
    folder = make_whole_base(tmp_path / "base")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json"):
        check_base(folder)
    (folder / "tokenizer.json").write_text("{}")
    tensors = load_file(folder / SINGLE_FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / SINGLE_FILE)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj.* holds NaN"):
        check_base(folder)


def test_an_adapter_is_described(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    folder = make_adapter(tmp_path / "adapter", base, 5, ("q_proj", "down_proj", "lm_head"))
    report = check_adapter(folder, base)
    assert (report.rank, report.targets) == (5, ("down_proj", "lm_head", "q_proj"))
    assert report.num_tensors == 2 * (3 + 3 + 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert report.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert (report.is_noop, report.warnings) == (False, ())


def test_an_adapter_that_changes_nothing_is_told(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    folder = make_adapter(tmp_path / "adapter", base, 4, ("q_proj",))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.zero_()
    save_file(tensors, path)
    report = check_adapter(folder, base)
    assert report.is_noop
    assert "changes nothing" in report.warnings[0]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"trainable_token_indices": [3, 9]}])
def test_copies_that_nobody_trained_are_accepted_as_peft_reads_them(
    fields: dict[str, Any], is_tied: bool, tmp_path: Path
) -> None:
    """PEFT's save_embedding_layers, which it sets for a vocabulary of another length, too."""
    base = make_base(tmp_path / "base", tie_word_embeddings=is_tied)
    folder, path = tmp_path / "adapter", tmp_path / "adapter/adapter_model.safetensors"
    save_peft(folder, base, LoraConfig(r=4, target_modules=["q_proj"], **fields), copies=True)
    assert any(
        name.endswith("embed_tokens.weight") or "base_layer" in name for name in load_file(path)
    )
    check_adapter(folder, base)
    found = measure_parity(folder, folder, base, [random_prompt(20, seed=4)])
    assert found.max_difference < 3e-4


def test_head_that_was_trained_and_is_not_named_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    folder, path = tmp_path / "adapter", tmp_path / "adapter/adapter_model.safetensors"
    save_peft(folder, base, LoraConfig(r=4, target_modules=["q_proj"]), copies=True)
    tensors = load_file(path)
    tensors["base_model.model.lm_head.weight"][5] += 1
    save_file(tensors, path)
    with pytest.raises(
        AdapterError, match=r"lm_head\.weight differs .* modules_to_save .* name it"
    ):
        check_adapter(folder, base)


def test_rows_of_a_tied_head_that_are_not_the_embeddings_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    folder, path = tmp_path / "adapter", tmp_path / "adapter/adapter_model.safetensors"
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 9])
    save_peft(folder, base, config, copies=True)
    tensors = load_file(path)
    tensors["base_model.model.lm_head.token_adapter.trainable_tokens_delta"][1] += 1
    save_file(tensors, path)
    with pytest.raises(AdapterError, match="names other modules than the file"):
        check_adapter(folder, base)


@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "lm_head", "embed_tokens")])
def test_a_vocabulary_that_was_extended_names_the_base_to_register(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base")
    longer = make_base(tmp_path / "longer", vocab_size=VOCAB + 4)
    folder = make_adapter(tmp_path / "adapter", longer, 4, targets, keeps_base_copy=True)
    check_adapter(folder, longer)
    with pytest.raises(AdapterError, match="register the base as it was saved after resize_token_"):
        check_adapter(folder, base)


def test_a_trained_copy_of_the_base_is_refused_an_equal_one_is_not(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    folder = make_adapter(
        tmp_path / "adapter", base, 4, ("q_proj", "embed_tokens"), keeps_base_copy=True
    )
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    copies = [name for name in tensors if "base_layer" in name]
    assert copies
    assert check_adapter(folder, base).targets == ("embed_tokens", "q_proj")
    tensors[copies[0]] += torch.ones(())
    save_file(tensors, path)
    with pytest.raises(AdapterError, match="differs from the base"):
        check_adapter(folder, base)
