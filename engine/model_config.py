"""A base's config.json read into one frozen value, for the families that the decoder computes.

Our own parser: no remote code, no guesses. A key that would change the arithmetic and is not
supported is refused, with its value. Defaults and quirks are those of Hugging Face's config
classes. Free of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from engine.errors import UnsupportedModelError
from engine.families import ACTIVATIONS, FAMILIES, TEXT_PARTS, Family
from engine.json_values import (
    flag,
    optional_number,
    positive_int,
    positive_number,
    read_json,
    refuse,
)
from engine.quantization import Quantization, Scheme, parse_own_file, parse_quantization
from engine.rope import RopeConfig
from engine.rope_config import parse_ropes, rotary_layers
from engine.weight_files import has_weights, stored_tensors
from lora.module_names import canonical, spellings
from lora.sites import Site, Slice

_MAX_LAYERS = 4096  # each has names and shapes before any file is opened; the deepest have 126
_OUTER_KEYS = ("tie_word_embeddings", "eos_token_id")  # beside text_config, where they win


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # as in config.json
    family: Family
    is_text_part: bool  # of a checkpoint that holds other parts, too
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_len: int  # positions the base was made for
    ropes: tuple[RopeConfig | None, ...]  # one per layer; None: no positions
    sliding_windows: tuple[int | None, ...]  # one per layer
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    ties_embeddings: bool
    eos_token_ids: tuple[int, ...]
    attention_scale: float
    attention_soft_cap: float | None
    embedding_multiplier: float
    residual_multiplier: float  # of the values that a layer adds
    logits_scaling: float  # a divisor
    logits_soft_cap: float | None
    quantization: Quantization | None  # of the files; None: all weights are plain

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def usual_len(self) -> int:
        """The longest sequence unless the engine's configuration sets it: up to here, every length
        is computed as Hugging Face does."""
        lengths = [self.max_len]
        for rope in self.ropes:
            if rope is not None and rope.usual_len is not None:
                lengths.append(rope.usual_len)
        return min(lengths)

    def scheme_of(self, module: str) -> Scheme | None:
        """Returns the scheme that a module has if it is stored quantized, None for a plain base.
        Targets may name a text part's layers as the larger model does."""
        if self.quantization is None:
            return None
        return self.quantization.scheme_of(spellings(module) if self.is_text_part else (module,))


def read_model_config(folder: Path) -> ModelConfig:
    """Raises UnsupportedModelError with the reason."""
    raw = read_json(folder / "config.json")
    if raw is None:
        raise UnsupportedModelError("the folder has no config.json")
    generation = read_json(folder / "generation_config.json")
    config = parse_model_config(raw, generation or {})
    if config.quantization is None:
        config = replace(config, quantization=parse_own_file(folder))
    if config.is_text_part and raw.get("tie_word_embeddings") is not False:
        # The classes tie by default, whatever text_config has, also for checkpoints with a head:
        # Hugging Face then uses both.
        names = (canonical(tensor.key) for tensor in stored_tensors(folder))
        has_head = has_weights(folder) and any(name.startswith("lm_head.") for name in names)
        return replace(config, ties_embeddings=not has_head)
    return config


