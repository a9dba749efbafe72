"""Every family against Hugging Face and PEFT in float32: each logit, in whole and in chunks, with
adapters on every site."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, get_peft_model
from safetensors.torch import load_file, save_file

from engine.checks.validation import check_adapter, check_base
from engine.errors import UnsupportedModelError
from engine.model_config import lora_sites, read_model_config
from engine.parallel.shards import Shard
from engine.types import Request, SamplingParams
from engine.weight_files import SINGLE_FILE
from engine.weights import WeightBuilder
from lora.adapter import WEIGHTS_FILE, match_tensors, read_adapter
from lora.errors import AdapterError
from lora.low_rank import ConversionLimits
from lora.lycoris import convert_to_lora
from lora.module_names import canonical
from lora.page_image import PageLayout
from tests.engine_agreement import make_engine, run_all
from tests.engine_helpers import BLOCK_SIZE, VOCAB, make_runner, random_prompt
from tests.family_bases import (
    CPU,
    LINEARS,
    VARIANTS,
    VOCABULARY,
    Decoder,
    expected_logits,
    load_family,
    make_family_adapter,
    make_family_base,
)
from tests.quantized_bases import Quantized, check_equal, write_quantized
from tests.test_engine_compressed_tensors import SCHEMES, compress, config_of

WITH_IMAGES = [name for name, variant in VARIANTS.items() if variant.vision is not None]
OF_TEXT = "gemma 3"


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_every_logit_is_that_of_hugging_face(variant: str, tmp_path: Path) -> None:
    made = VARIANTS[variant]
    base = make_family_base(tmp_path / "base", made)
    targets: tuple[str, ...] | str = (*made.linears, *VOCABULARY)
    if made.vision is not None:
        targets = rf".*language_model.*({'|'.join((*made.linears, 'embed_tokens'))})|lm_head"
    adapter = make_family_adapter(tmp_path / "adapter", base, targets)
    decoder = Decoder(base, [adapter])
    prompt, other = random_prompt(45, seed=3), random_prompt(17, seed=4)
    plain, adapted = (expected_logits(base, one, prompt) for one in (None, adapter))
    assert (plain - adapted).abs().max() > 0.1
    beside = expected_logits(base, adapter, other)
    for chunk in (1000, 7):
        found = decoder.logits([(prompt, None), (other, "adapter"), (prompt, "adapter")], chunk)
        assert_equal(found[0], plain)
        assert_equal(found[1], beside)
        assert_equal(found[2], adapted)


def test_dora_has_the_logits_of_peft(variant: str, tmp_path: Path) -> None:
    """Gains of fused modules are cut like B, and norms after a block see the scaled output."""
    made = VARIANTS[variant]
    base = make_family_base(tmp_path / "base", made)
    names = "|".join(made.linears)
    targets = rf".*language_model.*({names})" if made.vision is not None else made.linears
    adapter = make_family_adapter(tmp_path / "adapter", base, targets, use_dora=True)
    prompt = random_prompt(30, seed=5)
    plain, adapted = (expected_logits(base, one, prompt) for one in (None, adapter))
    assert (plain - adapted).abs().max() > 0.1
    found = Decoder(base, [adapter]).logits([(prompt, None), (prompt, "adapter")], 11)
    assert_equal(found[0], plain)
    assert_equal(found[1], adapted)


def test_a_repeated_prompt_is_found_in_the_cache_and_goes_on_alike(
    variant: str, tmp_path: Path
) -> None:
    made = VARIANTS[variant]
    base = make_family_base(tmp_path / "base", made)
    adapter = make_family_adapter(tmp_path / "adapter", base, rf".*layers.*({made.linears[0]})")
    runner = make_runner(base)
    runner.load_adapter("adapter", adapter)
    engine = make_engine(runner, block_size=BLOCK_SIZE, max_num_batched_tokens=16)
    prompt, params = random_prompt(33, seed=5), SamplingParams(4, temperature=0.0, logprobs=3)
    for owner in (None, "adapter"):
        replies = [
            run_all(engine, [Request(f"{owner}-{i}", tuple(prompt), params, owner)])
            for i in range(2)
        ]
        first, second = (next(iter(reply.values())) for reply in replies)
        assert (first.error, first.num_cached, second.num_cached) == (None, 0, 32)
        assert first.tokens == second.tokens
        ids, found = [*prompt, *first.tokens], torch.tensor([r.logprob for r in second.logprobs])
        scores = expected_logits(base, owner and adapter, ids).log_softmax(-1)
        places = torch.arange(len(prompt) - 1, len(ids) - 1)
        assert_equal(found, scores[places, torch.tensor(first.tokens)])


# -- modules of a text part ------------------------------------------------------------------------


def rename(path: Path, to: Callable[[str], str]) -> None:
    tensors = {to(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def old_form(name: str) -> str:
    new = name.replace("model.language_model.", "language_model.model.")
    return new.replace("base_model.model.lm_head", "base_model.model.language_model.lm_head")


def new_form(name: str) -> str:
    new = name.replace("language_model.model.", "model.language_model.")
    return new.replace("language_model.lm_head", "lm_head")


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_modules_that_images_reach_are_left_unread_in_base_and_adapter(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT finds q_proj and others in the part for images, too."""
    base = make_family_base(tmp_path / "base", VARIANTS[name])
    adapter = make_family_adapter(tmp_path / "adapter", base, LINEARS)
    assert any("vision_tower" in key for key in load_file(adapter / WEIGHTS_FILE))
    prompt = random_prompt(20, seed=1)
    expected = expected_logits(base, adapter, prompt)
    with caplog.at_level(logging.INFO):
        (found,) = Decoder(base, [adapter]).logits([(prompt, "adapter")])
    assert_equal(found, expected)
    notes = [one for one in caplog.messages if "the part for images are left unread" in one]
    assert len(notes) == 2
    match = match_tensors(adapter, lora_sites(read_model_config(base)))
    assert (match.num_matched, match.unmatched) == (2 * 3 * len(LINEARS), ())
    assert "of the model for images are not read" in check_adapter(adapter, base).warnings[0]


