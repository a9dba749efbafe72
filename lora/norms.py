"""The size of an adapter's change to one module: the Frobenius norm of B A, scaled, and of offsets.

B A is never formed: for a head it would have the size of the head. With the Gram matrices of A and
B, r x r each, |B A|^2 = tr(A^T B^T B A) = sum((B^T B) * (A A^T)).
"""

from __future__ import annotations

import math

import torch

from lora.adapter import ModuleWeights

_CHUNK = 16_384  # columns in float64 at a time: the embedding's A is as wide as the vocabulary


def delta_norm(weights: ModuleWeights) -> float:
    """Computes in float64: the products of both halves cancel if rows of the delta oppose each
    other. Offsets count as a column of the weight. DoRA's change is that of the whole weight."""
    norm = weights.norm
    if norm is None:
        square = (_gram(weights.a) * _gram(weights.b)).sum()
        norm = math.sqrt(max(0.0, float(square)))
    if weights.affine is None or len(weights.affine) < 2:
        return norm
    return math.hypot(norm, float(weights.affine[1].double().norm()))


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """Turns [r, n] into [r, r] float64."""
    gram = torch.zeros(rows.shape[0], rows.shape[0], dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, _CHUNK, dim=1):
        wide = part.double()
        gram += wide @ wide.T
    return gram
