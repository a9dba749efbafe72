"""The quantization of a checkpoint, as its config.json describes it: one scheme for each module.

Which modules are stored quantized is decided by the tensors of the files (`engine.checkpoint`):
the lists of ignored modules are spelled differently by each tool, and a plain tensor cannot be
mistaken. A key that would change the weights and is not read is refused, with its value. Its
keys for activations and the KV cache are not followed: both stay in the type of the engine,
which is finer. Free of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from engine.errors import UnsupportedModelError
from engine.json_values import MAX_DIMENSION, flag, positive_int, read_json, refuse
from engine.weight_files import has_weights, stored_tensors
from lora.errors import AdapterError
from lora.patterns import Limits, Pattern, compile_pattern

Strategy = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True, slots=True)
class Float8:
    """The scheme of e4m3 weights times scales, stored in the shape of the weight."""

    strategy: Strategy
    block: tuple[int, int] | None = None  # rows, columns; of `block`, and [1, group] of `group`
    scale_names: tuple[str, ...] = ("weight_scale",)  # the file has one of them


@dataclass(frozen=True, slots=True)
class Int8:
    """The scheme of 8-bit integers, stored in the shape of the weight."""

    strategy: Strategy
    block: tuple[int, int] | None = None  # [1, group] of `group`
    is_symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Packed:
    """The scheme `pack-quantized` of compressed-tensors: integers packed along the columns."""

    num_bits: int
    group_size: int | None = None  # None: one scale for a row
    is_symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Gptq:
    num_bits: int
    group_size: int | None  # None: all columns are one group
    zero_offset: int  # added to the stored zero points: 1 in the first version of the format
    is_sorted: bool = False  # `desc_act`: the groups of the columns are needed


@dataclass(frozen=True, slots=True)
class Awq:
    group_size: int


@dataclass(frozen=True, slots=True)
class Bnb4:
    """The scheme of bitsandbytes' two 4-bit tables."""

    quant_type: Literal["nf4", "fp4"]


@dataclass(frozen=True, slots=True)
class Bnb8:
    """The scheme of bitsandbytes' LLM.int8()."""


Scheme = Float8 | Int8 | Packed | Gptq | Awq | Bnb4 | Bnb8


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str  # quant_method
    words: str  # for users, such as "compressed-tensors pack-quantized, 4 bits in groups of 128"
    # Pairs of targets and their schemes; a target is a name of a module, an expression or a class.
    targets: tuple[tuple[str, Scheme], ...]

    def scheme_of(self, names: tuple[str, ...]) -> Scheme | None:
        """Returns the scheme that a module has if it is stored quantized: exact names go before
        expressions, and these before classes, as in compressed-tensors. `names`: all by which
        targets may call it. Raises UnsupportedModelError for an expression that is not served."""
        if len(self.targets) == 1 and self.targets[0][0] == "Linear":
            return self.targets[0][1]
        kind = "Embedding" if names[0].endswith("embed_tokens") else "Linear"
        ranked = sorted(self.targets, key=lambda pair: ("re:" in pair[0], pair[0]))
        for target, scheme in ranked:
            if any(_matches(target, name) for name in names):
                return scheme
        return next((scheme for target, scheme in ranked if target == kind), None)


def parse_quantization(raw: Mapping[str, object]) -> Quantization | None:
    """Returns None for a checkpoint of plain weights. `raw` is a config.json, or the part of it
    about text. Raises UnsupportedModelError with the key and its value."""
    key = "quantization_config"
    if raw.get(key) is None and raw.get("compression_config") is not None:
        key = "compression_config"  # of compressed-tensors in its first year
    values = raw.get(key)
    if not values:
        return None
    if not isinstance(values, dict):
        refuse(key, values, "an object is needed")
    return _parse(key, values)


def parse_own_file(folder: Path) -> Quantization | None:
    """Reads the file that older tools wrote instead of a key of config.json. Left beside weights
    that are plain, it has no meaning; without weights, it alone tells the scheme of those that are
    drawn. Raises UnsupportedModelError with the file's name."""
    for name, (method, part) in _OWN_FILES.items():
        if not (folder / name).is_file():
            continue
        if not has_weights(folder) or any(t.key.endswith(part) for t in stored_tensors(folder)):
            values = read_json(folder / name) or {}
            if "w_bit" in values:  # AWQ's name, which stands in GPTQ's file, too
                method = "awq"
            return _parse(name, values | {"quant_method": values.get("quant_method") or method})
    return None


