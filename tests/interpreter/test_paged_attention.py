"""The attention kernels in Triton's interpreter, against a float64 softmax."""

from __future__ import annotations

import pytest
import torch

from tests.attention_factory import Lengths, make_batch, relative_error

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1), (1, 15), (1, 16), (1, 17), (1, 0), (1, 300)],
        [(33, 33), (2, 40), (16, 16)],
        [(1, 20), (5, 70), (1, 600), (40, 60)],
    ],
    ids=["decodes", "prefills", "mixed"],
)
def test_any_batch_agrees_with_float64(lengths: Lengths, dtype: torch.dtype) -> None:
    batch = make_batch(lengths, dtype=dtype)
    assert relative_error(batch.run(), batch.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_keys_and_values_in_e4m3_are_widened(dtype: torch.dtype) -> None:
    lengths = [(1, 20), (5, 70), (1, 600), (40, 60), (1, 0)]
    batch = make_batch(lengths, dim=80, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    for window, cap in ((None, None), (40, 20.0)):
        expected = batch.expected(window, cap)
        assert relative_error(batch.run(window, cap), expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("window", [1, 40, 300])
def test_a_window_hides_what_lies_before_it_even_whole_splits(window: int) -> None:
    batch = make_batch([(1, 600), (3, 130), (1, 7), (70, 90)])
    assert relative_error(batch.run(window), batch.expected(window)) < 2e-6


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("cap", [0.01, 1.0, 50.0])  # saturated, bent, nearly straight
def test_a_soft_cap_bends_logits(cap: float, window: int | None) -> None:
    batch = make_batch([(1, 600), (3, 130), (1, 7), (70, 90)])
    assert relative_error(batch.run(window, cap), batch.expected(window, cap)) < 4e-6


@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("cap", [None, 1.0])
def test_sinks_weigh_in_whole_sequences_and_in_splits(
    cap: float | None, window: int | None
) -> None:
    batch = make_batch([(1, 600), (3, 130), (1, 7), (1, 0), (70, 90)])
    sinks = torch.tensor([20.0, -20.0, 0.0, float("-inf")])
    out, expected = batch.run(window, cap, sinks), batch.expected(window, cap, sinks)
    for head in range(4):  # apart: a sink of 20 leaves a head next to nothing
        assert relative_error(out[:, head], expected[:, head]) < 4e-6


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [
        (3, 3, 64, 16),
        (9, 3, 64, 32),
        (7, 1, 80, 64),
        (8, 1, 128, 128),
        (2, 1, 256, 64),
        (4, 2, 96, 16),
    ],
)
def test_shapes_of_heads_and_blocks(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    lengths = [(1, 5), (1, 290), (20, 90)]
    batch = make_batch(lengths, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    assert relative_error(batch.run(), batch.expected()) < 2e-6


@pytest.mark.parametrize("window", [None, 270])
def test_a_decode_does_not_depend_on_the_batch(window: int | None) -> None:
    batch = make_batch([(1, 700), (1, 3), (1, 280)])
    alone = make_batch([(1, 700), (1, 3), (1, 280)])
    alone.lengths, alone.q, alone.tables = [(1, 280)], batch.q[2:], batch.tables[2:]
    assert torch.equal(batch.run(window)[2:], alone.run(window))
