"""The metadata of a GGUF file as a config.json, and the names of its tensors in a model of text.

Only architectures whose names, order of rows and positions are known are read; a model that a
file cannot describe exactly is refused. Keys and their meaning: gguf's constants, and llama.cpp's
convert_hf_to_gguf.py, whose steps are undone here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import UnsupportedModelError
from engine.rope import RopeConfig, inverse_frequencies

_ADVICE = "register the safetensors"
# Rotary frequencies of Llama 3 are stored divided: known sets of factor and original length, with
# low_freq_factor 1 and high_freq_factor 4.
_LLAMA3_SCALINGS = ((8.0, 8192), (32.0, 8192))
_SCALING = "rope.scaling."
_READ_SCALING = frozenset(
    _SCALING + name for name in ("type", "factor", "original_context_length", "finetuned")
)


@dataclass(frozen=True, slots=True)
class Architecture:
    model: str  # Hugging Face's class
    model_type: str
    permutes: bool = False  # rows of q and k lie in pairs
    norm_offset: float = 0.0  # added to all norms
    square_head_layers: int = 0  # the one size whose query scale is that of hidden / heads


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", permutes=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", norm_offset=1.0, square_head_layers=46),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", norm_offset=1.0, square_head_layers=62
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3"),
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI_LAYER = _LAYER | {"ffn_up": "mlp.gate_up_proj"}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class Metadata:
    """The fields of a file by their names without the architecture. Raises UnsupportedModelError
    for one that is missing or of another kind."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        name = fields.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModelError(
                f"general.architecture is {name!r}: GGUF is read of {known}; {_ADVICE}"
            )
        if fields.get("split.count") not in (None, 0, 1):
            raise UnsupportedModelError(
                f"split.count is {fields['split.count']}: merge the parts first (llama-gguf-split)"
            )
        self.name = name
        self.architecture = ARCHITECTURES[name]
        self.fields = fields

    def get(self, key: str) -> object:
        return self.fields.get(f"{self.name}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise UnsupportedModelError(
                f"{self.name}.{key} is {value!r}: a whole number from 1 on is needed"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UnsupportedModelError(f"{self.name}.{key} is {value!r}: a number is needed")
        return float(value)


def hugging_face_name(architecture: Architecture, name: str) -> str:
    """Raises UnsupportedModelError for a tensor that is unknown."""
    found = _NAME.fullmatch(name)
    if found is not None and found["layer"] is None and found["part"] in _TOP:
        return f"{_TOP[found['part']]}.{found['kind']}"
    layers = {"gemma2": _GEMMA_LAYER, "gemma3_text": _GEMMA_LAYER, "phi3": _PHI_LAYER}
    parts = layers.get(architecture.model_type, _LAYER)
    if found is None or found["layer"] is None or found["part"] not in parts:
        raise UnsupportedModelError(f"the file holds {name}, which is unknown; {_ADVICE}")
    return f"model.layers.{found['layer']}.{parts[found['part']]}.{found['kind']}"


def make_config(
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    rope_tensors: Mapping[str, list[float]],
) -> dict[str, object]:
    """Returns config.json. `shapes`: of all tensors, by GGUF's names; `rope_tensors`: the numbers
    of the tensors of ROPE_TENSORS that the file has."""
    if "token_embd.weight" not in shapes:
        raise UnsupportedModelError("tensor token_embd.weight is missing in the file")
    heads = metadata.integer("attention.head_count")
    hidden = metadata.integer("embedding_length")
    rope_size = metadata.integer("rope.dimension_count", hidden // heads)
    # Of Phi-3, a part of a head may turn.
    usual = hidden // heads if metadata.name == "phi3" else rope_size
    head_dim = metadata.integer("attention.key_length", usual)
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{metadata.name}.attention.value_length is {metadata.get('attention.value_length')}, "
            f"keys have {head_dim}: heads of two sizes are not supported"
        )
    if rope_size != head_dim and metadata.name != "phi3":
        raise UnsupportedModelError(
            f"{metadata.name}.rope.dimension_count is {rope_size} of {head_dim}; {_ADVICE}"
        )
    context = metadata.integer("context_length")
    config: dict[str, object] = {
        "architectures": [metadata.architecture.model],
        "model_type": metadata.architecture.model_type,
        "dtype": "bfloat16",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": metadata.name != "qwen2" and "blk.0.attn_q.bias" in shapes,
        **_of_gemma(metadata, hidden, heads, head_dim),
        **_of_phi(metadata, rope_size, head_dim),
    }
    scaling = _scaling(metadata, config, rope_tensors)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _of_gemma(metadata: Metadata, hidden: int, heads: int, head_dim: int) -> dict[str, object]:
    if metadata.architecture.norm_offset == 0:
        return {}
    # Neither key is in the file: llama.cpp finds the one size that differs by its layers.
    is_square = metadata.integer("block_count") == metadata.architecture.square_head_layers
    found: dict[str, object] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if is_square else head_dim,
        "sliding_window": metadata.integer("attention.sliding_window"),
    }
    if metadata.name == "gemma2":
        return found | {
            "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        }
    return found | {"rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0)}


def _of_phi(metadata: Metadata, rope_size: int, head_dim: int) -> dict[str, object]:
    if metadata.name != "phi3":
        return {}
    found: dict[str, object] = {"sliding_window": metadata.get("attention.sliding_window") or None}
    if rope_size != head_dim:
        found["partial_rotary_factor"] = rope_size / head_dim
    original = metadata.get(_SCALING + "original_context_length")
    return found | ({"original_max_position_embeddings": original} if original else {})


def _scaling(
    metadata: Metadata, config: Mapping[str, object], tensors: Mapping[str, list[float]]
) -> dict[str, object] | None:
    """Returns `rope_scaling`. Raises UnsupportedModelError for one that is not read exactly."""
    kind = metadata.get(_SCALING + "type")
    if "rope_freqs.weight" in tensors:
        return _llama3_scaling(metadata, config, tensors["rope_freqs.weight"])
    long, short = (tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long and short:
        _check_attention_factor(metadata)
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    if kind in (None, "none"):
        return None
    prefix = f"{metadata.name}."
    for key in metadata.fields:
        name = key.removeprefix(prefix)
        if key.startswith(prefix + _SCALING) and name not in _READ_SCALING:
            raise UnsupportedModelError(f"{key} is {metadata.fields[key]!r}; {_ADVICE}")
    factor = metadata.number(_SCALING + "factor", 0.0)
    if kind == "linear" and factor > 0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor > 0:
        original = metadata.integer(_SCALING + "original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise UnsupportedModelError(
        f"{metadata.name}.{_SCALING}type is {kind!r} with factor {factor}; {_ADVICE}"
    )


def _check_attention_factor(metadata: Metadata) -> None:
    """Refuses a factor of attention other than LongRoPE's own, which the engine computes."""
    stored = metadata.get(_SCALING + "attn_factor")
    original = metadata.integer(_SCALING + "original_context_length")
    if original == 1:  # whose logarithm divides
        raise UnsupportedModelError(
            f"{metadata.name}.{_SCALING}original_context_length is 1; {_ADVICE}"
        )
    ratio = metadata.integer("context_length") / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    if stored is not None and not math.isclose(
        metadata.number(_SCALING + "attn_factor", 1.0), usual, rel_tol=1e-5
    ):
        raise UnsupportedModelError(
            f"{metadata.name}.{_SCALING}attn_factor is {stored!r}, {usual:.6f} is read; {_ADVICE}"
        )


def _llama3_scaling(
    metadata: Metadata, config: Mapping[str, object], divisors: list[float]
) -> dict[str, object]:
    """Recognises Llama 3's scaling by its divisors of frequencies [head_dim / 2]."""
    head_dim, theta = config["head_dim"], config["rope_theta"]
    assert isinstance(head_dim, int)
    assert isinstance(theta, float)
    if theta <= 0:
        raise UnsupportedModelError(
            f"{metadata.name}.rope.freq_base is {theta}: it must be positive"
        )
    for factor, original in _LLAMA3_SCALINGS:
        expected = llama3_divisors(head_dim, theta, factor, original)
        if len(divisors) == len(expected) and all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(
        f"rope_freqs.weight is no scaling of Llama 3 that is known; {_ADVICE}"
    )


def llama3_divisors(head_dim: int, theta: float, factor: float, original: int) -> list[float]:
    """Returns the divisors of frequencies as llama.cpp's converter stores them for factors 1 and
    4 of low and high frequencies."""
    plain, scaled = (
        inverse_frequencies(rope, head_dim, 0)
        for rope in (RopeConfig("default", theta), RopeConfig("llama3", theta, factor, original))
    )
    divisors: list[float] = (plain / scaled).tolist()
    return divisors
