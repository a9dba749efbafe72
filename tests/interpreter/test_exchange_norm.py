"""The kernels by which ranks exchange rows, as one of three runs them: the others have sent
theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.collective import (
    MAX_BRIDGE_PAGES,
    MAX_BRIDGE_ROWS,
    MISSING,
    RowMemory,
    max_shared_rows,
)
from kernels.lora_plan import Bridge
from kernels.lora_shrink_expand import lora_shrink
from kernels.rms_norm import add_rms_norm_reference
from kernels.triton_exchange_norm import launch_exchange_norm
from kernels.triton_lora_add_rms_norm import launch_lora_add_rms_norm
from kernels.triton_lora_exchange_norm import launch_lora_exchange_norm
from tests.interpreter.test_elementwise import assert_near, randn
from tests.lora_kernel_cases import make_case

SIZE = 3
MAX_ROWS = max_shared_rows(SIZE)


class Memory:
    """A rank's memory: rows and bridges of every rank."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        row_bytes = hidden * dtype.itemsize
        num_bytes = RowMemory.num_bytes(SIZE, row_bytes)
        self.bytes = torch.full((num_bytes,), MISSING, dtype=torch.int8)
        bridges = RowMemory(torch.empty(SIZE + 1), MAX_ROWS).bridge_start(row_bytes)
        self.parts = self.bytes[:bridges].view(dtype).view(SIZE, MAX_ROWS, hidden)
        shape = (SIZE, MAX_BRIDGE_PAGES, MAX_BRIDGE_ROWS, 16)
        self.bridges = self.bytes[bridges:].view(torch.float32).view(shape)


class Ranks:
    """The memory of three ranks, of which the others have sent their parts."""

    def __init__(self, rank: int, parts: list[torch.Tensor]) -> None:
        self.rank, self.parts = rank, parts
        rows, hidden = parts[0].shape
        self.memory = [Memory(hidden, parts[0].dtype) for _ in parts]
        for other in self.others:
            self.memory[rank].parts[other, :rows] = parts[other]
        places = [*(one.bytes.data_ptr() for one in self.memory), rank]
        self.shared = RowMemory(torch.tensor(places), MAX_ROWS)

    @property
    def others(self) -> list[int]:
        return [one for one in range(SIZE) if one != self.rank]

    @property
    def total(self) -> torch.Tensor:
        total = sum(one.float() for one in self.parts)
        assert isinstance(total, torch.Tensor)
        return total.to(self.parts[0].dtype)

    def check_sent(self) -> None:
        rank, rows = self.rank, len(self.parts[0])
        assert (self.memory[rank].bytes == MISSING).all(), "all is cleared for the next exchange"
        for other in self.others:
            memory = self.memory[other]
            assert torch.equal(memory.parts[rank, :rows], self.parts[rank])
            memory.parts[rank, :rows].view(torch.int8).fill_(MISSING)
            assert (memory.parts.view(torch.int8) == MISSING).all(), "no other row is sent"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize(("rows", "hidden", "scale"), [(1, 64, 1.0), (5, 36, 0.5), (8, 128, 1.0)])
def test_a_rank_sends_its_rows_and_adds_up_those_of_all(
    rank: int, rows: int, hidden: int, scale: float, dtype: torch.dtype
) -> None:
    ranks = Ranks(rank, [randn(rows, hidden, dtype=dtype, seed=i) for i in range(SIZE)])
    residual, weight = randn(rows, hidden, dtype=dtype, seed=7), randn(hidden, dtype=dtype, seed=8)
    expected, added = add_rms_norm_reference(ranks.total, residual, weight, 1e-6, scale)
    x = ranks.parts[rank]
    normed = launch_exchange_norm(x, residual, weight, 1e-6, scale, ranks.shared)
    assert torch.equal(residual, added)
    assert_near(normed, expected)
    ranks.check_sent()


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("rank", range(SIZE))
def test_bridges_travel_beside_the_rows(rank: int, is_int8: bool) -> None:
    """The bits are those of one rank whose bridge has the planes of all."""
    cases = [
        make_case(
            [8, 40, 16, 64],
            [(0, 2), (None, 3), (1, 1), (3, 1), (2, 2)],
            in_features=64,
            sizes=(72,),
            dtype=torch.float16,
            seed=0,
            is_int8=is_int8,
        )
        for _ in range(SIZE)
    ]
    plan = cases[0].plan(large=False)
    inputs = [randn(*cases[0].x.shape, dtype=torch.float16, seed=20 + i) for i in range(SIZE)]
    bridges = [lora_shrink(x, cases[0].site, plan) for x in inputs]
    ranks = Ranks(rank, [randn(9, 72, dtype=torch.float16, seed=i) for i in range(SIZE)])
    residual, weight = randn(9, 72, dtype=torch.float16, seed=7), randn(72, seed=8).half()
    own, sums = ranks.memory[rank], [one.planes.sum(0)[0] for one in bridges]
    pages = [1, 1, 0, 0, 0, 3, 4, 1, 1]  # of each row's adapter
    for other in ranks.others:
        for row, num_pages in enumerate(pages):
            own.bridges[other, :num_pages, row] = sums[other][:num_pages, row]
    planes = torch.stack([one.planes.sum(0) for one in bridges])
    bridge = replace(bridges[rank], planes=planes)
    assert isinstance(bridge, Bridge)
    expected_residual = residual.clone()
    expected = launch_lora_add_rms_norm(
        ranks.total, expected_residual, weight, 1e-6, bridge, cases[0].site, plan, 1.0
    )
    normed = launch_lora_exchange_norm(
        ranks.parts[rank],
        residual,
        weight,
        1e-6,
        bridges[rank],
        cases[0].site,
        plan,
        1.0,
        ranks.shared,
    )
    assert torch.equal(residual, expected_residual)
    assert torch.equal(normed, expected)
    ranks.check_sent()
    for other in ranks.others:
        sent = ranks.memory[other].bridges[rank]
        for row, num_pages in enumerate(pages):
            assert torch.equal(sent[:num_pages, row], sums[rank][:num_pages, row])
            sent[:num_pages, row].view(torch.int32).fill_(MISSING)
        assert (sent.view(torch.int32) == MISSING).all(), "no other page is sent"


def test_numbers_that_mean_nothing_has_come_are_sent_as_another_nan() -> None:
    x = torch.randn(2, 64)
    x[1, 7:9] = torch.tensor([MISSING, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    ranks = Ranks(0, [x, *(torch.ones(2, 64) for _ in range(SIZE - 1))])
    weight = torch.ones(64)
    normed = launch_exchange_norm(x, torch.zeros(2, 64), weight, 1e-6, 1.0, ranks.shared)
    assert normed[0].isfinite().all()
    assert normed[1].isnan().all()
    for other in ranks.others:
        sent = ranks.memory[other].parts[0, 1].view(torch.int32)
        assert sent[7:9].tolist() == [0x7FFFFFFF, 0x7FC00000]
