"""The Triton kernel of `mask_logits_`: a program masks a stretch of one row.

Logits of allowed tokens are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped

BLOCK = 4096  # tokens per program
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["masks_ptr", "rows_ptr"])
def _mask_logits_kernel(
    logits_ptr,  # [R, V]
    masks_ptr,  # [N, WORDS]
    rows_ptr,  # [N]
    STRIDE_LOGITS: tl.constexpr,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    masked = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    start_overlapped(OVERLAPPED)
    row = tl.load(rows_ptr + masked).to(tl.int64)
    words = tl.load(masks_ptr + masked * WORDS + ids // 32, mask=inside, other=-1)
    is_forbidden = inside & (((words >> (ids % 32)) & 1) == 0)
    places = logits_ptr + row * STRIDE_LOGITS + ids
    x = tl.load(places, mask=is_forbidden, other=0.0)
    # A comparison with NaN is false: NaN and infinity stay, so that the draw finds them.
    tl.store(places, tl.where(x < float("inf"), float("-inf"), x), mask=is_forbidden)


_launch = Launcher(_mask_logits_kernel, launch_pdl=OVERLAPS)


def launch_mask_logits(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    vocab, (num_masked, words) = logits.shape[1], masks.shape
    assert logits.stride(1) == 1
    assert masks.is_contiguous()
    assert masks.dtype == rows.dtype == torch.int32
    assert words == -(-vocab // 32)
    assert rows.shape == (num_masked,)
    assert num_masked < 65536
    _launch(
        (-(-vocab // BLOCK), num_masked, 1),
        (logits,),
        (masks, rows),
        (logits.stride(0), vocab, words, BLOCK, OVERLAPS),
        NUM_WARPS,
    )
