"""Operators of blocks in Triton's interpreter, computed at once.

A sum passes through six functions of Triton's, which decide on types and shapes, before NumPy adds:
9 us, of which a launch has some hundreds. Here pairs of operands that need no cast go to NumPy
directly, in 1 us; all others take Triton's way. tests/interpreter/test_operands.py compares both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

WHOLE = frozenset({"int32", "int64"})
FLOATS = frozenset({"fp16", "fp32"})
ALIKE = WHOLE | FLOATS | {"int8", "int16", "uint8", "uint32"}
BITS = WHOLE | {"int1", "int8", "int16", "uint8", "uint32"}
Operator = Callable[..., Any]


_described: dict[tuple[str, tuple[int, ...] | None], tuple[Any, Any, Any]] = {}


def _describe(dtype: Any, shape: tuple[int, ...] | None) -> tuple[Any, Any, Any]:
    """Returns the type, number of elements and shape of a block, or of a scalar without a shape."""
    if shape is None:
        return dtype, tl.constexpr(1), tl.core.tuple([])
    sizes = tl.core.tuple([tl.constexpr(size) for size in shape])
    return tl.block_type(dtype, list(shape)), tl.constexpr(math.prod(shape)), sizes


def made(data: Any, dtype: Any, *, is_block: bool) -> Any:
    """Returns the tensor of computed data, whose type fits."""
    handle = TensorHandle.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor = tl.tensor.__new__(tl.tensor)
    tensor.handle, tensor.dtype = handle, dtype
    key = dtype.name, data.shape if is_block else None
    if key not in _described:
        _described[key] = _describe(dtype, key[1])
    tensor.type, tensor.numel, tensor.shape = _described[key]
    return tensor


def is_block(value: Any) -> bool:
    return type(value.type) is tl.block_type


def _fits(number: Any, name: str, is_compared: bool) -> bool:
    """Returns True if a block of this type beside a number is computed in the block's type."""
    if type(number) is int:
        if name in WHOLE:
            return -(2**31) <= number < 2**31
        if name not in FLOATS or (is_compared and name == "fp16"):
            return False
        return -(2**11) <= number <= 2**11  # exact in a half; Triton refuses some beyond 64 bits
    if type(number) is not float or (number == 0 and math.copysign(1, number) < 0):
        return False  # Triton's constants have no -0
    # A number that is compared is a float32, beside a half, too.
    return name == "fp32" or (name == "fp16" and not is_compared)


def at_once(
    slow: Operator, compute: Operator, types: frozenset[str], *, swaps: bool, compares: bool
) -> Operator:
    """Returns the operator that gives pairs of `types` to `compute`, and others to `slow`.
    `swaps`: its second operand stands on the left."""

    def run(self: Any, other: Any, _semantic: Any = None) -> Any:
        dtype = self.dtype
        name = dtype.name
        if name not in types:
            return slow(self, other)
        if type(other) is tl.constexpr:
            other = other.value
        if type(other) is tl.tensor:
            if other.dtype.name != name:
                if name not in WHOLE or other.dtype.name not in WHOLE:
                    return slow(self, other)
                dtype = tl.int64
            right, has_block = other.handle.data, is_block(self) or is_block(other)
        elif _fits(other, name, compares):
            right, has_block = other, is_block(self)
        else:
            return slow(self, other)
        left = self.handle.data
        data = compute(right, left) if swaps else compute(left, right)
        return made(data, tl.int1 if compares else dtype, is_block=has_block)

    return run