def _parse(key: str, values: Mapping[str, object]) -> Quantization:
    method = values.get("quant_method")
    if method is None and (values.get("load_in_4bit") or values.get("load_in_8bit")):
        method = "bitsandbytes"  # older versions of transformers left it out
    if method is None:
        refuse(key, values, f"it has no quant_method; known are {', '.join(_PARSERS)}")
    try:
        if not isinstance(method, str) or method not in _PARSERS:
            known = f"known are {', '.join(_PARSERS)}"
            refuse("quant_method", method, f"{known}; register the plain model or one of these")
        words, targets = _PARSERS[method](values)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{key}: {error}") from None
    return Quantization(method, f"{method} {words}", targets)


# By the name of the file: its method if it names none, and what marks a quantized tensor.
_OWN_FILES = {
    "quantize_config.json": ("gptq", ".qweight"),  # AutoGPTQ
    "quant_config.json": ("awq", ".qweight"),  # AutoAWQ
    "hf_quant_config.json": ("modelopt", ".weight_scale"),
}
_Parsed = tuple[str, tuple[tuple[str, Scheme], ...]]


def _matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return replace(_compiled(target), limits=Limits()).matches(module)
    except AdapterError as error:
        raise UnsupportedModelError(f"quantization_config: {error}") from None


@lru_cache(4096)
def _compiled(target: str) -> Pattern:
    # `re.match` of the library: the end is open.
    return compile_pattern(f"(?:{target.removeprefix('re:')}).*", "targets", Limits())


def _parse_compressed_tensors(values: Mapping[str, object]) -> _Parsed:
    status = values.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        refuse("quantization_status", status, "only compressed weights are read")
    for name in ("sparsity_config", "transform_config"):
        value = values.get(name)
        is_dense = isinstance(value, dict) and value.get("format") == "dense"
        if value and not is_dense:
            refuse(name, value, "sparse weights and transforms are not supported")
    groups = values.get("config_groups")
    # Without groups, only the KV cache has a scheme.
    if not isinstance(groups, dict) or not (groups or values.get("kv_cache_scheme")):
        refuse("config_groups", groups, "an object of groups is needed")
    targets: list[tuple[str, Scheme]] = []
    words: list[str] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            refuse(f"config_groups.{name}", group, "an object is needed")
        layout = group.get("format") or values.get("format")
        weights = group.get("weights")
        if weights is None and group.get("input_activations") is not None:
            continue  # of attention's activations
        if not isinstance(weights, dict):
            refuse(f"config_groups.{name}.weights", weights, "an object is needed")
        scheme = _compressed_scheme(layout, weights)
        listed = group.get("targets")
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            refuse(f"config_groups.{name}.targets", listed, "a list of names is needed")
        targets += [(target, scheme) for target in listed]
        words.append(f"{layout}, {describe(scheme)}")
    return " and ".join(dict.fromkeys(words)) or "of activations alone", tuple(targets)


_LAYOUTS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def _compressed_scheme(layout: object, weights: Mapping[str, object]) -> Scheme:
    if layout not in _LAYOUTS:  # before keys that only other layouts have
        refuse("format", layout, f"known are {', '.join(_LAYOUTS)}")
    num_bits = positive_int(weights, "num_bits", 8)
    kind = weights.get("type", "int")
    is_symmetric = flag(weights, "symmetric", default=True)
    strategy, group_size = _strategy(weights)
    if layout in ("float-quantized", "naive-quantized") and kind == "float":
        if num_bits != 8 or not is_symmetric:
            refuse("weights", dict(weights), "of floats only symmetric ones of 8 bits are read")
        return Float8(strategy, _block(weights, strategy, group_size))
    if layout in ("int-quantized", "naive-quantized") and kind == "int":
        if num_bits != 8 or strategy == "block":
            refuse("weights", dict(weights), f"{layout} is read of 8 bits, without blocks")
        return Int8(strategy, _block(weights, strategy, group_size), is_symmetric)
    if layout == "pack-quantized" and kind == "int":
        if num_bits not in (4, 8) or strategy not in ("group", "channel"):
            refuse("weights", dict(weights), "packed are 4 or 8 bits, by group or by channel")
        return Packed(num_bits, group_size, is_symmetric)
    refuse("format", layout, f"is not known for weights of type {kind!r}")


def _strategy(weights: Mapping[str, object]) -> tuple[Strategy, int | None]:
    """Returns the strategy, which the size of a group implies where it is left out."""
    size = weights.get("group_size")
    if size is not None and (type(size) is not int or (size < 1 and size != -1)):
        refuse("weights.group_size", size, "a positive number or -1 is needed")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    found = weights.get("strategy") or implied
    match found:
        case "tensor" | "channel" | "block":
            return found, None
        case "group" if isinstance(size, int) and size > 0:
            return "group", size
    refuse("weights.strategy", found, "known are tensor, channel, group with a size, block")


