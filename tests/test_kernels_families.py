"""The kernels' variants for model families beyond Llama, against float64 and against the modules of
transformers: bit for bit where these round in between."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from kernels.norm_add_norm import norm_add_norm
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import QueryScaling, RopeWrite
from kernels.silu_mul import silu_mul

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


# -- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_with_an_offset_has_the_bits_of_gemma(dtype: torch.dtype) -> None:
    x, stored = randn(7, 48, dtype=dtype), randn(48, dtype=dtype, seed=1)
    norm = Gemma3RMSNorm(48, EPS).to(dtype)
    norm.weight.data = stored
    out = rms_norm(x, 1.0 + stored.float(), EPS)
    assert out.dtype == dtype
    assert torch.equal(out, norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_with_float32_weights_has_the_bits_of_olmo(dtype: torch.dtype) -> None:
    x, stored = randn(7, 48, dtype=dtype), randn(48, dtype=dtype, seed=1)
    norm = Olmo2RMSNorm(48, EPS).to(dtype)
    norm.weight.data = stored
    assert torch.equal(rms_norm(x, stored.float(), EPS), norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scaled_addition_has_the_bits_of_granite(dtype: torch.dtype) -> None:
    x, residual = randn(5, 32, dtype=dtype), randn(5, 32, dtype=dtype, seed=1)
    norm = GraniteRMSNorm(32, EPS).to(dtype)
    norm.weight.data = randn(32, dtype=dtype, seed=2)
    normed, total = add_rms_norm(x, residual.clone(), norm.weight.data, EPS, 0.22)
    assert torch.equal(total, residual + x * 0.22)
    assert torch.equal(normed, norm(residual + x * 0.22))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_norms_have_the_bits_of_gemma(dtype: torch.dtype) -> None:
    x, residual = randn(5, 32, dtype=dtype), randn(5, 32, dtype=dtype, seed=1)
    weights = [1.0 + randn(32, dtype=dtype, seed=s).float() for s in (2, 3)]
    post, following = (Gemma3RMSNorm(32, EPS).to(dtype) for _ in range(2))
    post.weight.data, following.weight.data = (randn(32, dtype=dtype, seed=s) for s in (2, 3))
    normed, total = norm_add_norm(x, residual.clone(), *weights, EPS)
    assert torch.equal(total, residual + post(x))
    assert torch.equal(normed, following(total))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_second_norm_the_next_block_reads_the_residual(dtype: torch.dtype) -> None:
    x, residual = randn(5, 32, dtype=dtype), randn(5, 32, dtype=dtype, seed=1)
    weight = randn(32, seed=2)
    hidden, total = norm_add_norm(x, residual.clone(), weight, None, EPS)
    assert torch.equal(hidden, total)
    assert torch.equal(total, residual + rms_norm(x, weight, EPS))
    expected = residual.double() + norm64(x.double(), weight.double())
    assert relative_error(total, expected) < TOLERANCE[dtype]


# -- gated activation ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_tanh_agrees_with_float64_and_torch(dtype: torch.dtype) -> None:
    gate_up = randn(5, 66, dtype=dtype) * 4
    gate_up[0, :4] = torch.tensor([80.0, -80.0, 0.0, -0.0])  # saturated both ways
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.double()
    inner = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    expected = 0.5 * wide * (1 + torch.tanh(inner)) * up.double()
    actual = silu_mul(gate_up, "gelu_tanh")
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < TOLERANCE[dtype]
    assert torch.equal(actual, torch.nn.functional.gelu(gate, approximate="tanh") * up)


# -- RoPE ---------------------------------------------------------------------------------------


def turned(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    heads: tuple[int, int, int],
    norms: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None),
    scaling: QueryScaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v [T, heads, D], the latter two from the caches."""
    tokens, (_, num_kv_heads, dim) = qkv.shape[0], heads
    k, v = (torch.zeros(tokens, 1, num_kv_heads, dim, dtype=qkv.dtype) for _ in "kv")
    slots = torch.arange(tokens)
    write = RopeWrite(positions, cos_sin, k, v, slots, *heads, *norms, EPS, q_scaling=scaling)
    return rope_kv_write(qkv.clone(), write), k.squeeze(1), v.squeeze(1)


