"""Ragged multi-LoRA problems at the head and at the embedding, whose wide matrix is in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from kernels.lora_plan import (
    PAGE_ROWS,
    LoraPlan,
    LoraPlanCounts,
    lora_plan_size,
    write_lora_plan,
)
from kernels.lora_rows import ROW_BITS, UNIT_BYTES, SiteRows
from tests.lora_kernel_cases import BLANK, Mixture, Run, parts_of
from tests.lora_strips import Matrices, in_int8, make_site_rows, pages_of

# Ranks of the adapters (0: the adapter lacks the site, and has a page at others), and runs of rows.
Mix = tuple[tuple[int, ...], tuple[Run, ...]]
MIXES: dict[str, Mix] = {
    "one row": ((16,), ((0, 1),)),
    "ragged": ((8, 17, 0, 40), ((None, 2), (0, 3), (2, 1), (1, 9), (3, 2), (None, 1))),
    "long runs": ((20, 0, 4), ((None, 1), (0, 70), (1, 65), (2, 2))),
    "nobody has it": ((0, 0), ((None, 1), (0, 2), (1, 1))),
    "weights": (
        (8, 17, 0),
        ((None, 1), (((0, 0.5), (1, -2.0)), 3), (((BLANK, 1.0), (2, 3.0), (0, 1.5)), 70), (1, 2)),
    ),
}


@dataclass(frozen=True, slots=True)
class VocabularyCase:
    x: torch.Tensor  # [T, H], of the head
    y: torch.Tensor  # [T, V] float32 or [T, H], before
    token_ids: torch.Tensor  # [T] int32
    sources: torch.Tensor  # [T] int32, some of them in `drawn`
    drawn: torch.Tensor
    site: SiteRows
    weights: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # A and B of each adapter
    adapters: tuple[tuple[int, ...], ...]  # pages
    runs: tuple[Run, ...]
    num_pages: int
    blank: int  # page
    is_head: bool
    has_site: bool  # what the plan says

    def plan(self, *, large: bool = True, graph_rows: int | None = None) -> LoraPlan:
        """Returns the plan; with `graph_rows`, that of a CUDA graph of that many rows."""
        large, tokens = large and not self.is_head, len(self.x)
        buffer, counts = self._write(large, self.has_site)
        if graph_rows is None:
            return LoraPlan.for_step(buffer, counts, tokens, self.num_pages, large=large)
        return LoraPlan.for_graph(buffer, graph_rows, tokens, self.num_pages, large=large)

    def buffer(self, *, large: bool, has_site: bool) -> torch.Tensor:
        """Returns the plan as it is in memory."""
        return self._write(large, has_site)[0]

    def _write(self, large: bool, has_site: bool) -> tuple[torch.Tensor, LoraPlanCounts]:
        tokens = len(self.x)
        # Elements beyond the counts must not be read.
        size = lora_plan_size(tokens, self.num_pages, large=large)
        buffer = np.full(size, 1 << 30, dtype=np.int32)
        lists = [self._listed(owner) for owner, _ in self.runs]
        runs = [
            (tuple(page for page, _ in own), rows)
            for own, (_, rows) in zip(lists, self.runs, strict=True)
        ]
        counts = write_lora_plan(
            buffer,
            runs,
            tokens,
            self.num_pages,
            [tuple(weight for _, weight in own) for own in lists],
            large=large,
            has_head=has_site and self.is_head,
            has_embedding=has_site and not self.is_head,
        )
        return torch.from_numpy(buffer).to(self.y.device), counts

    def _listed(self, owner: int | Mixture | None) -> list[tuple[int, float]]:
        """Returns the pages of a run, with their weights."""
        return [
            (page, weight)
            for one, weight in parts_of(owner)
            for page in ((self.blank,) if one == BLANK else self.adapters[one])
        ]

    def row(self, row: int, owner: int | None) -> VocabularyCase:
        """Returns one row, of this owner, as a case."""
        one = slice(row, row + 1)
        fields = ("x", "y", "token_ids", "sources")
        rows = {name: getattr(self, name)[one].contiguous() for name in fields}
        return replace(self, runs=((owner, 1),), **rows)

    def delta(self) -> torch.Tensor:
        """Returns the delta in float64, of the values as they are stored."""
        out = torch.zeros_like(self.y, dtype=torch.float64)
        earlier = self.drawn.clamp(min=0)[self.sources.clamp(min=0)]
        ids = torch.where(self.sources < 0, self.token_ids, earlier).long()
        for here, owner in self._runs():
            for adapter, weight in parts_of(owner):
                if adapter != BLANK:
                    a, b = (side.double() for side in self.weights[adapter])
                    h = self.x[here].double() @ a.T if self.is_head else a.T[ids[here]]
                    out[here] += weight * (h @ b)
        return out

    def untouched(self) -> torch.Tensor:
        """Returns [T] bool: the rows without the site."""
        found = torch.ones(len(self.x), dtype=torch.bool, device=self.y.device)
        for here, owner in self._runs():
            own = (one for one, _ in parts_of(owner) if one != BLANK)
            found[here] = all(len(self.weights[one][0]) == 0 for one in own)
        return found

    def rows_of(self, owner: int) -> torch.Tensor:
        found = torch.zeros(len(self.x), dtype=torch.bool, device=self.y.device)
        for here, adapter in self._runs():
            found[here] = adapter == owner
        return found

    def error_of(self, y: torch.Tensor) -> float:
        """Returns the relative error of the delta."""
        expected, found = self.delta(), y.double() - self.y.double()
        return float((found - expected).norm() / expected.norm().clamp_min(1e-30))

    def fill(self, entries: torch.Tensor, value: float) -> None:
        """Fills the first row of the strips of these entries."""
        for entry in entries.tolist():
            if entry:
                start = (entry >> ROW_BITS) * (UNIT_BYTES // self.site.heap.element_size())
                self.site.heap[start : start + 16] = value

    def _runs(self) -> list[tuple[slice, int | Mixture | None]]:
        starts = np.cumsum([0, *(rows for _, rows in self.runs)]).tolist()
        return [
            (slice(*ends), run[0]) for ends, run in zip(pairwise(starts), self.runs, strict=True)
        ]


def make_vocabulary_case(
    mix: str | Mix,
    kind: str,
    *,
    vocab: int,
    piece: int,
    hidden: int,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    has_site: bool = True,
    is_int8: bool = False,
) -> VocabularyCase:
    """Returns a case of the head or the embedding with shuffled pages; memory that no adapter has
    is full of NaN. `piece`: columns of a strip; the vocabulary's own number for one strip."""
    ranks, runs = MIXES[mix] if isinstance(mix, str) else mix
    is_head = kind == "head"
    draw = torch.Generator().manual_seed(len(runs))
    num_pages = [max(1, -(-rank // PAGE_ROWS)) for rank in ranks]
    total = sum(num_pages) + 3
    order = torch.randperm(total, generator=draw).tolist()
    starts = np.cumsum([0, *num_pages]).tolist()
    adapters = tuple(tuple(order[a:b]) for a, b in pairwise(starts))
    owners = (owner for owner, _ in runs if not isinstance(owner, int))
    mixed = [one for owner in owners for one, _ in parts_of(owner)]
    width_a, width_b = (hidden, vocab) if is_head else (vocab, hidden)
    scale = hidden**-0.5 if is_head else 1.0

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    weights = tuple(
        ((numbers(rank, width_a) * scale).to(dtype), numbers(rank, width_b).to(dtype))
        for rank in ranks
    )
    scales: Matrices = {}
    if is_int8:
        stored = [in_int8(*own) for own in weights]
        a, b, scales = (_pages([own[side] for own in stored], adapters) for side in (0, 1, 2))
        weights = tuple((a8.float() * each[:, None], b8.float()) for a8, b8, each in stored)
    else:
        a, b = (_pages([own[side] for own in weights], adapters) for side in (0, 1))
    wide = _cut(b if is_head else a, vocab, piece)
    site = _site_rows(
        total, [a] if is_head else wide, wide if is_head else [b],
        (width_a, width_b), is_head, piece, dtype, device, scales,
    )  # fmt: skip
    tokens = sum(rows for _, rows in runs)
    ids = torch.randint(0, vocab, (tokens,), generator=draw, dtype=torch.int32)
    ids[0], ids[-1] = vocab - 1, 0
    sources = torch.full((tokens,), -1, dtype=torch.int32)
    drawn = torch.tensor([vocab - 1, -1, 130], dtype=torch.int32)
    chosen = torch.randint(0, 3, (tokens,), generator=draw, dtype=torch.int32)
    sources[1::3] = chosen[1::3]
    y = numbers(tokens, vocab) if is_head else torch.zeros(tokens, hidden).to(dtype)
    y[0, 0] = -0.0
    return VocabularyCase(
        numbers(tokens, hidden).to(device, dtype),
        y.to(device),
        ids.to(device),
        sources.to(device),
        drawn.to(device),
        site,
        tuple((one.to(device), other.to(device)) for one, other in weights),
        adapters,
        tuple(runs),
        total + sum(1 if one == BLANK else num_pages[one] for one in mixed),
        total,
        is_head,
        has_site,
    )


def _pages(matrices: Sequence[torch.Tensor], adapters: Sequence[tuple[int, ...]]) -> Matrices:
    return {
        page: rows
        for matrix, own in zip(matrices, adapters, strict=True)
        for page, rows in pages_of(matrix, own).items()
    }


def _cut(pages: Matrices, width: int, piece: int) -> list[Matrices]:
    """Cuts the columns into pieces; the last one has zeros beyond the matrix."""
    count = -(-width // piece)
    padded = {
        page: torch.nn.functional.pad(rows, (0, count * piece - width))
        for page, rows in pages.items()
    }
    return [
        {page: rows[:, i * piece : (i + 1) * piece].contiguous() for page, rows in padded.items()}
        for i in range(count)
    ]


def _site_rows(
    num_pages: int,
    a: list[Matrices],
    b: list[Matrices],
    widths: tuple[int, int],
    is_head: bool,
    piece: int,
    dtype: torch.dtype,
    device: str,
    scales: Matrices,  # of A in int8
) -> SiteRows:
    """Lays all strips of both sides into one heap, as if each were a slice's A."""
    strips: list[Matrices] = [*a, *b]
    none: list[Matrices] = [{} for _ in strips]
    of_a = [scales for _ in a] if scales else []
    flat = make_site_rows(num_pages, strips, none, 0, [0] * len(strips), dtype, device, scales=of_a)
    return SiteRows(
        flat.heap,
        flat.a_entries[:, : len(a)],
        flat.a_entries[:, len(a) :],
        widths[0],
        (widths[1],),
        piece,
        activations=dtype,
    )
