"""The kernel by which ranks exchange rows, as one of three runs it: the others have sent theirs."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import add_rms_norm_reference
from kernels.triton_exchange_norm import launch_exchange_norm
from tests.interpreter.test_elementwise import assert_near, randn

SIZE, MAX_ROWS = 3, 8


class Memory:
    """A rank's memory for rows of every rank, and the signals behind them."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        count = SIZE * MAX_ROWS
        self.bytes = torch.zeros(count * (hidden * dtype.itemsize + 4), dtype=torch.uint8)
        parts = self.bytes[: count * hidden * dtype.itemsize]
        self.parts = parts.view(dtype).view(SIZE, MAX_ROWS, hidden)
        self.signals = self.bytes[parts.numel() :].view(torch.int32).view(SIZE, MAX_ROWS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize(("rows", "hidden", "scale"), [(1, 64, 1.0), (5, 36, 0.5), (8, 128, 1.0)])
def test_a_rank_sends_its_rows_and_adds_up_those_of_all(
    rank: int, rows: int, hidden: int, scale: float, dtype: torch.dtype
) -> None:
    parts = [randn(rows, hidden, dtype=dtype, seed=i) for i in range(SIZE)]
    residual, weight = randn(rows, hidden, dtype=dtype, seed=7), randn(hidden, dtype=dtype, seed=8)
    memory = [Memory(hidden, dtype) for _ in range(SIZE)]
    for other in range(SIZE):
        if other != rank:
            memory[rank].parts[other, :rows] = parts[other]
            memory[rank].signals[other, :rows] = 1
    ranks = torch.tensor([*(one.bytes.data_ptr() for one in memory), rank])
    total = sum(one.float() for one in parts)
    assert isinstance(total, torch.Tensor)
    expected, added = add_rms_norm_reference(total.to(dtype), residual, weight, 1e-6, scale)
    normed = launch_exchange_norm(parts[rank], residual, weight, 1e-6, scale, ranks, MAX_ROWS)
    assert torch.equal(residual, added)
    assert_near(normed, expected)
    assert not memory[rank].signals.any(), "each is cleared for the next exchange"
    for other in range(SIZE):
        assert torch.equal(memory[other].parts[rank, :rows], parts[rank])
        assert not memory[other].parts[:, rows:].any()
        if other != rank:
            assert memory[other].signals[rank].tolist() == [1] * rows + [0] * (MAX_ROWS - rows)
