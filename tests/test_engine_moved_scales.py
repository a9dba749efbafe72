"""An adapter that is folded for an AWQ base changes it as it changed the unquantized base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checks.moved_scales import MovedScales, fold_adapter
from engine.errors import UnsupportedModelError
from engine.weight_files import SINGLE_FILE
from lora.errors import AdapterError
from registry.cache import Cache
from registry.errors import RegistrationError
from serve_app.cli.registration import register_adapter, register_base
from tests.awq_bases import make_awq_base
from tests.engine_helpers import VOCAB, make_base
from tests.family_bases import LINEARS, Decoder, expected_logits, make_family_adapter
from tests.quantized_bases import write_plain
from tests.registry_helpers import embedded
from tests.serve_folders import make_adapter_folder, make_base_folder

SMALL = {"num_hidden_layers": 2}


def fold(adapter: Path, awq: Path, base: Path, out: Path) -> Path:
    out.mkdir()
    fold_adapter(adapter, awq, "d" * 64, base, out)
    return out


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_a_folded_adapter_computes_as_on_the_unquantized_base(
    tmp_path: Path, family: str, kv_heads: int
) -> None:
    base = make_base(tmp_path / "base", family, num_key_value_heads=kv_heads, **SMALL)
    awq, plain = make_awq_base(base, tmp_path / "tiny-awq")
    same = write_plain(base, tmp_path / "same", plain)
    adapter = make_family_adapter(tmp_path / "adapter", same, (*LINEARS, "lm_head"))
    folded = fold(adapter, awq, base, tmp_path / "folded")
    ids = [5, 77, 3, 120, 64, VOCAB - 1]
    expected = expected_logits(same, adapter, ids)
    unchanged = expected_logits(same, None, ids)
    decoder = Decoder(awq, [adapter, folded])
    without, wrong, found = decoder.logits([(ids, None), (ids, "adapter"), (ids, "folded")])
    size = float((expected - unchanged).norm())
    assert float((without - unchanged).norm()) < 1e-3 * size  # the base itself
    assert float((found - expected).norm()) < 1e-2 * size
    assert float((wrong - expected).norm()) > 0.2 * size
    marked = json.loads((folded / "adapter_config.json").read_text())
    assert marked["loraplex_folded_for"] == "d" * 64


def test_scales_of_rows_are_recovered_though_other_groups_are_clipped(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **SMALL)
    awq, _ = make_awq_base(base, tmp_path / "tiny-awq", clip=0.8)
    exact, _ = make_awq_base(base, tmp_path / "exact-awq")
    module = "model.layers.0.mlp.down_proj"
    found = MovedScales(awq, base).of_inputs(module)
    torch.testing.assert_close(
        found, MovedScales(exact, base).of_inputs(module), rtol=2**-7, atol=0
    )
    assert float((found - 1).abs().max()) > 0.5


def test_rows_of_which_every_group_is_clipped_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **SMALL)
    awq, _ = make_awq_base(base, tmp_path / "tiny-awq", clip=0.5)
    adapter = make_family_adapter(tmp_path / "adapter", base, ("down_proj",))
    with pytest.raises(UnsupportedModelError, match=r"rows of .*up_proj cannot be recovered"):
        fold(adapter, awq, base, tmp_path / "folded")
    narrow = make_family_adapter(tmp_path / "narrow", base, ("q_proj", "k_proj"))
    with pytest.raises(UnsupportedModelError, match=r"[qk]_proj.weight differs by 0\.\d+"):
        fold(narrow, awq, base, tmp_path / "folded narrow")


def test_another_base_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **SMALL)
    awq, _ = make_awq_base(base, tmp_path / "tiny-awq")
    adapter = make_family_adapter(tmp_path / "adapter", base, ("q_proj",))
    tensors = load_file(base / SINGLE_FILE)
    other = shutil.copytree(base, tmp_path / "other")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].roll(1, 0)
    save_file(tensors, other / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="was made of another one"):
        fold(adapter, awq, other, tmp_path / "a")
    tensors["model.layers.0.input_layernorm.weight"].neg_()
    save_file(tensors, other / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="differs in sign"):
        fold(adapter, awq, other, tmp_path / "b")
    with pytest.raises(UnsupportedModelError, match="is quantized: awq"):
        fold(adapter, awq, awq, tmp_path / "c")
    wide = make_base(tmp_path / "wide", intermediate_size=96, **SMALL)
    with pytest.raises(UnsupportedModelError, match="other shapes"):
        fold(adapter, awq, wide, tmp_path / "d")


def test_only_plain_lora_is_folded(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **SMALL)
    awq, _ = make_awq_base(base, tmp_path / "tiny-awq")
    adapter = make_family_adapter(tmp_path / "adapter", base, ("q_proj",), use_dora=True)
    with pytest.raises(AdapterError, match="use_dora cannot be folded"):
        fold(adapter, awq, base, tmp_path / "folded")


def test_registration_follows_the_base_of_an_adapter(tmp_path: Path) -> None:
    registry, cache = embedded(tmp_path / "home"), Cache(tmp_path / "cache")
    base = make_base_folder(tmp_path / "tiny")
    awq, _ = make_awq_base(base, tmp_path / "tiny-awq")
    registered = register_base(registry, awq, "tiny")
    assert registered.version.quantization.startswith("awq gemm")
    assert any("--unquantized-base" in warning for warning in registered.warnings)
    register_base(registry, base, "plain")
    # The name of the unquantized base is also the registered name: it still is another base.
    for name, trained_on in (("named", "organisation/tiny"), ("silent", None)):
        adapter = make_adapter_folder(tmp_path / name, trained_on=trained_on)
        with pytest.raises(RegistrationError, match=r"names no AWQ base.*--unquantized-base"):
            register_adapter(registry, adapter, name, "tiny", cache=cache)
    own = make_adapter_folder(tmp_path / "own", trained_on="organisation/tiny-AWQ")
    register_adapter(registry, own, "own", "tiny", cache=cache)
    adapter = tmp_path / "named"
    with pytest.raises(RegistrationError, match="is for AWQ bases, this one is plain"):
        register_adapter(registry, adapter, "named", "plain", cache=cache, unquantized_base=base)
    for wrong in (tmp_path / "nowhere", base / "config.json"):
        with pytest.raises(RegistrationError, match=f"--unquantized-base {wrong} is no folder"):
            register_adapter(
                registry, adapter, "named", "tiny", cache=cache, unquantized_base=wrong
            )
    with pytest.raises(RegistrationError, match="--parity is not for --unquantized-base"):
        register_adapter(
            registry, adapter, "named", "tiny", cache=cache, unquantized_base=base, parity=1e-3
        )
    version = register_adapter(
        registry, adapter, "named", "tiny", cache=cache, unquantized_base=base
    ).version
    assert version.converted.startswith("LoRA folded for AWQ, scales of 0.4")
    assert version.base_digest == registered.version.digest
    saved = shutil.copytree(adapter, tmp_path / "saved")  # a module that equals the base's
    config = json.loads((saved / "adapter_config.json").read_text())
    config["modules_to_save"] = ["embed_tokens"]
    (saved / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(saved / "adapter_model.safetensors")
    key = "model.embed_tokens.weight"
    tensors[f"base_model.model.{key}"] = load_file(awq / SINGLE_FILE)[key]
    save_file(tensors, saved / "adapter_model.safetensors", metadata={"format": "pt"})
    same = register_adapter(registry, saved, "saved", "tiny", cache=cache, unquantized_base=base)
    assert same.version.converted == version.converted
    assert "the saved model.embed_tokens equals the base's: it is left out" in same.warnings
    # Its files are for this base alone.
    folded = registry.fetch(version, cache)
    again = register_adapter(registry, folded, "again", "tiny", cache=cache).version
    assert again.base_digest == registered.version.digest
    with pytest.raises(RegistrationError, match="folded for another AWQ base"):
        register_adapter(registry, folded, "again", "plain", cache=cache, force=True)
    with pytest.raises(RegistrationError, match="leave out --unquantized-base"):
        register_adapter(registry, folded, "twice", "tiny", cache=cache, unquantized_base=base)
