"""The rotary positions of a base's config.json: one `RopeConfig` for each layer.

Both forms are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`, which
may hold one set for each type of layer. Free of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.families import Family
from engine.json_values import (
    MAX_DIMENSION,
    flag,
    optional_number,
    positive_int,
    positive_number,
    refuse,
)
from engine.rope import RopeConfig

_PARTIAL, _ORIGINAL = "partial_rotary_factor", "original_max_position_embeddings"


def parse_ropes(
    raw: Mapping[str, object],
    family: Family,
    layer_types: Sequence[str],
    max_position: int,
    head_dim: int,
) -> tuple[RopeConfig | None, ...]:
    """Returns the positions of each layer; None: its queries and keys are not turned."""
    # Hugging Face prefers the old key, if both are there.
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    # Null is the same as no key.
    values = _object(key, family.defaults.get(key) if raw.get(key) is None else raw[key])
    if not family.has_ropes_by_type:
        if any(isinstance(value, dict) for value in values.values()):
            refuse(key, values, "parameters by layer type are not supported for this architecture")
        rope = _parse_rope(raw, family, key, values, max_position, head_dim)
        return tuple(
            rope if turns else None for turns in rotary_layers(raw, family, len(layer_types))
        )
    sets = _object("rope_parameters", raw.get("rope_parameters"))
    by_type = {
        kind: dict(_object(f"rope_parameters.{kind}", sets.get(kind)))
        for kind in ("full_attention", "sliding_attention")
    }
    if unknown := sets.keys() - by_type.keys():
        refuse("rope_parameters", sets, f"{min(unknown)} is no type of layer")
    if key == "rope_scaling":  # of layers without a window only
        by_type["full_attention"] |= values
    by_type["sliding_attention"].setdefault("rope_theta", raw.get("rope_local_base_freq"))
    ropes = {
        kind: _parse_rope(raw, family, f"{key}.{kind}", one, max_position, head_dim)
        for kind, one in by_type.items()
    }
    return tuple(ropes[kind] for kind in layer_types)


def _object(key: str, value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(key, value, "an object is needed")
    return value


def rotary_layers(raw: Mapping[str, object], family: Family, num_layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether it has rotary positions."""
    if not family.reads_no_rope_layers:
        return (True,) * num_layers
    listed = raw.get("no_rope_layers")
    if listed is None:
        every = positive_int(raw, "no_rope_layer_interval", 4)
        return tuple((i + 1) % every != 0 for i in range(num_layers))
    # 1 in the list means that the layer has positions, in spite of the key's name.
    flags = listed if isinstance(listed, list) else []
    if len(flags) < num_layers or any(turns not in (0, 1) for turns in flags):
        refuse("no_rope_layers", listed, f"{num_layers} of 0 and 1 are needed")
    return tuple(bool(turns) for turns in flags[:num_layers])


def _parse_rope(
    raw: Mapping[str, object],
    family: Family,
    key: str,
    values: Mapping[str, object],
    max_position: int,
    head_dim: int,
) -> RopeConfig:
    # Some parameters may be keys of config.json itself, of which one goes before the others.
    all_values = {name: raw.get(name) for name in ("rope_theta", _PARTIAL)} | dict(values)
    if raw.get(_ORIGINAL) is not None:
        all_values[_ORIGINAL] = raw[_ORIGINAL]
    fraction = _rotary_fraction(family, all_values, head_dim)
    kind = values.get("rope_type") or values.get("type") or "default"
    if family.reads_partial_rotary and kind in ("su", "yarn"):
        kind = "longrope"  # Phi-3's older names of it
    if kind == "longrope":
        rope = _longrope(key, all_values, max_position, int(head_dim * fraction) // 2)
        return replace(rope, rotary_fraction=fraction)
    rope = _scaled(key, kind, all_values, max_position)
    if family.reads_query_beta and values.get("llama_4_scaling_beta") not in (None, 0):
        original = positive_int(values, _ORIGINAL)
        beta = positive_number(values, "llama_4_scaling_beta")
        rope = replace(rope, original_max_len=original, query_beta=beta)
    return replace(rope, rotary_fraction=fraction)


def _rotary_fraction(family: Family, values: Mapping[str, object], head_dim: int) -> float:
    value = values[_PARTIAL]
    if value in (None, 1, 1.0):
        return 1.0
    if not family.reads_partial_rotary:
        refuse(_PARTIAL, value, "only 1 is supported for this architecture")
    fraction = positive_number({_PARTIAL: value}, _PARTIAL)
    size = int(head_dim * fraction)
    if fraction > 1 or size % 2 or not size:
        refuse(_PARTIAL, value, f"it must leave an even part of {head_dim} dimensions")
    return fraction


def _scaled(key: str, kind: object, values: Mapping[str, object], max_position: int) -> RopeConfig:
    theta = positive_number(values, "rope_theta", 10000.0)
    # Up to max_position_embeddings "dynamic" has the default's frequencies; above they change with
    # every token and would invalidate cached keys, so longer sequences are not offered.
    if kind in ("default", "dynamic"):
        return RopeConfig("default", theta)
    original = positive_int(values, _ORIGINAL, max_position)
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
        known = "default, linear, dynamic, llama3, yarn, longrope"
        refuse(f"{key}.rope_type", kind, f"known are {known}")
    if theta == 1:
        refuse("rope_theta", theta, "YaRN divides by its logarithm")
    factor = positive_number(values, "factor", max_position / original)
    if original * factor > MAX_DIMENSION:
        refuse(f"{key}.factor", factor, f"it makes {original} positions more than {MAX_DIMENSION}")
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=positive_number(values, "beta_fast", 32.0),
        beta_slow=positive_number(values, "beta_slow", 1.0),
        truncate=flag(values, "truncate", default=True),
        attention_factor=optional_number(values, "attention_factor"),
        mscale=optional_number(values, "mscale"),
        mscale_all_dim=optional_number(values, "mscale_all_dim"),
    )


def _longrope(
    key: str, values: Mapping[str, object], max_position: int, num_factors: int
) -> RopeConfig:
    theta = positive_number(values, "rope_theta", 10000.0)
    original = positive_int(values, _ORIGINAL, max_position, 2)  # its logarithm is a divisor
    return RopeConfig(
        "longrope",
        theta,
        positive_number(values, "factor", max_position / original),
        original,
        attention_factor=optional_number(values, "attention_factor"),
        short_factors=_factors(key, values, "short_factor", num_factors),
        long_factors=_factors(key, values, "long_factor", num_factors),
    )


def _factors(key: str, values: Mapping[str, object], name: str, count: int) -> tuple[float, ...]:
    listed = values.get(name)
    if not isinstance(listed, list) or len(listed) != count:
        refuse(f"{key}.{name}", listed, f"{count} numbers are needed, one per pair of dimensions")
    return tuple(positive_number({name: value}, name) for value in listed)
