"""The comparison of an adapter with PEFT: every kind is within the bound, and faults are not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoHaConfig, LoraConfig
from safetensors.torch import load_file, save_file

import engine.tools
from engine.checks import parity
from engine.checks.effect_report import Parity
from engine.checks.parity import check_parity, measure_parity
from engine.checks.validation import ConversionLimits, convert_adapter
from engine.errors import EngineMemoryError, ParityError, UnsupportedModelError
from engine.weight_files import SINGLE_FILE, StoredTensor
from tests.engine_helpers import make_adapter, make_base, random_prompt
from tests.family_bases import VARIANTS, make_family_adapter, make_family_base
from tests.peft_kinds import LINEARS, save_peft
from tests.quantized_bases import set_quantization
from tests.test_engine_alora import make_alora

PROMPTS = (random_prompt(9, seed=1), random_prompt(300, seed=2))  # the second is cut
INVOCATION = (91, 17, 60)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def lora(folder: Path, base: Path) -> Path:
    return make_adapter(folder, base, 5, (*LINEARS, "lm_head", "embed_tokens"))


def dora(folder: Path, base: Path) -> Path:
    return save_peft(folder, base, LoraConfig(r=4, use_dora=True, target_modules=list(LINEARS)))


def tokens(folder: Path, base: Path) -> Path:
    rows = [3, 50, 91, 130]
    return save_peft(
        folder, base, LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=rows)
    )


def alora(folder: Path, base: Path) -> Path:
    return make_alora(folder, base, INVOCATION, seed=3)


def compare(folder: Path, base: Path, original: Path | None = None, bound: float = 1e-3) -> Parity:
    check_parity(folder, base, len(PROMPTS))
    return measure_parity(folder, original or folder, base, PROMPTS, bound)


@pytest.mark.parametrize("make", [lora, dora, tokens, alora])
def test_engine_computes_what_peft_does(
    make: Callable[[Path, Path], Path], base: Path, tmp_path: Path
) -> None:
    found = compare(make(tmp_path / "adapter", base), base)
    assert found.is_within
    assert found.max_difference < 3e-4
    assert found.num_other_tokens == 0
    more = {tokens: (1, 9 + 4), alora: (0, len(INVOCATION))}.get(make, (0, 0))
    assert found.num_prompts == 2 + more[0]
    assert found.num_positions == 9 + 128 + more[1]  # 128: the base's longest sequence
    assert f"all {found.num_positions} greedy tokens equal (transformers " in found.words


@pytest.mark.parametrize("family", ["mistral 3", "mistral 3 of ministral 3", "gemma 3 with images"])
def test_text_of_a_model_of_text_and_images_is_compared(family: str, tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS[family])
    found = compare(make_family_adapter(tmp_path / "adapter", base, LINEARS), base)
    assert found.max_difference < 3e-4
    assert found.num_other_tokens == 0


def test_converted_adapter_is_compared_with_its_original(base: Path, tmp_path: Path) -> None:
    folder = save_peft(
        tmp_path / "loha", base, LoHaConfig(r=3, alpha=6, target_modules=list(LINEARS)), std=0.3
    )
    close, rough = tmp_path / "close", tmp_path / "rough"
    for out, error in ((close, 1e-4), (rough, 0.3)):
        out.mkdir()
        assert convert_adapter(folder, base, out, ConversionLimits(error)) is not None
    assert compare(close, base, folder).is_within
    found = compare(rough, base, folder)
    assert not found.is_within
    assert found.num_other_tokens > 0
    assert "greedy tokens differ" in found.words


@pytest.mark.parametrize("kind", [tokens, alora])
def test_change_at_few_tokens_is_met_by_the_prompts(
    kind: Callable[[Path, Path], Path], base: Path, tmp_path: Path
) -> None:
    """A difference that only these tokens show is found: the other side has other weights."""
    folder = kind(tmp_path / "adapter", base)
    other = kind(tmp_path / "other", base)
    path = other / "adapter_model.safetensors"
    tensors = load_file(path)
    wanted = "trainable_tokens_delta" if kind is tokens else "lora_B"
    save_file({k: v * 1.5 if wanted in k else v for k, v in tensors.items()}, path)
    assert compare(folder, base, other).max_difference > 0.01


def test_bound_is_the_callers(base: Path, tmp_path: Path) -> None:
    folder = lora(tmp_path / "adapter", base)
    assert not compare(folder, base, bound=0.0).is_within


def test_base_that_memory_does_not_hold_is_refused_before_it_is_loaded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lora(tmp_path / "adapter", base)
    held = StoredTensor(base / SINGLE_FILE, "all", (8_030_261_248,), "BF16", 0)
    monkeypatch.setattr(parity, "stored_tensors", lambda _: iter([held]))
    monkeypatch.setattr(parity, "available_bytes", lambda: 16 * 1024**3)
    with pytest.raises(EngineMemoryError, match=r"needs 30\.\d GiB .*, 16\.0 are .* 8\.03 billion"):
        check_parity(folder, base, 6)


def test_quantized_base_is_refused_with_the_reason(base: Path, tmp_path: Path) -> None:
    """transformers rounds activations where the scheme says so, which the engine does not."""
    folder = lora(tmp_path / "adapter", base)
    args = {"num_bits": 8, "type": "int", "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    groups = {"a": {"targets": ["Linear"], "weights": args, "input_activations": activations}}
    quantized = shutil.copytree(base, tmp_path / "quantized")
    set_quantization(
        quantized,
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups},
    )
    with pytest.raises(ParityError, match=r"this one is compressed-tensors int-quantized, 8 bits"):
        check_parity(folder, quantized, 1)


def test_base_without_weights_here_is_refused(base: Path, tmp_path: Path) -> None:
    folder = lora(tmp_path / "adapter", base)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(UnsupportedModelError, match=r"neither model\.safetensors"):
        check_parity(folder, bare, 1)


def test_adapter_that_peft_cannot_read_is_an_error_with_its_words(
    base: Path, tmp_path: Path
) -> None:
    folder = lora(tmp_path / "adapter", base)
    check_parity(folder, base, 1)
    with pytest.raises(ParityError, match=r"cannot compute it \(transformers .*, peft .*\): "):
        measure_parity(folder, tmp_path / "nowhere", base, PROMPTS)


def test_package_that_peft_lacks_for_an_adapter_is_named(base: Path, tmp_path: Path) -> None:
    folder = lora(tmp_path / "adapter", base)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"megatron_config": {"a": 1}}))
    with pytest.raises(ParityError, match=r"cannot compute it .*No module named 'megatron'"):
        compare(folder, base)


def test_packages_that_are_missing_are_named(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lora(tmp_path / "adapter", base)
    check_parity(folder, base, 1)
    monkeypatch.delattr(engine.tools, "peft_reference")
    monkeypatch.delitem(sys.modules, "engine.tools.peft_reference")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ParityError, match=r"needs transformers and peft \(.*peft.*'loraplex\[par"):
        check_parity(folder, base, 1)