def test_an_adapter_of_all_linear_modules_fits_the_text_part(tmp_path: Path) -> None:
    """The projector between the parts is adapted, too."""
    base = make_family_base(tmp_path / "base", VARIANTS["mistral 3"])
    adapter = make_family_adapter(tmp_path / "adapter", base, "all-linear")
    assert any("multi_modal_projector" in key for key in load_file(adapter / WEIGHTS_FILE))
    prompt = random_prompt(20, seed=1)
    (found,) = Decoder(base, [adapter]).logits([(prompt, "adapter")])
    assert_equal(found, expected_logits(base, adapter, prompt))


def test_a_loha_adapter_of_a_text_part_becomes_lora(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["mistral 3"])
    torch.manual_seed(0)
    scales = {"model.language_model.layers.1.self_attn.q_proj": 9.0}
    config = LoHaConfig(r=2, alpha=4, target_modules=["q_proj"], alpha_pattern=scales)
    model = get_peft_model(load_family(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "hada_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(str(tmp_path / "loha"))
    assert any("vision_tower" in key for key in load_file(tmp_path / "loha" / WEIGHTS_FILE))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    sites = lora_sites(read_model_config(base))
    limits = ConversionLimits(max_error=0.0, max_rank=64)
    assert convert_to_lora(tmp_path / "loha", adapter, sites, limits).kind == "LoHa"
    prompt = random_prompt(20, seed=1)
    expected = expected_logits(base, tmp_path / "loha", prompt)
    assert (expected - expected_logits(base, None, prompt)).abs().max() > 0.1
    (found,) = Decoder(base, [adapter]).logits([(prompt, "adapter")])
    assert_equal(found, expected)


@pytest.mark.parametrize("form", [old_form, new_form])
def test_bases_and_adapters_have_their_modules_in_either_form(
    form: Callable[[str], str], tmp_path: Path
) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["mistral 3"])
    targets = r".*language_model.*(q_proj|down_proj)|.*lm_head"
    pattern = {r".*language_model.*layers\.1\..*q_proj": 5}
    adapter = make_family_adapter(tmp_path / "adapter", base, targets, rank_pattern=pattern)
    prompt = random_prompt(20, seed=1)
    expected = expected_logits(base, adapter, prompt)
    rename(base / SINGLE_FILE, form)
    rename(adapter / WEIGHTS_FILE, form)
    (found,) = Decoder(base, [adapter]).logits([(prompt, "adapter")])
    assert_equal(found, expected)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_text_part_fits_the_text_model(prefix: str, tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS[OF_TEXT])
    adapter = make_family_adapter(tmp_path / "adapter", base, ("q_proj", "up_proj"))
    sites = lora_sites(read_model_config(base))
    expected = read_adapter(adapter, "", sites, 64)
    rename(adapter / WEIGHTS_FILE, lambda name: name.replace("model.layers.", f"{prefix}layers."))
    found = read_adapter(adapter, "", sites, 64)
    assert found.modules.keys() == expected.modules.keys()
    for module, weights in found.modules.items():
        assert torch.equal(weights.b, expected.modules[module].b)


def test_an_adapter_with_names_in_two_forms_is_refused(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS[OF_TEXT])
    adapter = make_family_adapter(tmp_path / "adapter", base, ("q_proj",))
    first, other = "model.layers.0", "language_model.model.layers.0"
    rename(adapter / WEIGHTS_FILE, lambda name: name.replace(first, other))
    with pytest.raises(AdapterError, match="names modules in two forms"):
        read_adapter(adapter, "", lora_sites(read_model_config(base)), 64)


def test_an_adapter_of_images_alone_is_refused(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["mistral 3"])
    adapter = make_family_adapter(tmp_path / "adapter", base, ".*vision_tower.*q_proj")
    with pytest.raises(AdapterError, match="holds no LoRA tensors"):
        read_adapter(adapter, "", lora_sites(read_model_config(base)), 64)


# -- modules that are fused in the checkpoint ------------------------------------------------------


def test_the_slices_of_a_fused_module_share_one_a(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["phi 3"])
    config = read_model_config(base)
    adapter = make_family_adapter(tmp_path / "adapter", base, ("qkv_proj",), rank=20)
    read = read_adapter(adapter, "adapter", lora_sites(config), 64)
    layout = PageLayout(lora_sites(config), torch.float32)
    packed = layout.pack(read, lambda size: torch.zeros(size, dtype=torch.uint8))
    rows = 20 * (config.hidden_size + config.q_size + 2 * config.kv_size)
    tensors = 4 * config.num_layers * rows
    assert tensors <= packed.image.numel() < tensors + 256 * packed.num_pages * 4 * 3
    first = [strip.site for strip in layout.strips].index("model.layers.1.qkv")
    for page in packed.entries:
        assert len(set(page[first : first + 3].tolist())) == 1
        assert len(set(page[first : first + 6].tolist())) == 4


def test_an_adapter_of_unfused_modules_does_not_fit_a_fused_base(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["phi 3"])
    other = make_family_base(tmp_path / "other", VARIANTS["olmo 2"])
    adapter = make_family_adapter(tmp_path / "adapter", other, ("q_proj",))
    with pytest.raises(AdapterError, match=r"no module .*q_proj"):
        read_adapter(adapter, "", lora_sites(read_model_config(base)), 64)


# -- lengths and types -----------------------------------------------------------------------------


def test_longrope_has_the_factors_of_the_engines_length(tmp_path: Path) -> None:
    """Up to the original length, as Hugging Face at every length; with a larger limit, as Hugging
    Face for prompts beyond it."""
    variant = VARIANTS["phi 4"]
    changes = variant.changes | {"original_max_position_embeddings": 24}
    base = make_family_base(tmp_path / "base", replace(variant, changes=changes))
    short, long = random_prompt(24, seed=1), random_prompt(60, seed=1)
    config = read_model_config(base)
    assert (config.usual_len, config.max_len) == (24, 128)
    assert make_runner(base).max_model_len == 24
    assert make_runner(base, max_model_len=100).max_model_len == 100
    (found,) = Decoder(base).logits([(short, None)])
    assert_equal(found, expected_logits(base, None, short))
    decoder = Decoder(base, max_len=100)
    (found,) = decoder.logits([(long, None)])
    assert_equal(found, expected_logits(base, None, long))
    (found,) = decoder.logits([(short, None)])
    assert (found - expected_logits(base, None, short)).abs().max() > 0.01


@pytest.mark.parametrize("name", ["gemma 3", "olmo 2", "granite", "phi 4"])
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS[name])
    params = SamplingParams(1, temperature=0.0, logprobs=20)
    found = []
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(make_runner(base, dtype=dtype), block_size=BLOCK_SIZE)
        request = Request("r", tuple(random_prompt(30, seed=1)), params)
        (reply,) = run_all(engine, [request]).values()
        found.append(dict(reply.logprobs[0].top))
    wide, narrow = found
    best = max(wide, key=lambda token: wide[token])
    assert narrow[best] == pytest.approx(wide[best], abs=0.15)


