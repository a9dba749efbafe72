"""Copies of the matrices of an adapter's file to their strips in an image: scaled, transposed where
they have to be, and rounded once.

    the file's bytes --a few programs of the device, over the bus--> the image, both page-locked

Both memories are the host's: a CUDA device reads and writes page-locked memory by itself. So no
processor computes, and the interpreter, which the engine's thread needs too, is not taken 2,000
times for an adapter of Llama-3-8B. Where the list of copies is on a CPU, torch makes them.
"""

from __future__ import annotations

import torch

from kernels.strip_copies import StripCopies


def copy_strips(
    image: torch.Tensor,  # [elements] of the pool's type
    source: torch.Tensor,  # [elements] of the file's type
    copies: StripCopies,
    scales: torch.Tensor,  # [n] float32, of the strips
) -> torch.Tensor:
    """Writes the strips of the image. Returns [1] float32, on the device of `copies`: the largest
    magnitude of the numbers that were read, infinite if one of them is not finite.

    Each number becomes that of the file, times the scale in float32, rounded to the image's type.
    On a CUDA device both memories are page-locked, and stay as they are until the current stream
    has passed this call."""
    if copies.strips.is_cuda or copies.strips.is_meta:
        from kernels.triton_lora_strips import launch_copy_strips

        return launch_copy_strips(image, source, copies, scales)
    return copy_strips_reference(image, source, copies, scales)


def copy_strips_reference(
    image: torch.Tensor, source: torch.Tensor, copies: StripCopies, scales: torch.Tensor
) -> torch.Tensor:
    largest = torch.zeros(())
    for strip, scale in zip(copies.strips.tolist(), scales.tolist(), strict=True):
        start, row_stride, column_stride, rows, columns, width, place = strip
        start, place = start + source.storage_offset(), place + image.storage_offset()
        numbers = source.as_strided((1, rows, columns), (0, row_stride, column_stride), start)
        target = image.as_strided((1, rows, width), (0, width, 1), place)
        if scale != 1.0 and image.dtype != source.dtype:
            numbers = numbers.float() * scale
        # Three dimensions avoid torch's copy for transposed matrices, which lasts twice as long.
        target[:, :, :columns].copy_(numbers)
        if scale != 1.0 and image.dtype == source.dtype:
            target.mul_(scale)
        if columns < width:
            target[:, :, columns:].zero_()
        low, high = source.as_strided((rows, columns), (row_stride, column_stride), start).aminmax()
        largest = torch.maximum(largest, torch.maximum(-low, high).float())
    return largest.where(largest.isfinite(), torch.inf)[None]
