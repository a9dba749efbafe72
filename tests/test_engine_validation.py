"""The reports of validation on a folder, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checks.validation import check_adapter, check_base
from engine.errors import UnsupportedModelError
from engine.weight_files import SINGLE_FILE
from lora.errors import AdapterError
from tests.engine_helpers import VOCAB, load_hf, make_adapter, make_base


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
