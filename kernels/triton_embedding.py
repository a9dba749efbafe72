"""The Triton kernel of `gather_embedding`: a program copies a stretch of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped

BLOCK = 2048
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr", "sources_ptr", "drawn_ptr"])
def _gather_embedding_kernel(
    weight_ptr,  # [V, H]
    out_ptr,  # [T, H]
    token_ids_ptr,
    sources_ptr,
    drawn_ptr,
    STRIDE_WEIGHT: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    start_overlapped(OVERLAPPED)
    source = tl.load(sources_ptr + token)
    given = tl.load(token_ids_ptr + token)
    earlier = tl.load(drawn_ptr + source, mask=source >= 0, other=0)
    row = tl.where(source < 0, given, tl.maximum(earlier, 0)).to(tl.int64)
    values = tl.load(weight_ptr + row * STRIDE_WEIGHT + columns, mask=inside)
    tl.store(out_ptr + token * HIDDEN + columns, values, mask=inside)


_launch = Launcher(_gather_embedding_kernel, launch_pdl=OVERLAPS)


def launch_gather_embedding(
    token_ids: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    tokens, hidden = token_ids.shape[0], weight.shape[1]
    assert weight.stride(1) == 1
    assert tokens < 65536
    out = weight.new_empty((tokens, hidden))
    block = min(BLOCK, 1 << (hidden - 1).bit_length())
    _launch(
        (-(-hidden // block), tokens, 1),
        (weight, out),
        (token_ids, sources, drawn),
        (weight.stride(0), hidden, block, OVERLAPS),
        NUM_WARPS,
    )
    return out