def test_norms_are_kept_in_float32_where_they_multiply_in_it(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["gemma 2"])
    stored = load_file(base / SINGLE_FILE)["model.layers.1.input_layernorm.weight"]
    weights = WeightBuilder(Shard(read_model_config(base)), torch.bfloat16, CPU).load(base)
    layer = weights.layers[1]
    assert layer.input_norm is not None
    assert layer.input_norm.dtype == weights.norm.dtype == torch.float32
    assert torch.equal(layer.input_norm, stored + 1)
    assert layer.down.dtype == torch.bfloat16


# -- checkpoints -----------------------------------------------------------------------------------


def test_registration_says_that_only_text_is_served(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["gemma 3 with images"])
    (base / "tokenizer.json").write_text("{}")
    report = check_base(base)
    assert report.architecture == "Gemma3ForConditionalGeneration"
    assert report.warnings[-1].startswith("only text is served")
    text = load_file(base / SINGLE_FILE)
    assert report.num_parameters == sum(
        tensor.numel() for name, tensor in text.items() if name.startswith("language_model.")
    )


def test_a_head_in_the_file_is_read_though_the_class_ties_by_default(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["mistral 3"])
    raw = json.loads((base / "config.json").read_text())
    raw["tie_word_embeddings"] = True
    (base / "config.json").write_text(json.dumps(raw))
    config = read_model_config(base)
    assert not config.ties_embeddings
    weights = WeightBuilder(Shard(config), torch.float32, CPU).load(base)
    assert torch.equal(weights.head, load_file(base / SINGLE_FILE)["language_model.lm_head.weight"])


