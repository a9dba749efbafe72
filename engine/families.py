"""The families of models that the decoder computes: for each, its differences from Llama.

A family is one entry of a table; no family has code of its own. `defaults` are those of Hugging
Face's config class for keys that config.json omits, where they differ from this parser's. Free of
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# The norms of a layer, by their place in the decoder, with Hugging Face's names.
PRE_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
BOTH_NORMS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
} | POST_NORMS

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # Hugging Face's names


@dataclass(frozen=True, slots=True)
class Family:
    defaults: Mapping[str, object] = field(default_factory=dict)
    # Keys that Hugging Face's class reads and the decoder does not, with their only accepted value.
    fixed: Mapping[str, object] = field(default_factory=dict)
    # The entries of auto_map in files from before transformers had the class: the same arithmetic.
    superseded_code: Mapping[str, str] = field(default_factory=dict)
    # Linear layers.
    always_biased_qkv: bool = False
    reads_attention_bias: bool = False  # on q, k, v and o
    reads_mlp_bias: bool = False
    has_fused_projections: bool = False  # qkv_proj and gate_up_proj are modules of the checkpoint
    # Norms.
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    norm_offset: float = 0.0  # added to the stored weight
    has_wide_norms: bool = False  # the weight multiplies in float32, before the one rounding
    qk_norm: Literal["none", "head", "all"] = "none"  # of each head, or of all heads together
    # The gated activation, and the key that names it.
    activation_key: str = "hidden_act"
    activation: Literal["silu", "gelu_tanh"] = "silu"
    # Positions.
    windows: Literal["none", "all", "flag", "types"] = "none"
    full_attention_every: int = 0  # layers; the others have a window, unless the file names types
    has_ropes_by_type: bool = False  # layers with a window turn by frequencies of their own
    reads_partial_rotary: bool = False
    reads_query_beta: bool = False  # llama_4_scaling_beta: queries grow with their position
    reads_no_rope_layers: bool = False
    # Scalars.
    reads_multipliers: bool = False  # Granite's four
    scales_embedding: bool = False  # by the root of the hidden size, rounded to the weights' type
    reads_soft_caps: bool = False
    reads_query_scalar: bool = False

    @property
    def qkv_modules(self) -> tuple[str, ...]:
        """The modules of q, k and v, or the one of all."""
        return ("qkv_proj",) if self.has_fused_projections else ("q_proj", "k_proj", "v_proj")

    @property
    def gate_up_modules(self) -> tuple[str, ...]:
        return ("gate_up_proj",) if self.has_fused_projections else ("gate_proj", "up_proj")


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GEMMA2_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_GEMMA2 = Family(
    _GEMMA2_DEFAULTS,
    fixed={"use_bidirectional_attention": False},
    reads_attention_bias=True,
    norms=BOTH_NORMS,
    norm_offset=1.0,
    has_wide_norms=True,
    activation_key="hidden_activation",
    activation="gelu_tanh",
    windows="types",
    full_attention_every=2,
    scales_embedding=True,
    reads_soft_caps=True,
    reads_query_scalar=True,
)
_OLMO2 = Family(
    {"rms_norm_eps": 1e-5},
    reads_attention_bias=True,
    norms=POST_NORMS,
    has_wide_norms=True,
    qk_norm="all",
)

FAMILIES = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096},
        fixed={"layer_types": None},
        windows="all",
    ),
    "Ministral3ForCausalLM": Family(
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": _MINISTRAL3_ROPE,
        },
        fixed={"layer_types": None},
        windows="all",
        reads_query_beta=True,
    ),
    "Qwen2ForCausalLM": Family(_QWEN_DEFAULTS, always_biased_qkv=True, windows="flag"),
    "Qwen3ForCausalLM": Family(
        _QWEN_DEFAULTS | {"head_dim": 128},
        reads_attention_bias=True,
        qk_norm="head",
        windows="flag",
    ),
    "GraniteForCausalLM": Family(
        reads_attention_bias=True, reads_mlp_bias=True, reads_multipliers=True
    ),
    "SmolLM3ForCausalLM": Family(
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        reads_attention_bias=True,
        reads_mlp_bias=True,
        windows="flag",
        reads_no_rope_layers=True,
    ),
    "Phi3ForCausalLM": Family(
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
        superseded_code={
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        has_fused_projections=True,
        windows="all",
        reads_partial_rotary=True,
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        defaults=_GEMMA3_DEFAULTS,
        # No released model has caps, and Hugging Face's classes apply them here and there.
        fixed={
            **_GEMMA2.fixed,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        qk_norm="head",
        full_attention_every=6,
        has_ropes_by_type=True,
        reads_soft_caps=False,
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        defaults={
            **_OLMO2.defaults,
            "rope_theta": 500_000.0,
            "rope_local_base_freq": 500_000.0,  # whatever rope_theta the file has
            "sliding_window": 4096,
        },
        windows="types",
        full_attention_every=4,
        has_ropes_by_type=True,
    ),
}

# Models of text and images, of which the text part is served: the family of that part, by the
# model_type of its text_config, and the type of a file that names none.
TEXT_PARTS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "Mistral3ForConditionalGeneration": (
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        "mistral",
    ),
    "Gemma3ForConditionalGeneration": ({"gemma3_text": "Gemma3ForCausalLM"}, "gemma3_text"),
}
