"""Operands in the interpreter, whose shortcuts decide and compute as Triton does."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from tests.interpreter.operators import TRITONS, Operator, fast_operator, made


@triton.jit
def _add_kernel(x_ptr, number: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + number)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_refused(dtype: torch.dtype, number: int) -> None:
    with pytest.raises(InterpreterError, match="Nonrepresentable integer"):
        _add_kernel[(1,)](torch.ones(1, dtype=dtype), number)


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 70_000, -1])
def test_a_number_of_64_bits_is_rounded_to_the_float_of_a_block(number: int) -> None:
    x = torch.ones(1)
    _add_kernel[(1,)](x, number)
    assert torch.equal(x, torch.ones(1) + float(number))


TYPES = {
    "int1": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint32": np.uint32,
    "fp16": np.float16,
    "fp32": np.float32,
}
SHAPES = ((), (1,), (4,), (1, 4), (4, 1))
NUMBERS = (0, 1, -3, 5, 2049, 2**31, 0.5, -0.0, 1e-3, True)


def block(name: str, shape: tuple[int, ...], seed: int) -> Any:
    values = np.random.default_rng(seed).integers(1, 7, shape or (1,))
    if name in ("fp16", "fp32"):
        values = values / 3 - 1
    return made(values.astype(TYPES[name]), getattr(tl, long_name(name)), is_block=bool(shape))


def long_name(name: str) -> str:
    return {"fp16": "float16", "fp32": "float32"}.get(name, name)


def facts(operator: Operator, left: Any, right: Any) -> tuple[object, ...]:
    """Returns all that a program sees of a result, or that there is none."""
    try:
        found = operator(left, right)
    except Exception:
        return ("refused",)
    data = found.handle.data
    sizes = [size.value for size in found.shape]
    return str(found.type), found.dtype.name, found.numel.value, sizes, data.dtype, data.tobytes()


@pytest.mark.filterwarnings("ignore")  # NumPy's, of shifts and overflows, and Triton's
@pytest.mark.parametrize("name", sorted(TRITONS))
def test_an_operator_gives_what_triton_gives(name: str) -> None:
    """Compares them beside every type, in five shapes, and beside numbers."""

    def slow(left: Any, right: Any) -> Any:
        return TRITONS[name](left, right, _semantic=interpreter.interpreter_semantic)

    fast = fast_operator(name, slow)
    assert fast is not slow
    shapes = list(itertools.product(SHAPES, SHAPES))
    for i, (mine, theirs) in enumerate(itertools.product(TYPES, TYPES)):
        for shape, other in shapes[i % 3 :: 3]:
            left, right = block(mine, shape, i), block(theirs, other, i + 1)
            assert facts(fast, left, right) == facts(slow, left, right), (mine, theirs)
    for mine, shape, number in itertools.product(TYPES, SHAPES[::2], NUMBERS):
        left = block(mine, shape, 3)
        assert facts(fast, left, number) == facts(slow, left, number), (mine, number)
        assert facts(fast, left, tl.constexpr(number)) == facts(slow, left, tl.constexpr(number))


@triton.jit
def _point_kernel(x_ptr, out_ptr, step, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + 2 + at[:, None] * step).reshape(BLOCK))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.int64, torch.bool])
def test_offsets_count_elements_of_any_size(dtype: torch.dtype) -> None:
    x = torch.arange(40).to(dtype)
    out = torch.zeros(8, dtype=dtype)
    _point_kernel[(1,)](x, out, 3, 8)
    _point_kernel[(1,)](x[34:], out[:2], -1, 2)
    assert torch.equal(out, torch.cat((x[[36, 35]], x[2:26:3][2:])))
