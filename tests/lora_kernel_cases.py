"""Ragged multi-LoRA problems for the kernels' tests: pools, runs of rows, plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.lora_plan import (
    PAGE_ROWS,
    LoraPlan,
    LoraPlanCounts,
    lora_plan_size,
    write_lora_plan,
)

Run = tuple[int | None, int]  # adapter (None: the base), rows


@dataclass(frozen=True, slots=True)
class LoraCase:
    x: torch.Tensor  # [T, K]
    y: torch.Tensor  # [T, sum of N_s], before
    a_pool: torch.Tensor
    b_pools: tuple[torch.Tensor, ...]
    adapters: tuple[tuple[int, ...], ...]  # pages
    runs: tuple[Run, ...]
    max_tokens: int
    max_pages: int

    def plan(self, *, large: bool = True, graph_rows: int | None = None) -> LoraPlan:
        """Returns the plan; with `graph_rows`, that of a CUDA graph of that many rows."""
        large = large and graph_rows is None
        buffer, counts = write_plan(self, large=large)
        device = torch.from_numpy(buffer).to(self.x.device)
        if graph_rows is not None:
            return LoraPlan.for_graph(device, graph_rows, self.max_tokens, self.max_pages)
        return LoraPlan.for_step(device, counts, self.max_tokens, self.max_pages, large=large)

    def delta(self) -> torch.Tensor:
        """Returns the delta in float64, of the values as they are stored."""
        out = torch.zeros_like(self.y, dtype=torch.float64)
        starts = np.cumsum([0, *(b.shape[1] for b in self.b_pools)]).tolist()
        row = 0
        for adapter, rows in self.runs:
            here = slice(row, row + rows)
            row += rows
            if adapter is None:
                continue
            ids = [p * PAGE_ROWS + i for p in self.adapters[adapter] for i in range(PAGE_ROWS)]
            for s, b in enumerate(self.b_pools):
                h = self.x[here].double() @ self.a_pool[s, ids].double().T
                out[here, starts[s] : starts[s + 1]] = h @ b[ids].double()
        return out

    def base_rows(self) -> torch.Tensor:
        owners = [adapter is None for adapter, rows in self.runs for _ in range(rows)]
        return torch.tensor(owners, device=self.x.device)


def write_plan(case: LoraCase, *, large: bool) -> tuple[NDArray[np.int32], LoraPlanCounts]:
    # Elements beyond the counts must not be read.
    size = lora_plan_size(case.max_tokens, case.max_pages, large=large)
    buffer = np.full(size, 1 << 30, dtype=np.int32)
    runs = [(() if i is None else case.adapters[i], rows) for i, rows in case.runs]
    counts = write_lora_plan(buffer, runs, case.max_tokens, case.max_pages, large=large)
    return buffer, counts


def make_case(
    ranks: Sequence[int],
    runs: Sequence[Run],
    *,
    in_features: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: str = "cpu",
    integers: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
) -> LoraCase:
    """Returns a case with shuffled pages; pages without an adapter are full of NaN."""
    draw = torch.Generator().manual_seed(seed)
    num_pages = [-(-rank // PAGE_ROWS) for rank in ranks]
    total = sum(num_pages) + 3
    order = torch.randperm(total, generator=draw).tolist()
    starts = np.cumsum([0, *num_pages]).tolist()
    adapters = tuple(tuple(order[a:b]) for a, b in pairwise(starts))
    num_tokens = sum(rows for _, rows in runs)

    def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
        if integers:
            return torch.randint(-1, 2, shape, generator=draw).to(dtype)
        return (torch.randn(shape, generator=draw) * scale).to(dtype)

    def pool(width: int, scale: float) -> torch.Tensor:
        rows = torch.full((total * PAGE_ROWS, width), float("nan"), dtype=dtype)
        for rank, pages in zip(ranks, adapters, strict=True):
            ids = [page * PAGE_ROWS + i for page in pages for i in range(PAGE_ROWS)]
            rows[ids] = 0.0
            rows[ids[:rank]] = numbers(rank, width, scale=scale)
        return rows

    case = LoraCase(
        numbers(num_tokens, in_features),
        numbers(num_tokens, sum(sizes)),
        torch.stack([pool(in_features, in_features**-0.5) for _ in sizes]),
        tuple(pool(size, 1.0) for size in sizes),
        adapters,
        tuple(runs),
        max_tokens or num_tokens,
        total,
    )
    if device == "cpu":
        return case
    return replace(
        case,
        x=case.x.to(device),
        y=case.y.to(device),
        a_pool=case.a_pool.to(device),
        b_pools=tuple(b.to(device) for b in case.b_pools),
    )


def with_drawn_runs(case: LoraCase, draw: torch.Generator, *, longest: int) -> LoraCase:
    """Returns the case's rows in other runs: the first of the base, each further run of another
    adapter."""
    runs: list[Run] = []
    left, adapters = case.x.shape[0], torch.randperm(len(case.adapters), generator=draw).tolist()
    while left:
        rows = min(left, int(torch.randint(1, longest + 1, (), generator=draw)))
        runs.append((adapters.pop() if runs else None, rows))
        left -= rows
    return replace(case, runs=tuple(runs))


def error_of(case: LoraCase, y: torch.Tensor) -> float:
    """Returns the relative error of the delta: a large y would hide it."""
    expected = case.delta()
    found = y.double() - case.y.double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