def _block(
    weights: Mapping[str, object], strategy: Strategy, group_size: int | None
) -> tuple[int, int] | None:
    if strategy == "group" and group_size is not None:
        return 1, group_size
    if strategy != "block":
        return None
    return _pair("weights.block_structure", weights.get("block_structure"))


def _pair(key: str, value: object) -> tuple[int, int]:
    if isinstance(value, str):
        parts = value.split("x")
        is_read = all(re.fullmatch(r"[0-9]{1,8}", part) for part in parts)
        value = [int(part) for part in parts] if is_read else value
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if all(type(size) is int and 1 <= size <= MAX_DIMENSION for size in value):
            return rows, columns
    refuse(key, value, f"rows and columns are needed, two numbers from 1 to {MAX_DIMENSION}")


def _parse_fp8(values: Mapping[str, object]) -> _Parsed:
    """Reads transformers' FineGrainedFP8Config, and the per-tensor form of AutoFP8 and vLLM."""
    if values.get("scale_fmt", "float") != "float":
        refuse("scale_fmt", values["scale_fmt"], "only scales of type float are read")
    scale_names = ("weight_scale_inv", "weight_scale")
    size = values.get("weight_block_size")
    if size is None:
        scheme = Float8("tensor", None, scale_names)
    else:
        scheme = Float8("block", _pair("weight_block_size", size), scale_names)
    return describe(scheme), (("Linear", scheme),)


def _parse_gptq(values: Mapping[str, object]) -> _Parsed:
    num_bits = positive_int(values, "bits")
    if num_bits not in (4, 8):
        refuse("bits", num_bits, "4 and 8 are read")
    layout = values.get("checkpoint_format") or values.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or values.get("is_marlin_format"):
        refuse("checkpoint_format", layout, "gptq and gptq_v2 are read, not layouts of kernels")
    dynamic = values.get("dynamic") or {}
    # A rule that begins with a minus leaves modules plain, which their tensors show.
    if not isinstance(dynamic, dict) or not all(rule.startswith("-:") for rule in dynamic):
        refuse("dynamic", dynamic, "schemes of single modules are not supported")
    is_one_group = values.get("group_size") == -1
    size = None if is_one_group else positive_int(values, "group_size")
    is_sorted = size is not None and flag(values, "desc_act")
    scheme = Gptq(num_bits, size, 1 if layout == "gptq" else 0, is_sorted)
    return f"{layout}, {describe(scheme)}", (("Linear", scheme),)


def _parse_awq(values: Mapping[str, object]) -> _Parsed:
    if (num_bits := values.get("bits", values.get("w_bit", 4))) != 4:
        refuse("bits", num_bits, "4 are read")
    for key in ("version", "checkpoint_format", "format"):
        layout = values.get(key) or "gemm"
        if not isinstance(layout, str) or layout.lower() != "gemm":
            refuse(key, layout, "only the order of gemm is read")
    if not flag(values, "zero_point", default=True):
        refuse("zero_point", False, "gemm has zero points")
    size = positive_int(values, "group_size", positive_int(values, "q_group_size", 128))
    return f"gemm, {describe(Awq(size))}", (("Linear", Awq(size)),)


def _parse_bitsandbytes(values: Mapping[str, object]) -> _Parsed:
    is_8bit = flag(values, "load_in_8bit")
    if is_8bit == flag(values, "load_in_4bit"):
        refuse("load_in_4bit", values.get("load_in_4bit"), "either it or load_in_8bit is true")
    if is_8bit:
        return "int8", (("Linear", Bnb8()),)
    quant_type = values.get("bnb_4bit_quant_type", "fp4")  # transformers' default
    if quant_type not in ("nf4", "fp4"):
        refuse("bnb_4bit_quant_type", quant_type, "nf4 and fp4 are read")
    return str(quant_type), (("Linear", Bnb4(quant_type)),)


def describe(scheme: Scheme) -> str:
    """Returns the scheme in words for users."""
    match scheme:
        case Float8("block" | "group", (rows, columns)):
            return f"e4m3 in blocks of {rows} x {columns}"
        case Float8(strategy):
            return f"e4m3 per {strategy}"
        case Int8("group", (_, size)):
            return f"8 bits in groups of {size}"
        case Int8(strategy):
            return f"8 bits per {strategy}"
        case Packed(num_bits, size) | Gptq(num_bits, size):
            return f"{num_bits} bits " + (f"in groups of {size}" if size else "per channel")
        case Awq(size):
            return f"4 bits in groups of {size}"
        case Bnb4(quant_type):
            return quant_type
    return "int8"


_PARSERS: dict[str, Callable[[Mapping[str, object]], _Parsed]] = {
    "compressed-tensors": _parse_compressed_tensors,
    "fp8": _parse_fp8,
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "bitsandbytes": _parse_bitsandbytes,
}
