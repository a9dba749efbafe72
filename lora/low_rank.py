"""A matrix as a product of few rank rows: singular values, the least rank within an error, and the
time that this will take.

Large matrices are decomposed by the randomised range finder with two power iterations (Halko,
Martinsson and Tropp, arXiv 0909.4061, algorithms 4.4 and 5.1): 7 products with a matrix of some 500
columns instead of a whole decomposition. Its error is measured against the matrix itself, not
estimated; the rank is the least or slightly more.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from lora.errors import AdapterError

MAX_RANK = 512
_EXACT = 1e-7  # relative: the precision of a matrix in float32
_OVERSAMPLES = 16
_POWER_ITERATIONS = 2
_SEED = 20_110_909
_CHUNK = 4096  # rows whose difference exists at a time
_TRIAL_SIZE, _TRIAL_S = 512, 0.3  # of the products that measure this machine


@dataclass(frozen=True, slots=True)
class ConversionLimits:
    max_error: float  # of the change of a module, relative, in the Frobenius norm
    max_rank: int = MAX_RANK
    max_bytes: int = 256 * 1024**2  # of the rows of saved modules, in a half type
    max_minutes: float = 30.0

    def check_estimate(self, flops: float, what: str) -> float:
        """Returns the minutes that this many operations will take here, measured on a product of
        this moment. Raises AdapterError if they are too many."""
        minutes = flops / _rate() / 60
        if minutes > self.max_minutes:
            shown = f"{minutes:.0f}" if minutes >= 10 else f"{minutes:.2g}"
            raise AdapterError(
                f"{what} would take about {shown} minutes on this machine, allowed are "
                f"{self.max_minutes:g} (--max-minutes)"
            )
        return minutes

    def check_time(self, began_s: float, what: str) -> None:
        """Raises AdapterError if the time is over. `began_s`: of `time.monotonic`."""
        minutes = (time.monotonic() - began_s) / 60
        if minutes > self.max_minutes:
            raise AdapterError(
                f"{what} was stopped after {minutes:.2g} minutes, allowed are "
                f"{self.max_minutes:g} (--max-minutes)"
            )


@dataclass(frozen=True, slots=True)
class Conversion:
    """An adapter that was made LoRA."""

    kind: str  # that was converted, such as LoHa; empty: no conversion was needed
    rank: int  # the largest of any module; 0: nothing differs from the base
    error: float  # relative, in the Frobenius norm: the largest of any module
    notes: tuple[str, ...] = ()  # sentences for the user

    @property
    def words(self) -> str:
        if not self.kind:
            return ""
        # A rank that leaves nothing out still rounds to float32: an error of some 1e-7.
        return (
            f"LoRA from {self.kind}, rank {self.rank}, relative error {max(self.error, 1e-7):.1e}"
        )


@dataclass(frozen=True, slots=True)
class Factors:
    """The largest parts of a singular value decomposition of a matrix [n, m]: u diag(sigma) v."""

    u: torch.Tensor  # [n, k]
    sigma: torch.Tensor  # [k or more], descending
    v: torch.Tensor  # [k, m]
    rest: float = 0.0  # the Frobenius norm of the remainder


def decompose(matrix: torch.Tensor, max_rank: int) -> Factors:
    """Decomposes a matrix [n, m] of float32 or float64 in its type: as a whole if it is small,
    otherwise its `max_rank` largest parts and some more. The numbers are finite."""
    height, width = matrix.shape
    if is_small(height, width, max_rank):
        return Factors(*torch.linalg.svd(matrix, full_matrices=False))
    count = max_rank + _OVERSAMPLES
    generator = torch.Generator().manual_seed(_SEED)  # equal files give equal adapters
    start = torch.randn(width, count, generator=generator, dtype=matrix.dtype)
    q = _basis(matrix @ start)  # [n, count]
    for _ in range(_POWER_ITERATIONS):
        q = _basis(matrix @ _basis(matrix.T @ q))
    small = q.T @ matrix  # [count, m]
    rest = _difference_norm(matrix, q, small)
    q_small, r_small = torch.linalg.qr(small.T)
    u, sigma, v = torch.linalg.svd(r_small.T)
    return Factors(q @ u, sigma, v @ q_small.T, rest)


def least_rank(factors: Factors, module: str, max_rank: int, max_error: float) -> tuple[int, float]:
    """Returns the rank and its relative error: the norm of all that is left out. Raises
    AdapterError if the error is larger at every rank allowed."""
    squares = factors.sigma.double().square()
    rest = factors.rest**2
    total = float(squares.sum()) + rest
    if not math.isfinite(total):
        raise AdapterError(f"the change of {module} overflows float64")
    if total == 0.0:
        return 1, 0.0
    after = squares.flip(0).cumsum(0).flip(0)[1:]  # [k - 1]: of the values from the second on
    errors = ((torch.cat((after, after.new_zeros(1))) + rest) / total).sqrt()  # of ranks 1, 2, ...
    rank = 1 + int((errors > max(max_error, _EXACT)).sum())
    if rank > max_rank:
        needed = f"rank {rank}" if rank <= len(errors) else f"more than rank {max_rank}"
        best = float(errors[min(max_rank, len(errors)) - 1])
        raise AdapterError(
            f"as LoRA {module} needs {needed} for a relative error of {max_error:g}; at rank "
            f"{max_rank}, the largest, the error is {best:.2g}"
        )
    return rank, float(errors[rank - 1])


def halves(factors: Factors, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A [rank, m] and B [n, rank] float32, whose rows and columns are of equal norms."""
    root = factors.sigma[:rank].sqrt()
    a, b = root[:, None] * factors.v[:rank], factors.u[:, :rank] * root
    return a.float().contiguous(), b.float().contiguous()


