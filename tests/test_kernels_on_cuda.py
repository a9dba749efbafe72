"""Every op gives the same result on a CUDA device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.lora_shrink_expand import Delta, EmbeddingDelta, lora_add_, lora_embed_add_
from kernels.paged_attention import paged_attention, plan_attention
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from kernels.sampling import apply_penalties_, draw, gather_logprobs
from kernels.silu_mul import silu_mul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Tensors = tuple[torch.Tensor, ...]


def randn(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def elementwise(device: str) -> Tensors:
    x, weight = randn(5, 32, device=device), randn(32, device=device)
    return (*add_rms_norm(x, x + 1, weight, 1e-5), silu_mul(x))


def attention(device: str) -> Tensors:
    k_cache, v_cache = (torch.zeros(9, 4, 2, 8, device=device) for _ in range(2))
    tables = torch.tensor([[3, 1, 7], [2, 0, 8]], dtype=torch.int32, device=device)
    plan = plan_attention([0, 1, 4], [9, 11], tables, 4)
    slots = torch.tensor([28, 32, 33, 34], device=device)
    qkv = randn(4, 8 * 8, device=device)
    positions = torch.tensor([8, 8, 9, 10], device=device)
    cos_sin = randn(16, 2, 4, device=device)
    q = rope_kv_write(qkv, RopeWrite(positions, cos_sin, k_cache, v_cache, slots, 4, 2, 8))
    full = paged_attention(q, k_cache, v_cache, plan, 0.3)
    return q, k_cache, v_cache, full, paged_attention(q, k_cache, v_cache, plan, 0.3, 5)


def lora(device: str) -> Tensors:
    x, y = randn(4, 6, device=device), randn(4, 10, device=device)
    a, b = randn(2, 48, 6, device=device), [randn(48, n, device=device) for n in (7, 3)]
    a_rows, b_rows = a[:, 16:32], [part[16:32] for part in b]
    deltas = [Delta(s, a_rows[s], ((0, b_rows[s]),)) for s in range(2)]
    tokens = torch.tensor([0, 3], device=device)
    outputs = torch.split(y, [7, 3], dim=1)
    lora_add_(outputs, x, tokens, deltas)
    lora_add_(outputs, x, slice(2, 3), deltas[:1])
    embedded, starts = torch.zeros(4, 7, device=device), torch.tensor([0, 48], device=device)
    ids = torch.tensor([0, 1, 5, 2], device=device)
    delta = EmbeddingDelta(a.flatten(), starts, 3, b_rows[0])
    lora_embed_add_(embedded, ids, tokens, [delta])
    return y, embedded


def sampling(device: str) -> Tensors:
    rows = 64
    logits = 3 * randn(rows, 1000, device=device)
    index = torch.arange(rows, device=device)
    logits[:, 7] = logits[:, 3] = logits.max()  # equals at the top
    one = torch.ones(rows, device=device)
    apply_penalties_(logits, index, index, index % 2, 1.2 * one, 0.1 * one, 0.2 * one)
    drawn = draw(
        logits, index % 4 * 0.5, index % 3 * 20, one * 0.9, one * 0.01, index, index % 2, index
    )
    return drawn, *gather_logprobs(logits, drawn, 5)


@pytest.mark.parametrize("op", [elementwise, attention, lora, sampling])
def test_cuda_agrees_with_the_cpu(op: Callable[[str], Tensors]) -> None:
    for cpu, cuda in zip(op("cpu"), op("cuda"), strict=True):
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-4, atol=1e-4)
