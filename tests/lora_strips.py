"""The adapters' rows of one site in a heap, from dense matrices: for kernels without a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.lora_plan import PAGE_ROWS
from kernels.lora_rows import BLANK_ENTRY, SCALE_BYTES, UNIT_BYTES, SiteRows, make_entry
from lora.adapter import Adapter, ModuleWeights
from lora.int8 import quantized

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
    scales: Sequence[Mapping[int, torch.Tensor]] = (),  # of each slice's A in int8, by page: [rows]
) -> SiteRows:
    """Returns the rows with NaN between the strips, which are in an order of their own; page
    `num_pages` is blank. With `scales` A and B are int8."""
    draw = torch.Generator().manual_seed(3)
    flat = [
        (entry, page, rows)
        for entry, matrices in enumerate([*a, *b, *affine])
        for page, rows in matrices.items()
    ]
    table = torch.zeros((num_pages + 1, other_entries + 3 * len(sizes)), dtype=torch.int64)
    table[num_pages] = BLANK_ENTRY
    places, end = list[tuple[int, torch.Tensor]](), UNIT_BYTES
    for i in torch.randperm(len(flat), generator=draw).tolist():
        entry, page, rows = flat[i]
        table[page, other_entries + entry] = make_entry(end, len(rows))
        offset = 0
        if entry < len(scales):
            places.append((end, scales[entry][page]))
            offset = SCALE_BYTES
        numbers = rows if rows.dtype == torch.int8 else rows.to(dtype)
        places.append((end + offset, numbers))
        end += (-(-(numbers.nbytes + offset) // UNIT_BYTES) + 1) * UNIT_BYTES
    # Bytes of 255 are NaN in every float type.
    memory = torch.full((end,), 255, dtype=torch.uint8)
    for start, numbers in places:
        memory[start : start + numbers.nbytes] = numbers.contiguous().view(-1).view(torch.uint8)
    heap = memory.to(device).view(torch.int8 if scales else dtype)
    entries = table.to(device)[:, other_entries:]
    slices = len(sizes)
    a_entries, b_entries = entries[:, :slices], entries[:, slices : 2 * slices]
    step = slices if affine else 0
    return SiteRows(
        heap, a_entries, b_entries, in_features, tuple(sizes), affine=step, activations=dtype
    )


def in_int8(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns A [r, K] and B [r, N] in int8, and the scales [r] of their products."""
    adapter = Adapter("", len(a), {"one": ModuleWeights(a, b)}, 0, is_noop=False)
    rows = quantized(adapter).modules["one"]
    assert rows.rank_scales is not None
    return rows.lora_a, rows.lora_b, rows.rank_scales