def _divide_whole(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right  # towards zero, as Triton's


ARITHMETIC = {
    "add": (np.add, ALIKE),
    "sub": (np.subtract, ALIKE),
    "mul": (np.multiply, ALIKE),
    "truediv": (np.divide, frozenset({"fp32"})),  # a half is divided as a float
    "floordiv": (_divide_whole, WHOLE),
    "mod": (np.fmod, WHOLE),
    "and": (np.bitwise_and, BITS),
    "or": (np.bitwise_or, BITS),
    "xor": (np.bitwise_xor, BITS),
    "lshift": (np.left_shift, WHOLE),
    "rshift": (np.right_shift, WHOLE),
}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
NAMES = (
    *(f"__{name}__" for name in (*ARITHMETIC, *COMPARISONS)),
    *(f"__r{name}__" for name in ARITHMETIC),
)
TRITONS: dict[str, Operator] = {name: getattr(tl.tensor, name) for name in NAMES}


def _add_to_pointers(slow: Operator) -> Operator:
    """Returns the sum for pointers with offsets, or values with values by `slow`."""

    def run(self: Any, other: Any, _semantic: Any = None) -> Any:
        dtype = self.dtype
        if type(dtype) is not tl.pointer_type:
            return slow(self, other)
        if type(other) is tl.constexpr:
            other = other.value
        size = max(1, dtype.element_ty.primitive_bitwidth // 8)
        if type(other) is int and 0 <= other < 2**31:
            return made(self.handle.data + np.uint64(size * other), dtype, is_block=is_block(self))
        if type(other) is not tl.tensor or other.dtype.name not in WHOLE:
            return slow(self, other)
        data = self.handle.data + size * other.handle.data.astype(np.uint64)
        return made(data, dtype, is_block=is_block(self) or is_block(other))

    return run


def fast_operator(name: str, slow: Operator) -> Operator:
    """Returns the method `name` of Triton's tensors, computed at once where that is the same."""
    bare = name.strip("_")
    if name not in TRITONS:
        return slow
    if bare in COMPARISONS:
        types = ALIKE | {"int1"} if bare in ("eq", "ne") else ALIKE
        return at_once(slow, COMPARISONS[bare], types, swaps=False, compares=True)
    swaps = bare not in ARITHMETIC
    compute, types = ARITHMETIC[bare.removeprefix("r") if swaps else bare]
    run = at_once(slow, compute, types, swaps=swaps, compares=False)
    return _add_to_pointers(run) if name == "__add__" else run


def use_shortcuts() -> None:
    """Replaces those of Triton's functions of which each launch makes thousands of calls."""
    _unwrap_at_once()
    _keep_scalars()
    _expand_at_once()
    _choose_at_once()
    _cast_at_once()
    _load_at_once()


def _unwrap_at_once() -> None:
    unwrap = tl.core._unwrap_if_constexpr
    bare = {tl.tensor, int, float, bool, str, type(None)}

    def unwrap_at_once(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in bare else unwrap(value)

    for module in (tl.core, tl):
        module._unwrap_if_constexpr = unwrap_at_once


def _keep_scalars() -> None:
    """Keeps the scalar of each number, which no operation writes to."""
    to_tensor = TritonSemantic.to_tensor
    kept: dict[tuple[type, float], Any] = {}

    def kept_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        if type(x) is tl.tensor:
            return x
        value = x.value if type(x) is tl.constexpr else x
        kind = type(value)
        if kind is not int and kind is not bool:
            return to_tensor(self, x, check_type)
        key = kind, value
        if key not in kept:
            scalar = kept[key] = to_tensor(self, value)
            scalar.handle.data.setflags(write=False)
        return kept[key]

    TritonSemantic.to_tensor = kept_tensor


def _expand_at_once() -> None:
    expand = TritonSemantic.expand_dims
    index = (slice(None),) * 4

    def expand_at_once(self: Any, input: Any, axis: int) -> Any:
        if not is_block(input) or type(axis) is not int or not 0 <= axis <= 4:
            return expand(self, input, axis)
        return made(input.handle.data[(*index[:axis], None)], input.dtype, is_block=True)

    TritonSemantic.expand_dims = expand_at_once


def _choose_at_once() -> None:
    where = TritonSemantic.where

    def where_at_once(self: Any, condition: Any, x: Any, y: Any) -> Any:
        first = x if type(x) is tl.tensor else y
        if type(first) is not tl.tensor or condition.dtype is not tl.int1:
            return where(self, condition, x, y)
        name, has_block, values = first.dtype.name, is_block(condition), []
        for value in (x, y):
            if type(value) is tl.tensor and value.dtype.name == name:
                has_block = has_block or is_block(value)
                values.append(value.handle.data)
            elif type(value) is not tl.tensor and _fits(value, name, False):
                values.append(value)
            else:
                return where(self, condition, x, y)
        data = np.where(condition.handle.data, *values)
        return made(data, first.dtype, is_block=has_block)

    TritonSemantic.where = where_at_once


_CASTS = {"int32": np.int32, "int64": np.int64, "fp16": np.float16, "fp32": np.float32}


def _cast_at_once() -> None:
    cast = TritonSemantic.cast

    def cast_at_once(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        scalar = dst_ty.scalar
        source, target = input.dtype.name, scalar.name
        if source == target:
            return input
        known = source in _CASTS or (source == "int1" and target in WHOLE)
        if not known or target not in _CASTS or fp_downcast_rounding is not None:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        return made(input.handle.data.astype(_CASTS[target]), scalar, is_block=is_block(input))

    TritonSemantic.cast = cast_at_once


def _load_at_once() -> None:
    load_legacy = TritonSemantic._load_legacy
    kinds = {"int8": np.int8, "uint8": np.uint8, "uint32": np.uint32} | _CASTS

    @functools.cache
    def filled(value: bool | int, kind: Any, shape: tuple[int, ...]) -> Any:
        data = np.full(shape, value, kind)
        data.setflags(write=False)
        return data

    def load(self: Any, ptr: Any, mask: Any, other: Any, *modes: Any) -> Any:
        dtype = ptr.dtype
        name = dtype.element_ty.name if type(dtype) is tl.pointer_type else ""
        has_block = is_block(ptr)
        if (
            name not in kinds
            or any(modes[:2])  # checks of boundaries, padding
            or (mask is None and other is not None)
            or (mask is not None and is_block(mask) != has_block)
            or (other is not None and (other.dtype.name != name or is_block(other) > has_block))
        ):
            return load_legacy(self, ptr, mask, other, *modes)
        kind, where = np.dtype(kinds[name]), ptr.handle.data
        shown = filled(True, bool, where.shape) if mask is None else mask.handle.data
        if where.shape != shown.shape:
            where, shown = np.broadcast_arrays(where, shown)
        else_ = filled(0, kind, where.shape) if other is None else other.handle.data
        if else_.shape != where.shape:
            if len(else_.shape) > len(where.shape):
                return load_legacy(self, ptr, mask, other, *modes)
            else_ = np.broadcast_to(else_, where.shape)
        data = interpreter._interpreter.load(where, shown, else_, kind)
        return made(data, dtype.element_ty, is_block=has_block)

    TritonSemantic._load_legacy = load
