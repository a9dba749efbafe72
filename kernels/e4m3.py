"""Rows in FP8 e4m3, each with a scale of its own: weights by output channel, activations by token.

A row is divided by its scale, its largest magnitude over 448, and rounded to the nearest e4m3:
three bits behind the leading one, within a factor of 2^15 below the largest. The scheme is the one
that vLLM and compressed-tensors call dynamic per token and per channel. Uses tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.backend import Capability, uses_triton

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
# Of a row's largest magnitude: rows of zeros, or nearly, are divided by no zero.
SMALLEST = 2.0**-100
# `torch._scaled_mm` reads rows of multiples of 16 bytes.
FEATURES = 16
FIRST_CAPABILITY: Capability = (8, 9)  # of CUDA, with e4m3 products

CHUNK = 16 * 1024 * 1024  # elements of weights that are in float32 at a time


@dataclass(frozen=True, slots=True)
class E4m3Rows:
    """A matrix in e4m3. Reads like a tensor where adapters read the base's weight."""

    values: torch.Tensor  # [rows, columns] float8_e4m3fn
    scales: torch.Tensor  # [rows] float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, rows: torch.Tensor | slice) -> E4m3Rows:
        """Returns the rows at these indices."""
        # A view of bytes: not every device can index e4m3.
        values = self.values.view(torch.uint8)[rows].view(E4M3)
        return E4m3Rows(values, self.scales[rows])

    def float(self) -> torch.Tensor:
        """Returns the values times the scales, [rows, columns] float32."""
        return self.values.float() * self.scales[:, None]

    def split(self, sizes: int | list[int]) -> tuple[E4m3Rows, ...]:
        """Returns views of so many rows each, as torch's `split` does."""
        parts = zip(torch.split(self.values, sizes), torch.split(self.scales, sizes), strict=True)
        return tuple(E4m3Rows(*part) for part in parts)

    def copy_(self, stored: E4m3Rows) -> None:
        """Copies rows of the same shape, from any device."""
        self.values.copy_(stored.values)
        self.scales.copy_(stored.scales)

    def write_(self, weight: torch.Tensor) -> None:
        """Quantises weight [rows, columns], of any float type and device, into these rows."""
        rows = max(1, CHUNK // weight.shape[1])
        for start in range(0, weight.shape[0], rows):
            part = quantize_reference(weight[start : start + rows].to(self.device))
            self.values[start : start + rows] = part.values
            self.scales[start : start + rows] = part.scales


def to_cached(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds keys or values to the type of their cache: in e4m3, magnitudes above 448 become 448.
    NaN stays NaN, and infinity becomes NaN: an overflow shows, as in other types."""
    if dtype == E4M3:
        # torch's cast would make NaN of all that is too large.
        x = torch.where(x.isinf(), torch.nan, x.clamp(-LARGEST, LARGEST))
    return x.to(dtype)


def indexable(cache: torch.Tensor) -> torch.Tensor:
    """Returns the cache, or a view of its bytes where its type is e4m3: torch cannot index that on
    every device."""
    return cache.view(torch.uint8) if cache.dtype == E4M3 else cache


def empty_rows(rows: int, columns: int, device: torch.device) -> E4m3Rows:
    values = torch.empty((rows, columns), dtype=E4M3, device=device)
    return E4m3Rows(values, torch.empty(rows, dtype=torch.float32, device=device))


def quantize_rows(x: torch.Tensor) -> E4m3Rows:
    """Quantises x [T, K]; on CUDA by one launch. The scales are the reference's to the bit."""
    if uses_triton(x):
        from kernels.triton_e4m3 import launch_quantize_rows

        return E4m3Rows(*launch_quantize_rows(x))
    return quantize_reference(x)


def quantize_reference(x: torch.Tensor) -> E4m3Rows:
    """Quantises x [T, K]. A row with NaN or infinity has NaN among its values, so that its products
    are NaN, too."""
    wide = x.float()
    largest = wide.abs().amax(1).clamp_min(SMALLEST)
    # With a number as one operand, torch multiplies by a reciprocal that it has rounded before.
    top = torch.full_like(largest, LARGEST)
    return E4m3Rows((wide * (top / largest)[:, None]).to(E4M3), largest / top)
