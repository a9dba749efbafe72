"""Ragged multi-LoRA problems for the kernels' tests: rank rows, runs of rows, plans."""

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
from kernels.lora_rows import SiteRows
from tests.lora_strips import in_int8, make_site_rows, pages_of

Rank = int | tuple[int, ...]  # of all slices, or of the first ones; 0: the adapter lacks it
BLANK = -1  # of a mixture: the blank page, which has every matrix without rows
Mixture = tuple[tuple[int, float], ...]  # adapters with their weights
Run = tuple[int | Mixture | None, int]  # adapter or adapters (None: the base), rows


@dataclass(frozen=True, slots=True)
class LoraCase:
    x: torch.Tensor  # [T, K]
    y: torch.Tensor  # [T, sum of N_s], before
    site: SiteRows
    weights: tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], ...]  # A and B: adapter, slice
    adapters: tuple[tuple[int, ...], ...]  # pages
    runs: tuple[Run, ...]
    max_tokens: int
    max_pages: int
    blank: int  # page
    affine: tuple[tuple[torch.Tensor, ...], ...] = ()  # [0, 1 or 2, N_s]: adapter, slice

    def listed(self, owner: int | Mixture | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Returns the pages of a run, and the weight of each."""
        pages, weights = list[int](), list[float]()
        for adapter, weight in parts_of(owner):
            own = (self.blank,) if adapter == BLANK else self.adapters[adapter]
            pages += own
            weights += [weight] * len(own)
        return tuple(pages), tuple(weights)

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
        starts = np.cumsum([0, *self.site.sizes]).tolist()
        row = 0
        for adapter, rows in self.runs:
            here = slice(row, row + rows)
            row += rows
            for one, factor in parts_of(adapter):
                for s, (a, b) in enumerate(() if one == BLANK else self.weights[one]):
                    columns = slice(starts[s], starts[s + 1])
                    delta = factor * (self.x[here].double() @ a.double().T @ b.double())
                    for rows_of, row_of in zip(
                        (self.y[here, columns].double(), 1.0), self.affine_of(one, s), strict=False
                    ):
                        delta = delta + rows_of * row_of.double()
                    out[here, columns] += delta
        return out

    def affine_of(self, adapter: int, index: int) -> torch.Tensor:
        """Returns [0, 1 or 2, N_s]."""
        if not self.affine:
            return self.y.new_empty((0, self.site.sizes[index]))
        return self.affine[adapter][index]

    def untouched(self) -> torch.Tensor:
        """Returns [T, sum of N_s] bool: the rows without adapter, and slices that theirs lacks."""
        found = torch.ones(self.y.shape, dtype=torch.bool, device=self.y.device)
        starts = np.cumsum([0, *self.site.sizes]).tolist()
        row = 0
        for adapter, rows in self.runs:
            for one, _ in parts_of(adapter):
                for s, (a, _) in enumerate(() if one == BLANK else self.weights[one]):
                    if len(a) or len(self.affine_of(one, s)):
                        found[row : row + rows, starts[s] : starts[s + 1]] = False
            row += rows
        return found

    def base_rows(self) -> torch.Tensor:
        owners = [adapter is None for adapter, rows in self.runs for _ in range(rows)]
        return torch.tensor(owners, device=self.x.device)


def parts_of(owner: int | Mixture | None) -> Mixture:
    if owner is None:
        return ()
    return ((owner, 1.0),) if isinstance(owner, int) else owner


def write_plan(case: LoraCase, *, large: bool) -> tuple[NDArray[np.int32], LoraPlanCounts]:
    # Elements beyond the counts must not be read.
    size = lora_plan_size(case.max_tokens, case.max_pages, large=large)
    buffer = np.full(size, 1 << 30, dtype=np.int32)
    lists = [case.listed(owner) for owner, _ in case.runs]
    runs = [(pages, rows) for (pages, _), (_, rows) in zip(lists, case.runs, strict=True)]
    weights = [own for _, own in lists]
    is_weighted = any(weight != 1.0 for own in weights for weight in own)
    counts = write_lora_plan(
        buffer,
        runs,
        case.max_tokens,
        case.max_pages,
        weights if is_weighted else None,
        large=large,
    )
    return buffer, counts


def make_case(
    ranks: Sequence[Rank],
    runs: Sequence[Run],
    *,
    in_features: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: str = "cpu",
    integers: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
    affine: Sequence[Rank] = (),  # affine rows: 0, 1 or 2
    is_int8: bool = False,
) -> LoraCase:
    """Returns a case with shuffled pages; memory that no adapter has is full of NaN."""
    draw = torch.Generator().manual_seed(seed)
    each = [(rank,) * len(sizes) if isinstance(rank, int) else rank for rank in ranks]
    num_pages = [-(-max(rank) // PAGE_ROWS) for rank in each]
    total = sum(num_pages) + 3
    mixed = sum(
        1 if one == BLANK else num_pages[one]
        for owner in dict.fromkeys(owner for owner, _ in runs)
        for one, _ in (() if isinstance(owner, int) else parts_of(owner))
    )
    order = torch.randperm(total, generator=draw).tolist()
    starts = np.cumsum([0, *num_pages]).tolist()
    adapters = tuple(tuple(order[a:b]) for a, b in pairwise(starts))
    num_tokens = sum(rows for _, rows in runs)

    def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
        if integers:
            return torch.randint(-1, 2, shape, generator=draw).to(dtype)
        return (torch.randn(shape, generator=draw) * scale).to(dtype)

    weights = tuple(
        tuple(
            (numbers(rank[s], in_features, scale=in_features**-0.5), numbers(rank[s], size))
            for s, size in enumerate(sizes)
        )
        for rank in each
    )
    stored: Sequence[Sequence[Sequence[torch.Tensor]]] = weights  # A, B, perhaps scales
    if is_int8:
        stored = tuple(tuple(in_int8(a, b) for a, b in own) for own in weights)
        weights = tuple(
            tuple((a.float() * scales[:, None], b.float()) for a, b, scales in own)
            for own in stored
        )
    cut = [
        [
            {
                p: m
                for own, w in zip(adapters, stored, strict=True)
                for p, m in pages_of(w[s][side], own).items()
            }
            for s in range(len(sizes))
        ]
        for side in range(3 if is_int8 else 2)
    ]
    each_affine = [(rows,) * len(sizes) if isinstance(rows, int) else rows for rows in affine]
    affine_rows = tuple(
        tuple(numbers(own[s], size, scale=0.3) for s, size in enumerate(sizes))
        for own in each_affine
    )
    first_pages = [
        {own[0]: rows[s] for own, rows in zip(adapters, affine_rows, strict=True) if len(rows[s])}
        for s in range(len(sizes) if affine_rows else 0)
    ]
    site = make_site_rows(
        total,
        *cut[:2],
        in_features,
        sizes,
        dtype,
        device,
        affine=first_pages,
        scales=cut[2] if is_int8 else (),
    )
    return LoraCase(
        numbers(num_tokens, in_features).to(device),
        numbers(num_tokens, sum(sizes)).to(device),
        site,
        tuple(tuple((a.to(device), b.to(device)) for a, b in own) for own in weights),
        adapters,
        tuple(runs),
        max_tokens or num_tokens,
        total + mixed,
        total,
        tuple(tuple(rows.to(device) for rows in own) for own in affine_rows),
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
