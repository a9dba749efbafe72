"""The table of rotary angles: cosine and sine of every position, computed once.

Su et al., "RoFormer", arXiv 2104.09864. Scaled variants: linear (position interpolation, arXiv
2306.15595), Llama 3's by wavelength, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753). Float32
in Hugging Face's order of operations, so that angles agree with it. Free of models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"]
    theta: float
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factors: tuple[float, ...] = ()  # LongRoPE's, one per frequency
    long_factors: tuple[float, ...] = ()
    rotary_fraction: float = 1.0  # of a head's dimensions, the first of them; the others stay
    query_beta: float = 0.0  # queries grow by 1 + beta ln(1 + position // original_max_len)

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.rotary_fraction)

    @property
    def usual_len(self) -> int | None:
        """The length up to which LongRoPE has the frequencies of short sequences. An engine for
        longer sequences has the long frequencies for all, because cached keys keep theirs; Hugging
        Face computes a short sequence with the short frequencies even then."""
        return self.original_max_len if self.kind == "longrope" else None

    @property
    def extended_len(self) -> int:
        """The length that YaRN extends to. The config alone enables YaRN; `max_position_embeddings`
        often stays as it is."""
        return int(self.original_max_len * self.factor) if self.kind == "yarn" else 0


def cos_sin_table(rope: RopeConfig, head_dim: int, max_len: int) -> torch.Tensor:
    """Returns [max_len, 2, rotary_dim / 2] float32, the attention factor included. `max_len`: of
    the longest sequence; it chooses between LongRoPE's factors."""
    inverse = inverse_frequencies(rope, rope.rotary_dim(head_dim), max_len)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse
    scale = _attention_factor(rope)
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1)


def inverse_frequencies(rope: RopeConfig, dim: int, max_len: int) -> torch.Tensor:
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    inverse = 1.0 / powers
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, powers, dim)
    if rope.kind == "longrope":
        is_long = max_len > rope.original_max_len
        return 1.0 / (torch.tensor(rope.long_factors if is_long else rope.short_factors) * powers)
    return inverse


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Stretches long waves by the factor, keeps short waves, and blends between."""
    wavelength = 2 * math.pi / inverse
    low = rope.original_max_len / rope.low_freq_factor
    high = rope.original_max_len / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_len / wavelength - rope.low_freq_factor) / span
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    stretched = torch.where(wavelength > low, inverse / rope.factor, inverse)
    between = (wavelength >= high) & (wavelength <= low)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, powers: torch.Tensor, dim: int) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        turns = math.log(rope.original_max_len / (rotations * 2 * math.pi))
        return dim * turns / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        growth = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_len)
        return math.sqrt(1 + growth)
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
