"""Paged attention on a CUDA device, against a float64 softmax; exact where arithmetic is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.paged_attention import max_item_queries, paged_attention
from kernels.paged_plan import PagedPlan, work_size, write_work
from tests.attention_factory import SCALE, Batch, Lengths, make_batch, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DECODES = [(1, n) for n in (1, 15, 16, 17, 0, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 5000)]
PREFILLS = [(2, 2), (15, 15), (129, 129), (300, 300), (64, 1000), (333, 334), (31, 64)]
MIXED = [(1, 700), *PREFILLS[3:5], (1, 5), (1, 2000), (257, 900), (1, 1)]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
def test_any_batch_agrees_with_float64(
    lengths: Lengths, dtype: torch.dtype, block_size: int
) -> None:
    batch = make_batch(
        lengths, 8, 2, dim=128, block_size=block_size, dtype=dtype, device="cuda", seed=1
    )
    assert relative_error(batch.run(), batch.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 4, 64), (9, 3, 64), (4, 4, 80), (9, 3, 96), (7, 1, 128), (16, 2, 128), (6, 2, 256)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shapes_of_heads(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, heads, kv_heads, dim, 32, dtype, "cuda")
    assert relative_error(batch.run(), batch.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(8, 2, 128), (9, 3, 64), (6, 2, 256)], ids=str
)
def test_keys_and_values_in_e4m3_are_widened(
    lengths: Lengths,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    block_size: int,
) -> None:
    batch = make_batch(
        lengths, heads, kv_heads, dim, block_size, dtype, "cuda", kv_dtype=torch.float8_e4m3fn
    )
    for window, cap in ((None, None), (100, None), (None, 50.0)):
        expected = batch.expected(window, cap)
        assert relative_error(batch.run(window, cap), expected) < TOLERANCE[dtype]
        assert torch.equal(batch.run(window, cap), batch.run(window, cap))


@pytest.mark.parametrize("window", [1, 100, 128, 600, 4096])
@pytest.mark.parametrize("block_size", [16, 64])
def test_windows(window: int, block_size: int) -> None:
    batch = make_batch(MIXED + DECODES, 8, 2, 128, block_size, torch.bfloat16, "cuda")
    assert relative_error(batch.run(window), batch.expected(window)) < 8e-3


# Queries of a draft whose keys end in the same tile of keys as the others', or in the next one, in
# one item or in the last of several, of which the first queries may see none.
DRAFTS = [(5, 5), (5, 300), (5, 66), (2, 65), (4, 64), (8, 130), (1, 700), (3, 1025), (8, 1027)]
DRAFTS += [(1, 1), (1, 0), (7, 2051), (8, 5000), (5, 1090), (1, 0)]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["whole", "e4m3"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "cap", "has_sinks"),
    [(8, 2, 128, None, False), (64, 8, 64, None, True), (8, 8, 128, 50.0, False)],
)
@pytest.mark.parametrize(
    "lengths", [DRAFTS, DRAFTS[:2], DRAFTS[-4:-2]], ids=["many", "few", "long"]
)
def test_the_queries_of_a_draft_attend_together(
    lengths: Lengths,
    heads: int,
    kv_heads: int,
    dim: int,
    cap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    block_size: int,
) -> None:
    batch = make_batch(lengths, heads, kv_heads, dim, block_size, dtype, "cuda", kv_dtype=kv_dtype)
    draw = torch.Generator().manual_seed(3)
    sinks = 4 * torch.randn(heads, generator=draw).cuda() if has_sinks else None
    out = batch.run_drafts(cap, sinks)
    assert relative_error(out, batch.expected(cap=cap, sinks=sinks)) < TOLERANCE[dtype]
    assert torch.equal(out, batch.run_drafts(cap, sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_as_many_queries_attend_together_as_a_kernel_has_rows(dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, 32, 8, 128, 16, dtype, "cuda")
    is_gluon = dtype == torch.bfloat16 and torch.cuda.get_device_capability() == (9, 0)
    assert max_item_queries(batch.k_cache, 32, dtype) == (16 if is_gluon else 1)


VARIANTS = {  # heads, KV heads, D, window, cap, sinks
    "gemma-2": (8, 4, 256, None, 50.0, False),
    "gemma-2 in a window": (8, 4, 256, 100, 50.0, False),
    "gemma-3 in a window": (4, 1, 256, 512, None, False),
    "gpt-oss": (64, 8, 64, None, None, True),
    "gpt-oss in a window": (64, 8, 64, 128, None, True),
    "phi-3 in a window": (8, 8, 96, 600, None, False),
    "all at once": (8, 2, 128, 1, 1.0, True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_families(name: str) -> None:
    heads, kv_heads, dim, window, cap, has_sinks = VARIANTS[name]
    batch = make_batch(MIXED + DECODES, heads, kv_heads, dim, 16, torch.bfloat16, "cuda")
    draw = torch.Generator().manual_seed(3)
    sinks = 4 * torch.randn(heads, generator=draw).cuda() if has_sinks else None
    out = batch.run(window, cap, sinks)
    assert relative_error(out, batch.expected(window, cap, sinks)) < 8e-3
    assert torch.equal(out, batch.run(window, cap, sinks))


def test_sinks_of_twenty_leave_a_head_its_own() -> None:
    batch = make_batch(MIXED + DECODES, 4, 2, 64, 16, torch.bfloat16, "cuda")
    sinks = torch.tensor([20.0, -20.0, 0.0, float("-inf")], device="cuda")
    out, expected = batch.run(sinks=sinks), batch.expected(sinks=sinks)
    for head in range(4):
        assert relative_error(out[:, head], expected[:, head]) < 8e-3


@pytest.mark.parametrize("cap", [0.01, 50.0])
def test_soft_caps_up_to_saturation(cap: float) -> None:
    batch = make_batch(MIXED + DECODES, 8, 2, 64, 16, torch.float32, "cuda")
    batch.q *= 30
    assert relative_error(batch.run(cap=cap), batch.expected(cap=cap)) < 2e-5


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64])
def test_means_of_small_integers_are_exact(dim: int, block_size: int) -> None:
    """Keys of zero: the result is the mean of the values, whole numbers over a power of two."""
    lengths = [(1, 1024), (1, 256), (512, 512), (256, 2048)]
    batch = make_batch(lengths, 32, 8, dim, block_size, torch.bfloat16, "cuda")
    batch.k_cache.zero_()
    batch.v_cache.random_(-8, 9)
    out, expected = batch.run(), batch.expected().to(torch.bfloat16)
    starts = batch.starts()
    for s, (q_len, kv_len) in enumerate(lengths):
        seen = torch.arange(kv_len - q_len + 1, kv_len + 1)
        exact = starts[s] + torch.nonzero((seen & (seen - 1)) == 0).flatten().cuda()
        torch.testing.assert_close(out[exact], expected[exact], rtol=0, atol=0)
    torch.testing.assert_close(out, expected, rtol=8e-3, atol=1e-2)


def test_two_runs_are_equal_and_a_decode_does_not_depend_on_who_else_is_among_the_few() -> None:
    batch = make_batch(DECODES[-8:], 32, 8, 128, 64, torch.bfloat16, "cuda")
    first = batch.run()
    assert torch.equal(first, batch.run())
    alone = Batch(
        batch.shape, DECODES[-1:], batch.q[-1:], batch.k_cache, batch.v_cache, batch.tables[-1:]
    )
    assert torch.equal(first[-1:], alone.run())


@pytest.mark.parametrize("window", [None, 100])
def test_a_graph_stays_right_when_the_metadata_changes(window: int | None) -> None:
    capacity, width, block_size = 24, 96, 16
    full = make_batch(
        [(1, width * block_size)] * capacity, 8, 2, 128, block_size, torch.bfloat16, "cuda"
    )
    starts = torch.arange(capacity + 1, dtype=torch.int32, device="cuda")
    kv_lens = torch.ones(capacity, dtype=torch.int32, device="cuda")
    tables = torch.zeros(capacity, width, dtype=torch.int32, device="cuda")
    host = np.zeros(work_size(capacity, capacity, full.shape), np.int32)
    work = torch.zeros(len(host), dtype=torch.int32, device="cuda")
    plan = PagedPlan.for_graph(starts, kv_lens, tables, work, full.scratch(), capacity)

    def attend() -> torch.Tensor:
        return paged_attention(full.q, full.k_cache, full.v_cache, plan, SCALE, window)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    rng = np.random.default_rng(0)
    for live in (24, 1, 0, 7, 23):
        lengths = np.zeros(capacity, np.int32)
        lengths[:live] = rng.integers(1, width * block_size + 1, live)
        order = torch.from_numpy(rng.permutation(capacity)).cuda()
        write_work(host, np.arange(capacity + 1, dtype=np.int32), lengths, full.shape)
        work.copy_(torch.from_numpy(host))
        kv_lens.copy_(torch.from_numpy(lengths))
        tables.copy_(full.tables[order])
        out.fill_(float("nan"))
        graph.replay()
        now = Batch(full.shape, [(1, int(n)) for n in lengths], full.q, full.k_cache,
                    full.v_cache, tables)  # fmt: skip
        assert torch.equal(out, now.run(window))
        assert not out[live:].any()
        if live:
            assert relative_error(out, now.expected(window)) < 8e-3
