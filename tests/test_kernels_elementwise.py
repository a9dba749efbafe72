"""Normalisation, activation, RoPE and the KV write against float64 and exact cases."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1), (1, 576), (3, 7), (17, 129), (64, 576)])
def test_rms_norm_agrees_with_float64(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = randn(tokens, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < TOLERANCE[dtype]


def test_rms_norm_is_exact_on_a_constant_row() -> None:
    x = torch.full((2, 8), 4.0)
    assert torch.equal(rms_norm(x, torch.full((8,), 3.0), 0.0), torch.full((2, 8), 3.0))


def test_rms_norm_of_one_row_does_not_see_the_others() -> None:
    x = randn(3, 16)
    x[1] = float("nan")
    out = rms_norm(x, torch.ones(16), 1e-5)
    assert out[[0, 2]].isfinite().all()
    assert torch.equal(out[[0, 2]], rms_norm(x[[0, 2]], torch.ones(16), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_the_sum_and_its_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (randn(5, 33, dtype=dtype, seed=s) for s in range(3))
    normed, total = add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight[0], 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 7), (17, 1536)])
def test_silu_mul_agrees_with_float64(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(tokens, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    actual = silu_mul(gate_up)
    assert actual.dtype == dtype
    assert relative_error(actual, gate * torch.sigmoid(gate) * up) < TOLERANCE[dtype]


def make_cos_sin(positions: int, half: int) -> torch.Tensor:
    inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def rotate_float64(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates as complex numbers: an independent way to the same rotation."""
    half = x.shape[-1] // 2
    inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * inverse
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (9, 3, 64), (4, 1, 6)])
def test_rope_turns_q_and_k_and_writes_k_and_v_at_their_slots(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    tokens, block_size = 5, 4
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([0, 1, 2, 30, 7])
    slots = torch.tensor([0, 5, 11, 3, 9], dtype=torch.int32)
    untouched = 123.0
    k_cache = torch.full((3, block_size, kv_heads, dim), untouched, dtype=dtype)
    v_cache = k_cache.clone()
    table = make_cos_sin(32, dim // 2)
    q = rope_kv_write(
        qkv, RopeWrite(positions, table, k_cache, v_cache, slots, heads, kv_heads, dim)
    )
    parts = qkv.view(tokens, -1, dim)
    k_flat, v_flat = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    tolerance = TOLERANCE[dtype]
    assert relative_error(q, rotate_float64(parts[:, :heads], positions)) < tolerance
    k = parts[:, heads : heads + kv_heads]
    assert relative_error(k_flat[slots.long()], rotate_float64(k, positions)) < tolerance
    assert torch.equal(v_flat[slots.long()], parts[:, heads + kv_heads :])
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert (k_flat[others] == untouched).all()
    assert (v_flat[others] == untouched).all()


def test_position_zero_is_not_turned_at_all() -> None:
    qkv = randn(1, 3 * 8)
    caches = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)
    zero = torch.zeros(1, dtype=torch.int64)
    q = rope_kv_write(qkv, RopeWrite(zero, make_cos_sin(1, 4), *caches, zero, 1, 1, 8))
    assert torch.equal(q.flatten(), qkv[0, :8])


def test_head_norms_come_before_the_rotation() -> None:
    qkv, q_norm, k_norm = randn(2, 4 * 8), randn(8, seed=1), randn(8, seed=2)
    positions, slots = torch.tensor([3, 4]), torch.tensor([0, 1])
    k_cache, v_cache = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
    caches, heads = (k_cache, v_cache), (2, 1, 8)
    write = RopeWrite(positions, make_cos_sin(8, 4), *caches, slots, *heads, q_norm, k_norm, 1e-6)
    q = rope_kv_write(qkv, write)
    parts = qkv.view(2, 4, 8)
    expected_q = rotate_float64(rms_norm(parts[:, :2], q_norm, 1e-6), positions)
    expected_k = rotate_float64(rms_norm(parts[:, 2:3], k_norm, 1e-6), positions)
    assert relative_error(q, expected_q) < 1e-6
    assert relative_error(k_cache[0], expected_k) < 1e-6
    assert torch.equal(v_cache[0], parts[:, 3:])
