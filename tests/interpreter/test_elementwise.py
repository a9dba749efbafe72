"""Normalisation, activation, RoPE with the KV write and the embedding against their references."""

from __future__ import annotations

import pytest
import torch

from kernels.embedding import gather_embedding, gather_embedding_reference
from kernels.norm_add_norm import norm_add_norm, norm_add_norm_reference
from kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_,
    rms_norm_reference,
)
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from kernels.rope_write import QueryScaling, RopeWrite
from kernels.silu_mul import silu_mul, silu_mul_reference

DTYPES = (torch.float16, torch.float32)
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-6}
UNTOUCHED = 123.0


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """But for a few neighbours in the last place, equal."""
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (3, 7), (5, 64), (2, 576)])
def test_rms_norm(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    assert_near(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def test_rms_norm_takes_any_shape_and_rows_apart() -> None:
    x, weight = randn(2, 3, 32), randn(16, seed=1)
    for part in (x[..., :16], x[0, :, :16], x[..., :16].contiguous()):
        assert_near(rms_norm(part, weight, 1e-5), rms_norm_reference(part, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_leaves_the_sum_in_the_residual(dtype: torch.dtype) -> None:
    x, residual = randn(4, 33, dtype=dtype), randn(4, 33, dtype=dtype, seed=1)
    weight = randn(33, dtype=dtype, seed=2)
    expected, total = add_rms_norm_reference(x, residual, weight, 1e-6)
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-6)
    assert new_residual is residual
    assert torch.equal(new_residual, total)
    assert_near(normed, expected)


def test_a_row_of_nan_harms_no_other() -> None:
    x, weight = randn(3, 16), torch.ones(16)
    x[1] = float("nan")
    out = rms_norm(x, weight, 1e-5)
    assert torch.equal(out[[0, 2]], rms_norm(x[[0, 2]], weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (2, 1030)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype)
    assert_near(silu_mul(gate_up), silu_mul_reference(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 2), (9, 3, 64), (4, 1, 80), (2, 2, 96), (7, 1, 6)]
)
def test_rope_kv_write(
    heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype
) -> None:
    qkv = randn(4, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([0, 1, 30, 7], dtype=torch.int32)
    cos_sin = randn(32, 2, dim // 2, seed=1)
    slots = torch.tensor([0, 11, 3, 9])
    norms = (randn(dim, dtype=dtype, seed=2), randn(dim, dtype=dtype, seed=3)) if normed else ()
    caches = [torch.full((3, 4, kv_heads, dim), UNTOUCHED, dtype=dtype) for _ in range(4)]
    rest = (slots, heads, kv_heads, dim, *norms, 1e-6) if normed else (slots, heads, kv_heads, dim)
    q = rope_kv_write(qkv, RopeWrite(positions, cos_sin, caches[0], caches[1], *rest))
    expected = rope_kv_write_reference(
        qkv, RopeWrite(positions, cos_sin, caches[2], caches[3], *rest)
    )
    check = assert_near if normed else torch.testing.assert_close
    check(q, expected)
    check(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(96, 24), (32, 24), (16, 2), (128, 96), (64, 0), (256, 256)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_variants_of_rope(dim: int, rotary_dim: int, normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads = 3, 2
    qkv = randn(4, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([0, 1, 30, 7], dtype=torch.int32)
    cos_sin = randn(32, 2, rotary_dim // 2, seed=1) if rotary_dim else None
    slots = torch.tensor([0, 11, 3, 9])
    norms = (randn(dim, seed=2), randn(dim, seed=3)) if normed else (None, None)
    caches = [torch.full((3, 4, kv_heads, dim), UNTOUCHED, dtype=dtype) for _ in range(4)]
    write = RopeWrite(positions, cos_sin, *caches[:2], slots, heads, kv_heads, dim, *norms, 1e-6)
    write = write._replace(q_scaling=QueryScaling(0.5, 8))
    q = rope_kv_write(qkv, write)
    expected = rope_kv_write_reference(qkv, write._replace(k_cache=caches[2], v_cache=caches[3]))
    assert_near(q, expected)
    assert_near(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_families(dtype: torch.dtype) -> None:
    x, residual = randn(4, 33, dtype=dtype), randn(4, 33, dtype=dtype, seed=1)
    weight, following = randn(33, seed=2), randn(33, seed=3)
    assert_near(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    for found, expected in (
        (
            add_rms_norm(x, residual.clone(), weight, 1e-6, 0.22),
            add_rms_norm_reference(x, residual, weight, 1e-6, 0.22),
        ),
        (
            norm_add_norm(x, residual.clone(), weight, following, 1e-6),
            norm_add_norm_reference(x, residual, weight, following, 1e-6),
        ),
        (
            norm_add_norm(x, residual.clone(), weight, None, 1e-6),
            norm_add_norm_reference(x, residual, weight, None, 1e-6),
        ),
    ):
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_in_place_leaves_its_neighbours(dtype: torch.dtype) -> None:
    x, weight = randn(3, 40, dtype=dtype), randn(16, seed=2)
    expected = x.clone()
    expected[:, 16:32] = rms_norm_reference(x[:, 16:32], weight, 1e-6)
    rms_norm_(x[:, 16:32], weight, 1e-6)
    assert_near(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul(dtype: torch.dtype) -> None:
    gate_up = 4 * randn(3, 2 * 1030, dtype=dtype)
    gate_up[0, :4] = torch.tensor([80.0, -80.0, 0.0, -0.0])
    found = silu_mul(gate_up, "gelu_tanh")
    # 1 + tanh is next to 0 for negative numbers: what is left of it is a rounding.
    torch.testing.assert_close(
        found, silu_mul_reference(gate_up, "gelu_tanh"), rtol=1e-3, atol=1e-5
    )


def test_a_negative_slot_is_written_nowhere() -> None:
    qkv, cos_sin = randn(3, 4 * 8), randn(4, 2, 4, seed=1)
    positions = torch.tensor([2, 0, 3], dtype=torch.int32)
    k_cache, v_cache = (torch.full((2, 2, 1, 8), UNTOUCHED) for _ in range(2))
    slots = torch.tensor([-1, 2, -1], dtype=torch.int32)
    q = rope_kv_write(qkv, RopeWrite(positions, cos_sin, k_cache, v_cache, slots, 2, 1, 8))
    other = torch.zeros(2, 2, 1, 8)
    safe = torch.tensor([0, 2, 1])
    expected = rope_kv_write_reference(
        qkv, RopeWrite(positions, cos_sin, other, other, safe, 2, 1, 8)
    )
    assert torch.equal(q, expected)
    for cache in (k_cache, v_cache):
        assert (cache.view(4, 8)[[0, 1, 3]] == UNTOUCHED).all()
        assert (cache.view(4, 8)[2] != UNTOUCHED).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_follows_the_id_that_was_drawn(dtype: torch.dtype) -> None:
    weight = randn(9, 2050, dtype=dtype)
    token_ids = torch.tensor([3, 0, 8, 1], dtype=torch.int32)
    sources = torch.tensor([-1, 1, 0, 2], dtype=torch.int32)
    drawn = torch.tensor([7, 5, -1], dtype=torch.int32)
    expected = weight[[3, 5, 7, 0]]
    assert torch.equal(gather_embedding(token_ids, sources, drawn, weight), expected)
    assert torch.equal(gather_embedding_reference(token_ids, sources, drawn, weight), expected)


def test_nothing_is_computed_of_no_rows() -> None:
    weight = torch.ones(8)
    none = torch.zeros(0, dtype=torch.int32)
    assert rms_norm(torch.zeros(0, 8), weight, 1e-5).shape == (0, 8)
    assert silu_mul(torch.zeros(0, 8)).shape == (0, 4)
    assert gather_embedding(none, none, none, torch.zeros(4, 8)).shape == (0, 8)
