"""Numbers beside blocks in the interpreter, whose shortcuts decide as Triton does."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


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
