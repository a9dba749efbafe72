"""config.json as Hugging Face's classes read it, and the refusals, each with key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UnsupportedModelError
from engine.model_config import ModelConfig, lora_sites, parse_model_config, read_model_config
from engine.quantization import Packed, Quantization
from lora.module_names import spellings
from lora.patterns import Pattern, compile_pattern
from lora.sites import targets_by_module
from tests.engine_helpers import make_base


def parse(generation: dict[str, object] | None = None, **changes: Any) -> ModelConfig:
    raw: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "eos_token_id": 2,
    } | changes
    return parse_model_config(raw, generation or {})


def test_defaults_are_those_of_hugging_face() -> None:
    config = parse(num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads, config.max_len) == (8, 8, 256)
    assert not any((config.ties_embeddings, config.has_qkv_bias, config.has_mlp_bias))
    assert config.ropes[0].theta == 5000.0
    assert parse(rope_theta=None).ropes[0].theta == 10000.0
    qwen = parse(architectures=["Qwen3ForCausalLM"])
    assert (qwen.head_dim, qwen.family.qk_norm) == (128, "head")
    assert parse(architectures=["Qwen2ForCausalLM"]).has_qkv_bias
    assert not parse(architectures=["Qwen2ForCausalLM"]).has_o_bias


def test_old_and_new_forms_of_rope_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old = parse(rope_theta=7.0, rope_scaling={"rope_type": "llama3", **scaling})
    new = parse(
        rope_theta=None,
        rope_parameters={"rope_type": "llama3", "rope_theta": 7.0, **scaling},
    )
    assert old == new
    assert old.ropes[0].kind == "llama3"
    assert parse(rope_scaling={"type": "linear", "factor": 2}).ropes[0].factor == 2.0


def test_yarn_extends_the_context_that_the_file_names() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse(rope_scaling=rope).max_len == 1024


def test_a_window_applies_where_hugging_face_applies_it() -> None:
    qwen: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    assert parse(sliding_window=32).sliding_windows == (None,) * 4
    assert parse(**qwen).sliding_windows == (None,) * 4
    used = parse(**qwen, use_sliding_window=True, max_window_layers=3)
    assert used.sliding_windows == (None, None, None, 32)
    types = ["sliding_attention", "full_attention"] * 2
    listed = parse(**qwen, use_sliding_window=True, layer_types=types)
    assert listed.sliding_windows == (32, None, 32, None)
    mistral = ["MistralForCausalLM"]
    default = parse(architectures=mistral, max_position_embeddings=8192)
    assert default.sliding_windows == (4096,) * 4
    assert parse(architectures=mistral, sliding_window=None).sliding_windows == (None,) * 4


def test_generation_config_knows_the_end_of_sequence_better() -> None:
    assert parse().eos_token_ids == (2,)
    assert parse({"eos_token_id": [7, 2, 7]}).eos_token_ids == (7, 2)
    assert parse({"eos_token_id": None}).eos_token_ids == (2,)
    assert parse(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r'architectures is \["GPT2LMHeadModel"\]'),
        ({"architectures": None}, "architectures is null"),
        ({"auto_map": {"AutoModel": "x.Y"}}, r'auto_map is .*"x.Y".*code of its own'),
        ({"quantization_config": {"quant_method": "quark"}}, 'config: quant_method is "quark"'),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"hidden_size": 65}, "hidden_size is 65: is not a multiple of 8"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: does not divide 8"),
        ({"head_dim": 7}, "head_dim is 7: is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no"'),
        ({"eos_token_id": 100}, "eos_token_id is 100: ids are 0 to 99"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.short_factor is null: 4 numbers"),
        ({"rope_scaling": {"type": "mrope"}}, 'rope_scaling.rope_type is "mrope"'),
        ({"rope_scaling": {"type": "linear"}}, "factor is null"),
        ({"rope_parameters": {"full_attention": {}}}, "by layer type"),
    ],
)
def test_what_is_not_computed_is_refused_with_key_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse(**changes)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        read_model_config(tmp_path)
    for text in ("{", "[1]", "[" * 100000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match=r"config\.json"):
            read_model_config(tmp_path)


def test_what_hugging_face_saves_is_read(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base", "qwen3", tie_word_embeddings=True)
    config = read_model_config(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    assert config.family.qk_norm == "head"
    assert config.ties_embeddings
    assert config.eos_token_ids == (2,)


def test_every_linear_layer_the_head_and_the_embedding_are_sites() -> None:
    sites = lora_sites(parse())
    targets = targets_by_module(sites)
    assert len(targets) == 4 * 7 + 2
    assert targets["model.layers.3.self_attn.v_proj"].out_features == 16
    assert targets["model.layers.0.mlp.up_proj"].out_features == 96
    assert targets["lm_head"].out_features == 100
    assert targets["model.embed_tokens"].site.kind == "embedding"


def test_a_target_is_compiled_once_for_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large base has a thousand modules, each tried in three forms of its name."""
    compiled: list[str] = []

    def counted(text: str, *given: Any) -> Pattern:
        compiled.append(text)
        return compile_pattern(text, *given)

    monkeypatch.setattr("engine.quantization.compile_pattern", counted)
    named, others = Packed(4, 128), Packed(8, 128)
    targets = (r"re:.*once\.[02]$", named), ("Linear", others)
    found = Quantization("", "", targets)
    assert [found.scheme_of(spellings(f"model.once.{i}")) for i in range(3)] == [
        named,
        others,
        named,
    ]
    assert len(compiled) == 1


def test_targets_in_the_names_of_a_larger_model_are_of_no_layer_of_a_model_of_text() -> None:
    """The library finds no module for them, either."""
    weights = {"num_bits": 4, "group_size": 128, "strategy": "group"}
    named = {"targets": ["re:.*language_model.*"], "weights": weights | {"num_bits": 8}}
    groups = {"a": {"targets": ["Linear"], "weights": weights}, "b": named}
    kind = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    found = parse(quantization_config=kind | {"config_groups": groups})
    assert found.scheme_of("model.layers.0.mlp.down_proj") == Packed(4, 128)
