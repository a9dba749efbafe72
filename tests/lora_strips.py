"""The adapters' rows of one site in a heap, from dense matrices: for kernels without a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.lora_plan import PAGE_ROWS
from kernels.lora_rows import BLANK_ENTRY, UNIT_BYTES, SiteRows, make_entry

Matrices = Mapping[int, torch.Tensor]  # by page: [rows, width]


def pages_of(matrix: torch.Tensor, pages: Sequence[int]) -> Matrices:
    """Cuts [rank, width] into pages."""
    return {
        page: matrix[i * PAGE_ROWS : (i + 1) * PAGE_ROWS]
        for i, page in enumerate(pages)
        if i * PAGE_ROWS < len(matrix)
    }


def make_site_rows(
    num_pages: int,
    a: Sequence[Matrices],  # of each slice, width K
    b: Sequence[Matrices],  # of each slice, width N_s
    in_features: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    other_entries: int = 3,  # entries of a page that belong to other sites
    affine: Sequence[Matrices] = (),  # of each slice: [1 or 2, N_s], of first pages
) -> SiteRows:
    """Returns the rows with NaN between the strips, which are in an order of their own; page
    `num_pages` is blank."""
    draw = torch.Generator().manual_seed(3)
    flat = [
        (entry, page, rows)
        for entry, matrices in enumerate([*a, *b, *affine])
        for page, rows in matrices.items()
    ]
    unit = UNIT_BYTES // dtype.itemsize
    table = torch.zeros((num_pages + 1, other_entries + 3 * len(sizes)), dtype=torch.int64)
    table[num_pages] = BLANK_ENTRY
    starts, end = [], unit
    for i in torch.randperm(len(flat), generator=draw).tolist():
        entry, page, rows = flat[i]
        starts.append((end, rows))
        table[page, other_entries + entry] = make_entry(end * dtype.itemsize, len(rows))
        end += (-(-rows.numel() // unit) + 1) * unit
    heap = torch.full((end,), float("nan"), dtype=dtype, device=device)
    for start, rows in starts:
        heap[start : start + rows.numel()] = rows.reshape(-1).to(device, dtype)
    entries = table.to(device)[:, other_entries:]
    slices = len(sizes)
    a_entries, b_entries = entries[:, :slices], entries[:, slices : 2 * slices]
    step = slices if affine else 0
    return SiteRows(heap, a_entries, b_entries, in_features, tuple(sizes), affine=step)
