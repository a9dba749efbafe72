"""The files of well-known models, which leave out much, read as Hugging Face's classes read them;
and the refusals of each family."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import transformers

from engine.errors import UnsupportedModelError
from engine.families import FAMILIES, TEXT_PARTS
from engine.model_config import ModelConfig, lora_sites, parse_model_config

GRANITE_3_2B = {
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
MISTRAL_SMALL_3_1 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "text_config": {
        "hidden_size": 5120,
        "head_dim": 128,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}
MINISTRAL_3_8B = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {
        "model_type": "ministral3",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}
PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + i / 4 for i in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "vocab_size": 100352,
}
OLMO_3_7B = {
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "vocab_size": 100278,
}
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "granite 3.3 2b": ("GraniteConfig", GRANITE_3_2B),
    "smollm3 3b": ("SmolLM3Config", SMOLLM3_3B),
    "mistral small 3.1": ("MistralConfig", MISTRAL_SMALL_3_1),
    "ministral 3 8b": ("Ministral3Config", MINISTRAL_3_8B),
    "phi 4 mini": ("Phi3Config", PHI_4_MINI),
    "gemma 2 2b": ("Gemma2Config", GEMMA_2_2B),
    "gemma 3 4b": ("Gemma3TextConfig", GEMMA_3_4B),
    "gemma 3 1b": ("Gemma3TextConfig", GEMMA_3_1B),
    "olmo 2 7b": ("Olmo2Config", OLMO_2_7B),
    "olmo 3 7b": ("Olmo3Config", OLMO_3_7B),
}


def parse(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(raw | changes, {})


@pytest.mark.parametrize("name", REAL)
def test_a_known_model_is_read_as_hugging_face_reads_it(name: str) -> None:
    class_name, raw = REAL[name]
    config = parse(raw)
    text = {key: value for key, value in raw.get("text_config", raw).items() if key != "model_type"}
    theirs = getattr(transformers, class_name)(**deepcopy(text))  # the class adds to dicts
    assert (config.hidden_size, config.intermediate_size, config.num_layers, config.vocab_size) == (
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_hidden_layers,
        theirs.vocab_size,
    )
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (config.head_dim, config.num_kv_heads) == (head_dim, theirs.num_key_value_heads)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.ties_embeddings == theirs.tie_word_embeddings
    assert config.max_len == theirs.max_position_embeddings
    types = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    if window is not None and window >= theirs.max_position_embeddings:
        window = None  # it hides nothing
    if types is None:
        assert set(config.sliding_windows) == {window}
    else:
        expected = [window if one == "sliding_attention" else None for one in types]
        assert list(config.sliding_windows) == expected
    for i, rope in enumerate(config.ropes):
        values = theirs.rope_parameters
        values = values[types[i]] if types and types[i] in values else values
        if rope is None:
            assert not theirs.no_rope_layers[i]
        else:
            assert (rope.kind, rope.theta) == (values["rope_type"], values["rope_theta"])
            assert rope.factor == values.get("factor", rope.factor)


def test_numbers_of_known_models() -> None:
    """Checks what the classes above compute in their models, and not in their configurations."""
    granite, gemma, mini = parse(GRANITE_3_2B), parse(GEMMA_2_2B), parse(PHI_4_MINI)
    assert (granite.attention_scale, granite.residual_multiplier) == (0.015625, 0.22)
    assert (granite.embedding_multiplier, granite.logits_scaling) == (12.0, 8.0)
    assert (gemma.attention_scale, gemma.embedding_multiplier) == (1 / 16, 48.0)
    assert (gemma.attention_soft_cap, gemma.logits_soft_cap) == (50.0, 30.0)
    assert gemma.sliding_windows[:3] == (4096, None, 4096)
    gemma3 = parse(GEMMA_3_4B)
    assert (gemma3.eos_token_ids, gemma3.attention_soft_cap) == ((1, 106), None)
    local, last = gemma3.ropes[0], gemma3.ropes[5]
    assert local is not None
    assert last is not None
    assert (local.kind, local.theta, last.kind, last.factor) == ("default", 1e4, "linear", 8.0)
    rope = mini.ropes[0]
    assert rope is not None
    assert (rope.rotary_dim(128), rope.factor, mini.usual_len) == (96, 32.0, 4096)
    ministral = parse(MINISTRAL_3_8B).ropes[0]
    assert ministral is not None
    assert (ministral.query_beta, ministral.original_max_len) == (0.1, 16384)
    assert [rope is None for rope in parse(SMOLLM3_3B).ropes[:8]] == [False, False, False, True] * 2
    assert parse(OLMO_2_7B).family.qk_norm == "all"


def test_code_that_transformers_has_since_is_neither_run_nor_refused() -> None:
    auto_map = {"AutoModelForCausalLM": "microsoft/Phi-3.5--modeling_phi3.Phi3ForCausalLM"}
    assert parse(PHI_4_MINI, auto_map=auto_map) == parse(PHI_4_MINI, auto_map=None)
    with pytest.raises(UnsupportedModelError, match="code of its own"):
        parse(GEMMA_2_2B, auto_map=auto_map)


def test_a_window_as_long_as_the_longest_sequence_is_none() -> None:
    assert set(parse(PHI_4_MINI).sliding_windows) == {None}  # 262,144 of 131,072 positions
    assert set(parse(PHI_4_MINI, sliding_window=131_072).sliding_windows) == {None}
    assert set(parse(PHI_4_MINI, sliding_window=131_071).sliding_windows) == {131_071}
    # YaRN extends the length beyond max_position_embeddings.
    extended = parse(OLMO_3_7B, max_position_embeddings=8192, sliding_window=40_000)
    assert extended.sliding_windows[:4] == (40_000, 40_000, 40_000, None)


def test_every_family_has_sites_of_its_own_modules() -> None:
    names = {part.module for site in lora_sites(parse(PHI_4_MINI)) for part in site.slices}
    assert "model.layers.31.self_attn.qkv_proj" in names
    assert not any("q_proj" in name or "gate_proj" in name for name in names)
    sizes = {
        site.name: [part.out_features for part in site.slices]
        for site in lora_sites(parse(PHI_4_MINI))
    }
    assert sizes["model.layers.0.qkv"] == [3072, 1024, 1024]
    assert math.prod(sizes["model.layers.0.gate_up"]) == 8192**2


def test_a_text_part_takes_the_outer_end_of_sequence_and_tying() -> None:
    assert parse(MISTRAL_SMALL_3_1, eos_token_id=7, tie_word_embeddings=True).eos_token_ids == (7,)
    assert parse(MISTRAL_SMALL_3_1, tie_word_embeddings=True).ties_embeddings
    assert not parse(MISTRAL_SMALL_3_1).ties_embeddings
    untied = REAL["mistral small 3.1"][1]["text_config"] | {"eos_token_id": 2}
    assert parse(MISTRAL_SMALL_3_1, text_config=untied).eos_token_ids == (2,)


def test_null_rope_parameters_are_those_of_the_class() -> None:
    text = REAL["ministral 3 8b"][1]["text_config"]
    absent = {key: value for key, value in text.items() if key != "rope_parameters"}
    null = absent | {"rope_parameters": None}
    theirs: Any = transformers.Ministral3Config(**deepcopy(null)).rope_parameters
    for form in (absent, null):
        rope = parse(MINISTRAL_3_8B, text_config=form).ropes[0]
        assert rope == parse(MINISTRAL_3_8B, text_config=text).ropes[0]
        assert rope is not None
        assert (rope.kind, rope.query_beta) == ("yarn", theirs["llama_4_scaling_beta"])


def test_a_query_beta_of_zero_scales_nothing() -> None:
    text = REAL["ministral 3 8b"][1]["text_config"]
    ropes = text["rope_parameters"] | {"llama_4_scaling_beta": 0}
    rope = parse(MINISTRAL_3_8B, text_config=text | {"rope_parameters": ropes}).ropes[0]
    assert rope is not None
    assert (rope.kind, rope.query_beta) == ("yarn", 0.0)


@pytest.mark.parametrize("name", ["gemma 3 1b", "olmo 3 7b"])
def test_both_forms_of_positions_are_joined_by_type_of_layer(name: str) -> None:
    class_name, raw = REAL[name]
    scaling = {"rope_type": "linear", "factor": 8.0}
    sets = {
        "full_attention": {"rope_type": "default", "rope_theta": 7e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    changes = {"rope_scaling": scaling, "rope_parameters": sets, "layer_types": None}
    config = parse(raw, **deepcopy(changes))
    theirs = getattr(transformers, class_name)(**deepcopy(raw | changes))
    for kind, rope in zip(theirs.layer_types, config.ropes, strict=True):
        assert rope is not None
        values = theirs.rope_parameters[kind]
        assert (rope.kind, rope.theta) == (values["rope_type"], values["rope_theta"])
        assert rope.factor == values.get("factor", 1.0)


def test_parsing_changes_no_value_of_the_file() -> None:
    sets = {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}
    raw = REAL["gemma 3 1b"][1] | {"rope_parameters": sets, "rope_scaling": None}
    before = deepcopy(raw)
    parse(raw)
    assert raw == before


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (GRANITE_3_2B, {"residual_multiplier": 0}, "residual_multiplier is 0: a positive"),
        (GRANITE_3_2B, {"hidden_act": "gelu"}, 'hidden_act is "gelu": only silu'),
        (SMOLLM3_3B, {"no_rope_layers": [[1]] * 36}, "no_rope_layers is .*: 36 of 0 and 1"),
        (SMOLLM3_3B, {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]: 36 of 0 and 1"),
        (MISTRAL_SMALL_3_1, {"text_config": None}, "text_config is null"),
        (MISTRAL_SMALL_3_1, {"text_config": {"model_type": "qwen2"}}, 'model_type is "qwen2"'),
        (MISTRAL_SMALL_3_1, {"text_config": {"model_type": []}}, r"model_type is \[\]"),
        (MISTRAL_SMALL_3_1, {"quantization_config": {"x": 1}}, "quantization_config is"),
        (
            MINISTRAL_3_8B,
            {"text_config": {"model_type": "ministral3", "quantization_config": {"x": 1}}},
            "quantization_config is",
        ),
        (PHI_4_MINI, {"auto_map": {"AutoModel": "modeling_phi3.Phi3ForCausalLM"}}, "auto_map is"),
        (PHI_4_MINI, {"auto_map": {"AutoModelForCausalLM": "x.Mine"}}, "auto_map is .*of its own"),
        (PHI_4_MINI, {"auto_map": ["x"]}, "auto_map is .*of its own"),
        (PHI_4_MINI, {"partial_rotary_factor": 0.7421875}, "partial_rotary_factor is 0.74"),
        (
            PHI_4_MINI,
            {"partial_rotary_factor": 1e-9, "rope_scaling": None},
            "partial_rotary_factor",
        ),
        (PHI_4_MINI, {"original_max_position_embeddings": 1}, "original_max_.* is 1: a whole"),
        (PHI_4_MINI, {"partial_rotary_factor": 0.5}, "short_factor is .*: 32 numbers"),
        (GEMMA_2_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        (GEMMA_2_2B, {"hidden_activation": "gelu"}, 'hidden_activation is "gelu": only gelu_pyt'),
        (GEMMA_2_2B, {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
        (GEMMA_2_2B, {"layer_types": [[]] * 26}, "layer_types is .*: 26 of"),
        (GEMMA_2_2B, {"layer_types": ["full_attention"]}, "layer_types is .*: 26 of"),
        (GEMMA_3_1B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
        (GEMMA_3_1B, {"rope_parameters": {"chunked": {}}}, "chunked is no type of layer"),
        (OLMO_3_7B, {"rope_theta": 1}, "rope_theta is 1.0: YaRN divides"),
        (
            OLMO_3_7B,
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e29}},
            r"full_attention\.factor is 1e\+29: it makes 65536 positions more than 16777216",
        ),
        (OLMO_3_7B, {"rope_scaling": {"rope_type": "x"}}, 'full_attention.rope_type is "x"'),
    ],
)
def test_what_a_family_does_not_compute_is_refused_with_key_and_value(
    raw: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse(raw, **changes)


def test_a_refused_architecture_names_those_that_are_served() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse({"architectures": ["GPT2LMHeadModel"]})
    for name in (*FAMILIES, *TEXT_PARTS):
        assert name in str(caught.value)
