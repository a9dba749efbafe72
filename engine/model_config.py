"""A base's config.json read into one frozen value, for the families that the decoder computes.

Our own parser: no remote code, no guesses. A key that would change the arithmetic and is not
supported is refused, with its value. Defaults and quirks are those of Hugging Face's config
classes. Free of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UnsupportedModelError
from engine.json_values import (
    flag,
    optional_number,
    positive_int,
    positive_number,
    read_json,
    refuse,
)
from engine.rope import RopeConfig
from lora.sites import Site, Slice


@dataclass(frozen=True, slots=True)
class _Family:
    """The defaults of Hugging Face's class of an architecture for keys that the file omits."""

    default_num_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden size over heads
    always_biased_qkv: bool = False
    reads_attention_bias: bool = False  # on q, k, v and o
    reads_mlp_bias: bool = False
    has_qk_norm: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(default_num_kv_heads=8),
    "Qwen2ForCausalLM": _Family(default_num_kv_heads=32, always_biased_qkv=True),
    "Qwen3ForCausalLM": _Family(
        default_num_kv_heads=32, default_head_dim=128, reads_attention_bias=True, has_qk_norm=True
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_len: int  # positions the base was made for
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]  # one per layer
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    ties_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(folder: Path) -> ModelConfig:
    """Raises UnsupportedModelError with the reason."""
    raw = read_json(folder / "config.json")
    if raw is None:
        raise UnsupportedModelError("the folder has no config.json")
    generation = read_json(folder / "generation_config.json")
    return parse_model_config(raw, generation or {})


