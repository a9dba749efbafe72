"""LoHa and LoKr adapters become LoRA: as close as asked, served as PEFT serves the originals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, PeftModel
from safetensors.torch import load_file, save_file

from engine.checks.validation import convert_adapter
from engine.model_config import lora_sites, read_model_config
from lora.adapter import read_adapter
from lora.errors import AdapterError
from lora.low_rank import Conversion, ConversionLimits
from lora.lycoris import convert_to_lora
from tests.engine_helpers import load_hf, make_adapter, make_base, make_runner
from tests.peft_kinds import LINEARS, check_against_peft, save_peft

KINDS: dict[str, PeftConfig] = {
    "LoHa": LoHaConfig(r=4, alpha=8, target_modules=list(LINEARS)),
    "LoHa of ranks and alphas": LoHaConfig(
        r=3,
        alpha=6,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"q_proj": 5},
    ),
    "LoHa of more rank than the matrix": LoHaConfig(r=8, alpha=8, target_modules=["k_proj"]),
    "LoKr": LoKrConfig(r=4, alpha=8, target_modules=list(LINEARS)),
    "LoKr in factors": LoKrConfig(
        r=2, alpha=4, target_modules=["q_proj", "up_proj"], decompose_both=True, decompose_factor=8
    ),
    "LoKr of a negative scale": LoKrConfig(r=2, alpha=-4, target_modules=["q_proj", "o_proj"]),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def make_kind(folder: Path, base: Path, name: str) -> Path:
    return save_peft(folder, base, KINDS[name], std=0.3)


def convert(folder: Path, base: Path, max_error: float, max_rank: int = 512) -> Conversion:
    sites = lora_sites(read_model_config(base))
    out = folder.parent / "converted"
    out.mkdir()
    return convert_to_lora(folder, out, sites, ConversionLimits(max_error, max_rank))


@pytest.mark.parametrize("name", KINDS)
def test_converted_adapter_gives_pefts_tokens_and_logits(
    name: str, base: Path, tmp_path: Path
) -> None:
    folder = make_kind(tmp_path / "kind", base, name)
    made = convert(folder, base, 0.0)
    assert made.kind == name[:4]
    assert made.error < 1e-6
    lora = make_adapter(tmp_path / "lora", base, rank=4, targets=("q_proj", "up_proj"))
    check_against_peft(make_runner(base), base, folder, lora, converted=tmp_path / "converted")


@pytest.mark.parametrize("name", ["LoHa", "LoKr"])
@pytest.mark.parametrize("bound", [0.0, 0.05, 0.3])
def test_error_of_every_module_is_within_the_bound_and_the_rank_the_least(
    name: str, bound: float, base: Path, tmp_path: Path
) -> None:
    folder = make_kind(tmp_path / "kind", base, name)
    made = convert(folder, base, bound)
    model = PeftModel.from_pretrained(load_hf(base), str(folder))
    sites = lora_sites(read_model_config(base))
    adapter = read_adapter(tmp_path / "converted", "", sites, 512)
    errors = []
    for module, weights in adapter.modules.items():
        layer = model.get_submodule(f"base_model.model.{module}")
        delta = layer.get_delta_weight("default").detach().double()
        found = weights.b.double().T @ weights.a.double()
        errors.append(float((found - delta).norm() / delta.norm()))
        sigma = torch.linalg.svdvals(delta)
        tails = sigma.square().flip(0).cumsum(0).flip(0).sqrt() / delta.norm()
        assert weights.rank == int((tails > max(bound, 1e-6)).sum())
    assert max(errors) <= max(bound, 1e-6)
    assert made.error == pytest.approx(max(errors), abs=1e-6)
    assert made.rank == adapter.rank


WIDE: dict[str, PeftConfig] = {
    "LoHa": LoHaConfig(r=13, alpha=13, target_modules=["q_proj"]),
    "LoKr": LoKrConfig(r=90, alpha=90, target_modules=["q_proj"], decompose_factor=2),
}


@pytest.mark.parametrize("name", WIDE)
def test_error_of_modules_that_are_large_for_the_rank_is_the_stated_one(
    name: str, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", hidden_size=160, num_attention_heads=10)
    folder = save_peft(tmp_path / "kind", base, WIDE[name], std=0.3)
    made = convert(folder, base, 0.99, max_rank=4)
    model = PeftModel.from_pretrained(load_hf(base), str(folder))
    errors = []
    adapter = read_adapter(
        tmp_path / "converted", "", lora_sites(read_model_config(base)), max_rank=4
    )
    for module, weights in adapter.modules.items():
        layer = model.get_submodule(f"base_model.model.{module}")
        delta = layer.get_delta_weight("default").detach().double()
        errors.append(float((weights.b.double().T @ weights.a.double() - delta).norm()))
        errors[-1] /= float(delta.norm())
    assert 0.3 < max(errors) <= 0.99
    assert made.error == pytest.approx(max(errors), rel=1e-5)


def test_loha_has_the_square_of_its_rank(base: Path, tmp_path: Path) -> None:
    assert convert(make_kind(tmp_path / "kind", base, "LoHa"), base, 0.0).rank == 16


def test_adapter_that_no_rank_served_can_follow_is_refused(base: Path, tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "kind", base, "LoHa")
    with pytest.raises(AdapterError, match=r"needs rank 16 .* of 0.001; at rank 8, the largest"):
        convert(folder, base, 1e-3, max_rank=8)


def test_other_files_come_along_and_weights_do_not(base: Path, tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "kind", base, "LoKr")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_bytes(b"pickle")
    (folder / "checkpoint-1").mkdir()
    convert(folder, base, 0.0)
    names = {path.name for path in (tmp_path / "converted").iterdir()}
    assert "chat_template.jinja" in names
    assert not {"optimizer.pt", "checkpoint-1"} & names
    fields = json.loads((tmp_path / "converted" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(base)


def test_plain_lora_is_left_alone(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "lora", base, rank=2, targets=("q_proj",))
    out = tmp_path / "out"
    out.mkdir()
    assert convert_adapter(folder, base, out, ConversionLimits(0.0)) is None
    assert not list(out.iterdir())


def test_untrained_adapter_becomes_one_that_changes_nothing(base: Path, tmp_path: Path) -> None:
    folder = save_peft(tmp_path / "kind", base, KINDS["LoKr"], std=0.0)
    assert convert(folder, base, 0.0) == Conversion("LoKr", 1, 0.0)
    sites = lora_sites(read_model_config(base))
    assert read_adapter(tmp_path / "converted", "", sites, 512).is_noop


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
SPOILED = {
    "a tensor of another kind": ({f"{Q0}.lokr_w1": torch.ones(2, 2)}, "not one of a LoHa"),
    "an unknown module": (
        {"base_model.model.model.layers.9.x.hada_w1_a": torch.ones(2, 2)},
        "layers.9.x that can be adapted",
    ),
    "the embedding": (
        {"base_model.model.model.embed_tokens.hada_w1_a": torch.ones(2, 2)},
        "no linear module",
    ),
    "a part missing": ({f"{Q0}.hada_w2_b": None}, "hada_w2_b of .*q_proj is missing"),
    "a module missing": (
        {f"{Q0}.hada_w{i}_{half}": None for i in (1, 2) for half in "ab"},
        "names model.layers.0.self_attn.q_proj, the file has no",
    ),
    "other shapes": ({f"{Q0}.hada_w1_a": torch.ones(5, 3)}, "have different shapes"),
    "other ranks": ({f"{Q0}.hada_w1_a": torch.ones(48, 5)}, "have different ranks"),
    "not a number": ({f"{Q0}.hada_w1_a": torch.full((96, 3), torch.nan)}, "NaN or infinity"),
    "one dimension": ({f"{Q0}.hada_w1_a": torch.ones(96)}, r"has shape \[96\]"),
    "no dimension": ({f"{Q0}.hada_w1_a": torch.tensor(1.0)}, r"has shape \[\]"),
    "another base": (
        {f"{Q0}.hada_w{i}_a": torch.ones(5, 3) for i in (1, 2)},
        r"has shape \[5, 48\], the base has \[96, 48\]",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_file_that_is_not_whole_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "kind", base, "LoHa of ranks and alphas")
    path = folder / "adapter_model.safetensors"
    changes, reason = SPOILED[name]
    tensors = load_file(path) | changes
    save_file({key: value for key, value in tensors.items() if value is not None}, path)
    with pytest.raises(AdapterError, match=reason):
        convert(folder, base, 0.0)


def test_kronecker_factor_of_a_huge_width_is_refused(base: Path, tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "kind", base, "LoKr")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path) | {f"{Q0}.lokr_w1": torch.ones(1, 2**22).half()}
    save_file(tensors, path)
    with pytest.raises(AdapterError, match=r"q_proj has shape \[.*, the base has \[96, 48\]"):
        convert(folder, base, 0.0)


@pytest.mark.parametrize("name", ["LoHa", "LoHa of more rank than the matrix", "LoKr"])
def test_change_beyond_any_number_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "kind", base, name)
    path = folder / "adapter_model.safetensors"
    save_file({key: tensor * 1e36 for key, tensor in load_file(path).items()}, path)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alpha"] = 1e300
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="overflows"):
        convert(folder, base, 0.0)


def test_plain_loading_names_the_conversion(base: Path, tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "kind", base, "LoHa")
    with pytest.raises(AdapterError, match="'LOHA', only 'LORA' is served; loraplex register"):
        make_runner(base).load_adapter("kind", folder)


def test_modules_to_save_are_refused(base: Path, tmp_path: Path) -> None:
    config = LoHaConfig(r=2, alpha=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    folder = save_peft(tmp_path / "kind", base, config)
    with pytest.raises(AdapterError, match="modules_to_save is supported with peft_type 'LORA' al"):
        convert(folder, base, 0.0)


def test_lora_is_no_such_adapter(base: Path, tmp_path: Path) -> None:
    folder = save_peft(tmp_path / "kind", base, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(AdapterError, match="'LORA', neither"):
        convert(folder, base, 0.0)
