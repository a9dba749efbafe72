"""Device time of the operations between the matrix products, against the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.model_config import parse_rope
from engine.rope import cos_sin_table
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from tests.benchmarks.kernel_timing import BANDWIDTH, L2_BYTES, graph_time_us
from tests.benchmarks.report import emit
from tests.benchmarks.shapes import SHAPES

SHAPE = SHAPES["llama-3-8b"]
TOKENS = (1, 32, 64, 256, 2048, 4096)
BLOCK_SIZE = 16
MAX_CALLS = 64


def main() -> None:
    for tokens in TOKENS:
        for name, make, num_bytes in (
            ("add_rms_norm", make_norm, 8 * tokens * SHAPE.hidden_size),
            ("silu_mul", make_silu, 6 * tokens * SHAPE.intermediate_size),
            ("rope_kv_write", make_rope, 4 * tokens * qkv_size()),
        ):
            count = max(2, min(MAX_CALLS, int(2 * L2_BYTES / num_bytes)))
            us = graph_time_us([make(tokens) for _ in range(count)])
            floor = round(num_bytes / BANDWIDTH, 2)
            emit(part="small", op=name, tokens=tokens, us=round(us, 2), floor_us=floor)


def draw(*dims: int) -> torch.Tensor:
    return torch.randn(dims, device="cuda", dtype=torch.bfloat16)


def qkv_size() -> int:
    return (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim


def make_norm(tokens: int) -> Callable[[], object]:
    hidden = SHAPE.hidden_size
    return partial(
        add_rms_norm, draw(tokens, hidden), draw(tokens, hidden), draw(hidden), SHAPE.rms_norm_eps
    )


def make_silu(tokens: int) -> Callable[[], object]:
    return partial(silu_mul, draw(tokens, 2 * SHAPE.intermediate_size))


def make_rope(tokens: int) -> Callable[[], object]:
    rope = parse_rope(SHAPE.config(), SHAPE.max_len)
    table = cos_sin_table(rope, SHAPE.head_dim, SHAPE.max_len).cuda()
    blocks = tokens // BLOCK_SIZE + 1
    k_cache, v_cache = (
        draw(blocks, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim) for _ in range(2)
    )
    positions = torch.arange(tokens, device="cuda")
    return partial(
        rope_kv_write,
        draw(tokens, qkv_size()),
        positions,
        table,
        k_cache,
        v_cache,
        positions,
        SHAPE.num_heads,
        SHAPE.num_kv_heads,
        SHAPE.head_dim,
    )


if __name__ == "__main__":
    main()