def is_small(height: int, width: int, max_rank: int) -> bool:
    """Returns whether the whole decomposition costs no more than the randomised one."""
    return min(height, width) <= 2 * (max_rank + _OVERSAMPLES)


def flops(height: int, width: int, max_rank: int) -> float:
    """Returns the operations of `decompose`, as operations of products that last as long: each kind
    of LAPACK's routines runs at a fraction of a product's speed."""
    low, high = sorted((height, width))
    if is_small(height, width, max_rank):
        return 30.0 * high * low**2
    count = max_rank + _OVERSAMPLES
    products = (3 + 2 * _POWER_ITERATIONS) * 2.0 * height * width * count
    return products + (2 + 2 * _POWER_ITERATIONS) * 8.0 * high * count**2 + 30.0 * count**3


def working_bytes(height: int, width: int, max_rank: int, itemsize: int) -> int:
    """Returns the memory of `decompose` besides the matrix itself."""
    if is_small(height, width, max_rank):
        return 4 * height * width * itemsize
    return 4 * (height + width) * (max_rank + _OVERSAMPLES) * itemsize


def _basis(columns: torch.Tensor) -> torch.Tensor:
    q: torch.Tensor = torch.linalg.qr(columns)[0]
    return q


def _difference_norm(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    squares = 0.0
    for first in range(0, len(matrix), _CHUNK):
        rows = slice(first, first + _CHUNK)
        difference = torch.addmm(matrix[rows], left[rows], right, alpha=-1)
        squares += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
    return math.sqrt(squares)


def _rate() -> float:
    """Returns this machine's operations per second in products of float64, now."""
    trial = torch.ones(_TRIAL_SIZE, _TRIAL_SIZE, dtype=torch.float64)
    trial @ trial  # the threads start
    count, began_s = 0, time.perf_counter()
    while (lasted_s := time.perf_counter() - began_s) < _TRIAL_S:  # other work shares the cores
        trial @ trial
        count += 1
    return count * 2 * _TRIAL_SIZE**3 / lasted_s
