"""DoRA's gains against their definition, and the vectors of files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from engine.model_config import lora_sites, read_model_config
from lora import dora
from lora.adapter import read_adapter
from lora.dora import dora_gains
from lora.errors import AdapterError
from lora.vectors import BaseParameter
from tests.engine_helpers import load_hf, make_base
from tests.peft_kinds import save_peft
from tests.test_lora_adapter import make_base as make_llama
from tests.test_lora_adapter import make_sites


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [0.5, -2.0])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_gains_are_those_of_the_changed_weight(
    scale: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of rows at a time, and for a delta as large as the weight."""
    weight, a, b = numbers(60, 40, seed=1), numbers(5, 40, seed=2), numbers(60, 5, seed=3)
    magnitude = numbers(60, seed=4).abs() + 0.1
    monkeypatch.setattr(dora, "_CHUNK_BYTES", rows * 4 * 40)
    found, norm = dora_gains(weight, a, b, scale, magnitude)
    changed = weight.double() + scale * b.double() @ a.double()
    expected = magnitude.double() / changed.norm(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    change = expected[:, None] * changed - weight.double()
    assert norm == pytest.approx(float(change.norm()), rel=1e-6)


def test_gains_of_a_weight_in_bfloat16_are_those_of_its_numbers() -> None:
    weight, a, b = (
        numbers(60, 40, seed=1).bfloat16(),
        numbers(5, 40, seed=2),
        numbers(60, 5, seed=3),
    )
    magnitude = torch.ones(60)
    found, _ = dora_gains(weight, a, b, 1.0, magnitude)
    expected = 1 / (weight.double() + b.double() @ a.double()).norm(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_row_that_the_adapter_takes_away_has_no_gain() -> None:
    weight, b = torch.zeros(2, 4), torch.zeros(2, 3)
    weight[1] = 1
    found, _ = dora_gains(weight, numbers(3, 4, seed=2), b, 1.0, torch.ones(2))
    assert found.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("left", [1e-2, 1e-3, 1e-5])
def test_gains_of_rows_of_which_little_is_left_are_exact(left: float) -> None:
    weight, b = numbers(20, 4096, seed=1), torch.zeros(20, 16)
    b[:16] = (left - 1) * torch.eye(16)
    a = weight[:16].clone()
    found, _ = dora_gains(weight, a, b, 1.0, torch.ones(20))
    expected = 1 / (weight.double() + b.double() @ a.double()).norm(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), "qwen2")


def test_norm_is_that_of_the_change_of_the_whole_weight(base: Path, tmp_path: Path) -> None:
    """Magnitudes alone change a weight, though B is zero."""
    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], use_dora=True)
    model = load_hf(base)
    parameters = model.state_dict()
    folder = save_peft(tmp_path / "dora", base, config, std=0.0)
    sites = lora_sites(read_model_config(base))
    adapter = read_adapter(folder, "", sites, 8, parameters.get)
    assert adapter.kind == "DoRA"
    assert not adapter.is_noop
    tensors = load_file(folder / "adapter_model.safetensors")
    for module, weights in adapter.modules.items():
        weight = parameters[f"{module}.weight"].double()
        magnitude = tensors[f"base_model.model.{module}.lora_magnitude_vector"].double()
        change = (magnitude / weight.norm(dim=1))[:, None] * weight - weight
        offset = (magnitude / weight.norm(dim=1) - 1) * parameters.get(f"{module}.bias", 0.0)
        expected = torch.cat((change, offset[:, None]), dim=1).norm()
        assert weights.delta_norm() == pytest.approx(float(expected), rel=1e-4)


Q0, MODULE = "base_model.model.model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"
_BASE = make_llama().state_dict()


def parameters_with(**changes: torch.Tensor) -> BaseParameter:
    return {f"{MODULE}.{name}": value for name, value in changes.items()}.get


REFUSED: dict[str, tuple[str, torch.Tensor, dict[str, object], BaseParameter, str]] = {
    "another length": (
        "lora_magnitude_vector",
        torch.ones(5),
        {"use_dora": True},
        _BASE.get,
        r"has shape \[5\], the base has \[16\]",
    ),
    "not a number": (
        "lora_magnitude_vector",
        torch.full((16,), torch.nan),
        {"use_dora": True},
        _BASE.get,
        f"a magnitude of DoRA of {MODULE} holds NaN",
    ),
    "no weight to compare with": (
        "lora_magnitude_vector",
        torch.ones(16),
        {"use_dora": True},
        {}.get,
        f"needs the base's weight of {MODULE}",
    ),
    "a row of zeros": (
        "lora_magnitude_vector",
        torch.ones(16),
        {"use_dora": True},
        parameters_with(weight=torch.zeros(16, 16)),
        "a row is zero, or too large",
    ),
    "a bias that the base does not have": (
        "base_layer.bias",
        torch.ones(16),
        {"bias": "all"},
        _BASE.get,
        f"needs the base's bias of {MODULE}, and the base has none",
    ),
    "an infinite bias": (
        "lora_B.bias",
        torch.full((16,), torch.inf),
        {"lora_bias": True},
        _BASE.get,
        f"a bias of lora_B of {MODULE} holds NaN or infinity",
    ),
    "an offset beyond float32": (
        "lora_B.bias",
        torch.full((16,), 3e38),
        {"lora_bias": True, "lora_alpha": 400},
        _BASE.get,
        f"the gains or offsets of {MODULE} overflow float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_vectors_that_cannot_be_served_are_refused(name: str, tmp_path: Path) -> None:
    part, vector, config, base, reason = REFUSED[name]
    tensors = {
        f"{Q0}.lora_A.weight": numbers(4, 16, seed=1),
        f"{Q0}.lora_B.weight": torch.zeros(16, 4),
        f"{Q0}.{part}": vector,
    }
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    text = json.dumps({**fields, "layers_to_transform": [0], **config})
    (tmp_path / "adapter_config.json").write_text(text)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=reason):
        read_adapter(tmp_path, "", make_sites(), 8, base)


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
def test_head_is_named_in_the_refusal(field: str, tmp_path: Path) -> None:
    head = "base_model.model.lm_head"
    tensors = {
        f"{head}.lora_A.weight": torch.ones(4, 16),
        f"{head}.lora_B.weight": torch.ones(32, 4),
    }
    fields = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["lm_head"],
        field: True,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=f"{field} is not supported at lm_head: leave it out"):
        read_adapter(tmp_path, "", make_sites(), 8, _BASE.get)
