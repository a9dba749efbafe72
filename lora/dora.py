"""DoRA's gains: how much longer or shorter an adapter makes each row of a weight.

Liu et al., "DoRA", arXiv 2402.09353, as PEFT computes it: with the change D = s B A, the output of
row i becomes g_i (W x + D x)_i, g_i = m_i / |W_i + D_i|, and a bias of the base stays as it is.
W + D is formed only of rows of which it leaves little. Of others
|W_i + D_i|^2 = |W_i|^2 + 2 s B_i (A W_i^T) + s^2 B_i (A A^T) B_i^T. Of the base only W A^T and
|W_i|^2 are needed, in float32 on the device that holds W; the rest, of size [out_features, r], is
summed in float64.
"""

from __future__ import annotations

import math
import time

import torch

from kernels.matrix import Matrix

_CHUNK_BYTES = 16 * 1024 * 1024  # of a weight in float32 at a time
_LITTLE = 1e-3  # of |W_i|^2 + |D_i|^2: above it, gains are within 1e-4


def dora_gains(
    weight: Matrix,  # [N, K], of the base, on any device
    a: torch.Tensor,  # [r, K]
    b: torch.Tensor,  # [N, r]
    scale: float,
    magnitude: torch.Tensor,  # [N]
) -> tuple[torch.Tensor, float]:
    """Returns the gains g [N] float64, not finite where the changed row is zero or beyond float32;
    and the Frobenius norm of the whole change of the weight, g (W + D) - W."""
    products, squares = _row_sums(weight, a)
    wide_a, wide_b = a.double(), b.double() * scale
    cross = (products * wide_b).sum(1)  # W_i D_i^T
    own = ((wide_b @ (wide_a @ wide_a.T)) * wide_b).sum(1)  # |D_i|^2
    changed = squares + 2 * cross + own
    # Rows of which little is left: the rounding of the sums, of float32, is a part of it.
    few = (changed < _LITTLE * (squares + own)).nonzero().flatten()
    for part in torch.split(few, max(1, _CHUNK_BYTES // (8 * weight.shape[1]))):
        rows = weight[part.to(weight.device)].float().cpu().double() + wide_b[part] @ wide_a
        changed[part] = rows.square().sum(1)
    g = magnitude.double() / changed.clamp_min(0).sqrt()
    # |g (W + D) - W|^2 = g^2 |W + D|^2 - 2 g (|W|^2 + W D^T) + |W|^2
    change = g.square() * changed - 2 * g * (squares + cross) + squares
    return g, math.sqrt(max(0.0, float(change.sum())))


def _row_sums(weight: Matrix, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns W A^T [N, r] and |W_i|^2 [N], float64 on the host.

    On CUDA on the current stream, chunk by chunk, with a pause as long as each chunk: steps of the
    engine run beside it, and have at least half of the device.
    """
    narrow = a.to(weight.device, torch.float32).T
    rows = max(1, _CHUNK_BYTES // (4 * weight.shape[1]))
    products, squares = [], []
    for part in weight.split(rows):
        began_s = time.perf_counter()
        wide = part.float()
        products.append(wide @ narrow)
        squares.append(torch.linalg.vector_norm(wide, dim=1).square())
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()
            time.sleep(time.perf_counter() - began_s)
    return torch.cat(products).cpu().double(), torch.cat(squares).cpu().double()