def parse_model_config(raw: Mapping[str, object], generation: Mapping[str, object]) -> ModelConfig:
    architecture, family = _family(raw)
    num_heads = positive_int(raw, "num_attention_heads")
    hidden_size = positive_int(raw, "hidden_size")
    num_kv_heads = positive_int(
        raw, "num_key_value_heads", family.default_num_kv_heads or num_heads
    )
    if num_heads % num_kv_heads:
        refuse("num_key_value_heads", num_kv_heads, f"does not divide {num_heads} heads")
    if raw.get("head_dim") is None and not family.default_head_dim and hidden_size % num_heads:
        refuse("hidden_size", hidden_size, f"is not a multiple of {num_heads} heads")
    head_dim = positive_int(raw, "head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        refuse("head_dim", head_dim, "is odd, rotary embedding turns pairs")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        refuse("hidden_act", activation, "only silu is computed")
    has_bias = family.reads_attention_bias and flag(raw, "attention_bias")
    num_layers = positive_int(raw, "num_hidden_layers")
    max_position = positive_int(raw, "max_position_embeddings")
    rope = parse_rope(raw, max_position)
    vocab_size = positive_int(raw, "vocab_size")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=positive_int(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive_number(raw, "rms_norm_eps", 1e-6),
        max_len=max(max_position, rope.extended_len),
        rope=rope,
        sliding_windows=_sliding_windows(raw, architecture, num_layers),
        has_qkv_bias=has_bias or family.always_biased_qkv,
        has_o_bias=has_bias,
        has_mlp_bias=family.reads_mlp_bias and flag(raw, "mlp_bias"),
        has_qk_norm=family.has_qk_norm,
        ties_embeddings=flag(raw, "tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(raw, generation, vocab_size),
    )


def lora_sites(config: ModelConfig) -> tuple[Site, ...]:
    sites: list[Site] = []
    hidden, inner = config.hidden_size, config.intermediate_size
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = (
            Slice(f"{attention}.q_proj", config.q_size),
            Slice(f"{attention}.k_proj", config.kv_size),
            Slice(f"{attention}.v_proj", config.kv_size),
        )
        gate_up = (Slice(f"{mlp}.gate_proj", inner), Slice(f"{mlp}.up_proj", inner))
        sites += [
            Site(f"{layer}.qkv", hidden, qkv),
            Site(f"{layer}.o", config.q_size, (Slice(f"{attention}.o_proj", hidden),)),
            Site(f"{layer}.gate_up", hidden, gate_up),
            Site(f"{layer}.down", inner, (Slice(f"{mlp}.down_proj", hidden),)),
        ]
    head = Site("lm_head", hidden, (Slice("lm_head", config.vocab_size),))
    embedding = Slice("model.embed_tokens", hidden)
    return (*sites, head, Site("embed_tokens", config.vocab_size, (embedding,), "embedding"))


def _family(raw: Mapping[str, object]) -> tuple[str, _Family]:
    for key, reason in (
        ("auto_map", "the model wants code of its own to be run, which is never done"),
        ("quantization_config", "quantized weights are not supported"),
    ):
        if raw.get(key):
            refuse(key, raw[key], reason)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _FAMILIES:
        refuse("architectures", names, f"supported are {', '.join(_FAMILIES)}")
    return names[0], _FAMILIES[names[0]]


def _sliding_windows(
    raw: Mapping[str, object], architecture: str, num_layers: int
) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    is_mistral = architecture == "MistralForCausalLM"
    # An absent key is 4096 there, null is none: Hugging Face's class default.
    if raw.get("sliding_window", 4096) is None or not (
        is_mistral or flag(raw, "use_sliding_window")
    ):
        return (None,) * num_layers
    window = positive_int(raw, "sliding_window", 4096)
    if is_mistral:
        if raw.get("layer_types") is not None:
            refuse("layer_types", raw["layer_types"], "not known for Mistral")
        return (window,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        first = positive_int(raw, "max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        refuse("layer_types", types, f"{num_layers} of {', '.join(known)} are needed")
    return tuple(known[kind] for kind in types)


def _eos_token_ids(
    raw: Mapping[str, object], generation: Mapping[str, object], vocab_size: int
) -> tuple[int, ...]:
    """Returns the ids of generation_config.json if it has them: chat models end a turn with another
    id than a text."""
    for source in (generation, raw):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                refuse("eos_token_id", value, f"ids are 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))
    return ()


def parse_rope(raw: Mapping[str, object], max_position: int) -> RopeConfig:
    """Accepts both forms: `rope_theta` with `rope_scaling`, and transformers 5's
    `rope_parameters`."""
    key = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    values = raw.get(key) or {}
    if not isinstance(values, dict):
        refuse(key, values, "an object is needed")
    if any(isinstance(value, dict) for value in values.values()):
        refuse(key, values, "parameters by layer type are not supported")
    for source in (raw, values):
        if source.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
            refuse("partial_rotary_factor", source["partial_rotary_factor"], "only 1 is supported")
    theta = positive_number({"rope_theta": raw.get("rope_theta"), **values}, "rope_theta", 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind in ("longrope", "su"):
        refuse(
            f"{key}.rope_type",
            kind,
            "it swaps its frequencies by the length of the sequence, which invalidates cached keys",
        )
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "dynamic":
        # Below max_position_embeddings its frequencies are the default's; above they change with
        # every token and would invalidate cached keys, so longer sequences are not offered.
        return RopeConfig("default", theta)
    original = positive_int(
        raw if raw.get("original_max_position_embeddings") is not None else values,
        "original_max_position_embeddings",
        max_position,
    )
    if kind == "linear":
        return RopeConfig("linear", theta, factor=positive_number(values, "factor"))
    if kind == "llama3":
        low = positive_number(values, "low_freq_factor")
        high = positive_number(values, "high_freq_factor")
        if high <= low:
            refuse("high_freq_factor", high, f"must be above low_freq_factor {low}")
        factor = positive_number(values, "factor")
        return RopeConfig(
            "llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high
        )
    if kind != "yarn":
        refuse(f"{key}.rope_type", kind, "known are default, linear, dynamic, llama3, yarn")
    return RopeConfig(
        "yarn",
        theta,
        positive_number(values, "factor", max_position / original),
        original,
        beta_fast=positive_number(values, "beta_fast", 32.0),
        beta_slow=positive_number(values, "beta_slow", 1.0),
        truncate=flag(values, "truncate", default=True),
        attention_factor=optional_number(values, "attention_factor"),
        mscale=optional_number(values, "mscale"),
        mscale_all_dim=optional_number(values, "mscale_all_dim"),
    )