def parse_model_config(raw: Mapping[str, object], generation: Mapping[str, object]) -> ModelConfig:
    outer = raw
    architecture, family, raw = _family(raw)
    quantization = parse_quantization(outer) or parse_quantization(raw)
    for key, value in family.fixed.items():
        if raw.get(key) not in (None, value):
            refuse(key, raw[key], f"not supported for {architecture}")
    num_heads, num_kv_heads, head_dim = _heads(raw)
    hidden_size = positive_int(raw, "hidden_size")
    computed = ACTIVATIONS[family.activation]
    if (activation := raw.get(family.activation_key, computed)) != computed:
        refuse(family.activation_key, activation, f"only {computed} is computed")
    has_bias = family.reads_attention_bias and flag(raw, "attention_bias")
    num_layers = positive_int(raw, "num_hidden_layers", most=_MAX_LAYERS)
    max_position = positive_int(raw, "max_position_embeddings")
    types = _layer_types(raw, family, num_layers)
    ropes = parse_ropes(raw, family, types, max_position, head_dim)
    max_len = max([max_position, *(rope.extended_len for rope in ropes if rope is not None)])
    vocab_size = positive_int(raw, "vocab_size")
    embedding_multiplier = hidden_size**0.5 if family.scales_embedding else 1.0
    return ModelConfig(
        architecture=architecture,
        family=family,
        is_text_part=architecture in TEXT_PARTS,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=positive_int(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive_number(raw, "rms_norm_eps", 1e-6),
        max_len=max_len,
        ropes=ropes,
        sliding_windows=_sliding_windows(raw, types, max_len),
        has_qkv_bias=has_bias or family.always_biased_qkv,
        has_o_bias=has_bias,
        has_mlp_bias=family.reads_mlp_bias and flag(raw, "mlp_bias"),
        ties_embeddings=flag(raw, "tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(raw, generation, vocab_size),
        attention_scale=_attention_scale(raw, family, head_dim),
        attention_soft_cap=_soft_cap(raw, family, "attn_logit_softcapping"),
        embedding_multiplier=_multiplier(raw, family, "embedding_multiplier", embedding_multiplier),
        residual_multiplier=_multiplier(raw, family, "residual_multiplier"),
        logits_scaling=_multiplier(raw, family, "logits_scaling"),
        logits_soft_cap=_soft_cap(raw, family, "final_logit_softcapping"),
        quantization=quantization,
    )


def lora_sites(config: ModelConfig) -> tuple[Site, ...]:
    sites: list[Site] = []
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = config.q_size, config.kv_size, config.kv_size
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = tuple(
            Slice(f"{attention}.{name}", size)
            for name, size in zip(cycle(config.family.qkv_modules), sizes, strict=False)
        )
        gate_up = tuple(
            Slice(f"{mlp}.{name}", inner)
            for name in islice(cycle(config.family.gate_up_modules), 2)
        )
        sites += [
            Site(f"{layer}.qkv", hidden, qkv),
            Site(f"{layer}.o", config.q_size, (Slice(f"{attention}.o_proj", hidden),)),
            Site(f"{layer}.gate_up", hidden, gate_up),
            Site(f"{layer}.down", inner, (Slice(f"{mlp}.down_proj", hidden),)),
        ]
    head = Site("lm_head", hidden, (Slice("lm_head", config.vocab_size),))
    embedding = Slice("model.embed_tokens", hidden)
    return (*sites, head, Site("embed_tokens", config.vocab_size, (embedding,), "embedding"))


def _family(raw: Mapping[str, object]) -> tuple[str, Family, Mapping[str, object]]:
    """Returns the architecture, its family, and the keys of the text model with the defaults of its
    class."""
    names = raw.get("architectures")
    known = (*FAMILIES, *TEXT_PARTS)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        refuse("architectures", names, f"supported are {', '.join(known)}")
    (architecture,) = names
    if architecture in FAMILIES:
        family = FAMILIES[architecture]
        _refuse_foreign(raw, family.superseded_code)
        return architecture, family, {**family.defaults, **raw}
    _refuse_foreign(raw)
    text = raw.get("text_config")
    if not isinstance(text, dict):
        refuse("text_config", text, "an object is needed")
    _refuse_foreign(text)
    families, usual = TEXT_PARTS[architecture]
    kind = text.get("model_type", usual)
    if not isinstance(kind, str) or kind not in families:
        refuse("text_config.model_type", kind, f"known are {', '.join(families)}")
    family = FAMILIES[families[kind]]
    outer = {key: raw[key] for key in _OUTER_KEYS if raw.get(key) is not None}
    return architecture, family, {**family.defaults, **text, **outer}


def _refuse_foreign(raw: Mapping[str, object], superseded: Mapping[str, str] | None = None) -> None:
    code = raw.get("auto_map")
    if code and not (superseded and isinstance(code, dict) and _is_superseded(code, superseded)):
        refuse("auto_map", code, "the model wants code of its own to be run, which is never done")


def _is_superseded(code: Mapping[str, object], superseded: Mapping[str, str]) -> bool:
    """Returns True if every class of `auto_map` is one that transformers has since. An entry may
    begin with the repository of the file; tokenizers are read from tokenizer.json."""
    return all(
        key == "AutoTokenizer"
        or (isinstance(value, str) and superseded.get(key) == value.rsplit("--", 1)[-1])
        for key, value in code.items()
    )


def _heads(raw: Mapping[str, object]) -> tuple[int, int, int]:
    """Returns the numbers of query heads and of KV heads, and the size of a head."""
    num_heads = positive_int(raw, "num_attention_heads")
    hidden_size = positive_int(raw, "hidden_size")
    num_kv_heads = positive_int(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        refuse("num_key_value_heads", num_kv_heads, f"does not divide {num_heads} heads")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        refuse("hidden_size", hidden_size, f"is not a multiple of {num_heads} heads")
    head_dim = positive_int(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        refuse("head_dim", head_dim, "is odd, rotary embedding turns pairs")
    return num_heads, num_kv_heads, head_dim


def _layer_types(raw: Mapping[str, object], family: Family, num_layers: int) -> tuple[str, ...]:
    full, sliding = "full_attention", "sliding_attention"
    if family.windows == "none" or (
        family.windows == "flag" and not flag(raw, "use_sliding_window")
    ):
        return (full,) * num_layers
    if family.windows == "all":
        return (sliding,) * num_layers
    types = raw.get("layer_types")
    if types is not None:
        listed = types if isinstance(types, list) else []
        if len(listed) != num_layers or any(kind not in (full, sliding) for kind in listed):
            refuse("layer_types", types, f"{num_layers} of {full}, {sliding} are needed")
        return tuple(listed)
    if family.reads_no_rope_layers:
        turns = rotary_layers(raw, family, num_layers)
        return tuple(full if turn else sliding for turn in turns)
    if family.windows == "flag":
        first = positive_int(raw, "max_window_layers", least=0)
        return tuple(sliding if i >= first else full for i in range(num_layers))
    every = positive_int(raw, "sliding_window_pattern", family.full_attention_every)
    return tuple(full if (i + 1) % every == 0 else sliding for i in range(num_layers))


def _sliding_windows(
    raw: Mapping[str, object], types: tuple[str, ...], max_len: int
) -> tuple[int | None, ...]:
    # An absent key is the default of Hugging Face's class, null is none.
    if "sliding_attention" not in types or raw.get("sliding_window") is None:
        return (None,) * len(types)
    window = positive_int(raw, "sliding_window")
    if window >= max_len:
        # It hides no key, as the 262,144 of Phi-4-mini. Kernels would cut it into a few long
        # items, whatever the length of a sequence.
        return (None,) * len(types)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _attention_scale(raw: Mapping[str, object], family: Family, head_dim: int) -> float:
    if family.reads_query_scalar:
        return float(positive_number(raw, "query_pre_attn_scalar") ** -0.5)
    return _multiplier(raw, family, "attention_multiplier", float(head_dim**-0.5))


def _multiplier(
    raw: Mapping[str, object], family: Family, key: str, otherwise: float = 1.0
) -> float:
    return positive_number(raw, key, 1.0) if family.reads_multipliers else otherwise


def _soft_cap(raw: Mapping[str, object], family: Family, key: str) -> float | None:
    return optional_number(raw, key) if family.reads_soft_caps else None


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