@pytest.mark.parametrize("name", ["mistral 3", "gemma 3 with images"])
def test_a_text_part_without_a_head_is_tied_unless_the_file_says_no(
    name: str, tmp_path: Path
) -> None:
    """The class of the whole model ties by default, whatever text_config has."""
    made = VARIANTS[name]
    tied = replace(made, outer=made.outer | {"tie_word_embeddings": True})
    base = make_family_base(tmp_path / "base", tied)
    assert not any("lm_head" in key for key in load_file(base / SINGLE_FILE))
    raw = json.loads((base / "config.json").read_text())
    raw.pop("tie_word_embeddings", None)
    raw["text_config"]["tie_word_embeddings"] = False
    (base / "config.json").write_text(json.dumps(raw))
    prompt = random_prompt(20, seed=1)
    (found,) = Decoder(base).logits([(prompt, None)])
    assert_equal(found, expected_logits(base, None, prompt))
    config = read_model_config(base)
    (base / SINGLE_FILE).rename(tmp_path / SINGLE_FILE)
    assert read_model_config(base) == config  # as for weights that are drawn
    (tmp_path / SINGLE_FILE).rename(base / SINGLE_FILE)
    (base / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is missing"):
        Decoder(base)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("is_exact", [True, False])
def test_targets_may_name_the_layers_of_a_model_of_text_and_images(
    tmp_path: Path, prefix: str, is_exact: bool
) -> None:
    """Some of the layers have 8 bits instead of 4, by a target in either form of the names."""
    by_class, by_name = SCHEMES["int4 in groups"], SCHEMES["int8 packed in groups"]
    names = [f"{prefix}layers.{i}.mlp.{part}_proj" for i in (0, 2) for part in ("gate", "up")]
    targets = names if is_exact else [rf"re:{prefix}layers\.[02]\.mlp\.(gate|up)_proj$"]
    groups = {
        "group_0": {"targets": ["Linear"], "weights": by_class[1]},
        "group_1": {"targets": targets, "weights": by_name[1]},
    }

    def quantize(module: str, weight: torch.Tensor) -> Quantized | None:
        if "vision" in module or "projector" in module:
            return None
        is_named = prefix + canonical(module).removeprefix("model.") in names
        return compress(*(by_name if is_named else by_class), weight)

    base = make_family_base(tmp_path / "base", VARIANTS["gemma 3 with images"])
    config = config_of("pack-quantized", {}) | {"config_groups": groups}
    folder, weights = write_quantized(base, tmp_path / "quantized", config, quantize)
    check_equal(folder, {canonical(name): weight for name, weight in weights.items()})


def test_a_tensor_that_is_of_no_known_part_is_refused(tmp_path: Path) -> None:
    base = make_family_base(tmp_path / "base", VARIANTS["mistral 3"])
    tensors = load_file(base / SINGLE_FILE) | {"audio_tower.x.weight": torch.zeros(VOCAB)}
    save_file(tensors, base / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"holds audio_tower\.x\.weight, which is unknown"
    ):
        WeightBuilder(Shard(read_model_config(base)), torch.float32, CPU).load(base)