def angles(positions: int, rotary_dim: int) -> torch.Tensor:
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


POSITIONS = torch.tensor([0, 3, 17, 30])


@pytest.mark.parametrize("rotary_dim", [2, 12, 16])
def test_a_part_of_a_head_turns_as_in_phi(rotary_dim: int) -> None:
    qkv, table = randn(4, 4 * 16), angles(32, rotary_dim)
    q, k, v = turned(qkv, POSITIONS, table, (2, 1, 16))
    parts = qkv.view(4, 4, 16)
    cos, sin = (table[POSITIONS, i].repeat(1, 2)[None] for i in (0, 1))  # [1, T, R]
    expected = apply_rotary_pos_emb(
        parts[:, :2].transpose(0, 1)[None], parts[:, 2:3].transpose(0, 1)[None], cos, sin
    )
    for actual, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(actual, wanted[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    assert torch.equal(q[..., rotary_dim:], parts[:, :2, rotary_dim:])
    assert torch.equal(v, parts[:, 3:])


def test_a_layer_without_positions_turns_nothing() -> None:
    qkv = randn(4, 4 * 8, dtype=torch.bfloat16)
    q, k, v = turned(qkv, POSITIONS, None, (2, 1, 8))
    assert torch.equal(torch.cat((q, k, v), dim=1).flatten(1), qkv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_heads_with_an_offset_have_the_bits_of_gemma(dtype: torch.dtype) -> None:
    qkv, stored = randn(4, 4 * 16, dtype=dtype), randn(16, dtype=dtype, seed=1)
    norm = Gemma3RMSNorm(16, EPS).to(dtype)
    norm.weight.data = stored
    wide = 1.0 + stored.float()
    q, k, v = turned(qkv, POSITIONS, None, (2, 1, 16), (wide, wide))
    parts = qkv.view(4, 4, 16)
    assert torch.equal(torch.cat((q, k), dim=1), norm(parts[:, :3]))
    assert torch.equal(v, parts[:, 3:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_of_all_heads_has_the_bits_of_olmo(dtype: torch.dtype) -> None:
    qkv = randn(4, 4 * 16, dtype=dtype)
    norms = []
    for size, seed in ((32, 1), (16, 2)):
        norm = Olmo2RMSNorm(size, EPS).to(dtype)
        norm.weight.data = randn(size, dtype=dtype, seed=seed)
        norms.append(norm)
    weights = (norms[0].weight.data.float(), norms[1].weight.data.float())
    q, k, v = turned(qkv, POSITIONS, None, (2, 1, 16), weights)
    assert torch.equal(q.flatten(1), norms[0](qkv[:, :32]))
    assert torch.equal(k.flatten(1), norms[1](qkv[:, 32:48]))
    assert torch.equal(v.flatten(1), qkv[:, 48:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_are_scaled_by_their_positions_as_in_ministral(dtype: torch.dtype) -> None:
    qkv, table = randn(4, 4 * 8, dtype=dtype), angles(32, 8)
    plain = turned(qkv, POSITIONS, table, (2, 1, 8))
    scaled = turned(qkv, POSITIONS, table, (2, 1, 8), scaling=QueryScaling(0.5, 8))
    factors = get_llama_4_attn_scale(POSITIONS[None], 0.5, 8)[0, 0]  # [T, 1]
    assert torch.equal(scaled[0], (plain[0] * factors[..., None]).to(dtype))
    assert torch.equal(scaled[0][0], plain[0][0])  # a position below the limit
    assert torch.equal(scaled[1], plain[1])
    assert torch.equal(scaled[2], plain[2])
