"""Paged attention against a float64 softmax over keys gathered one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import paged_attention as module
from kernels.paged_attention import paged_attention, plan_attention
from kernels.paged_plan import (
    HEADER,
    ITEM,
    MAX_SPLITS,
    MIN_CHUNK,
    HeadShape,
    window_splits,
    work_size,
    write_work,
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
Lengths = list[tuple[int, int]]  # (queries, keys)


class Case:
    """A packed batch in a cache whose unused slots are all NaN."""

    def __init__(
        self,
        lengths: Lengths,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths, self.dtype, self.block_size = lengths, dtype, block_size
        self.groups = heads // kv_heads
        needed = [-(-kv_len // block_size) for _, kv_len in lengths]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=generator).tolist()
        self.k_cache = torch.full((num_blocks, block_size, kv_heads, dim), float("nan"))
        self.v_cache = self.k_cache.clone()
        self.tables = torch.full((len(lengths), max(needed)), order[-1], dtype=torch.int32)
        self.keys, self.values = [], []
        for s, (_, kv_len) in enumerate(lengths):
            blocks = [order.pop(0) for _ in range(needed[s])]
            self.tables[s, : needed[s]] = torch.tensor(blocks)
            k, v = torch.randn(2, kv_len, kv_heads, dim, generator=generator).to(dtype).float()
            self.keys.append(k.double())
            self.values.append(v.double())
            for position in range(kv_len):
                block, offset = blocks[position // block_size], position % block_size
                self.k_cache[block, offset] = k[position]
                self.v_cache[block, offset] = v[position]
        self.k_cache, self.v_cache = self.k_cache.to(dtype), self.v_cache.to(dtype)
        tokens = sum(q for q, _ in lengths)
        self.q = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
        self.query_start = [0]
        for q_len, _ in lengths:
            self.query_start.append(self.query_start[-1] + q_len)

    def run(
        self,
        window: int | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        starts = torch.tensor(self.query_start, dtype=torch.int32)
        kv_lens = torch.tensor([kv_len for _, kv_len in self.lengths], dtype=torch.int32)
        plan = plan_attention(starts, kv_lens, self.tables, self.block_size)
        return paged_attention(
            self.q, self.k_cache, self.v_cache, plan, 0.3, window, soft_cap=cap, sinks=sinks
        )

    def expected(
        self,
        window: int | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = []
        for s, (q_len, kv_len) in enumerate(self.lengths):
            for i in range(q_len):
                query = self.q[self.query_start[s] + i].double()
                end = kv_len - q_len + i + 1
                begin = 0 if window is None else max(0, end - window)
                k = self.keys[s][begin:end].repeat_interleave(self.groups, dim=1)
                v = self.values[s][begin:end].repeat_interleave(self.groups, dim=1)
                logits = 0.3 * torch.einsum("hd,lhd->hl", query, k)
                if cap is not None:
                    logits = cap * torch.tanh(logits / cap)
                if sinks is not None:
                    logits = torch.cat((logits, sinks.double()[:, None]), dim=1)
                weights = torch.softmax(logits, dim=-1)[:, : len(k)]
                rows.append(torch.einsum("hl,lhd->hd", weights, v))
        return torch.stack(rows)


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def error(case: Case, window: int | None = None) -> float:
    return relative(case.run(window), case.expected(window))


DECODES = [(1, 1), (1, 3), (1, 4), (1, 5), (1, 8), (1, 40)]
CHUNKS = [(5, 5), (4, 4), (3, 17), (2, 8), (3, 15), (3, 30), (9, 40), (10, 40)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (9, 3), (7, 1), (8, 8)])
def test_decodes_and_chunks_in_one_batch(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    case = Case([*DECODES, *CHUNKS, (1, 6)], heads, kv_heads, 8, 4, dtype)
    out = case.run()
    assert out.dtype == dtype
    assert error(case) < TOLERANCE[dtype]


@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 4)], [(1, 5)], [(6, 6)], [(2, 9)], DECODES])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_lengths_around_the_block(lengths: Lengths, block_size: int) -> None:
    assert error(Case(lengths, block_size=block_size)) < 2e-6


@pytest.mark.parametrize("window", [1, 2, 5, 17, 100])
def test_a_window_hides_what_is_before_it(window: int) -> None:
    assert error(Case([*DECODES, *CHUNKS]), window) < 2e-6


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [0.01, 1.0, 50.0])  # saturated, bent, nearly straight
def test_a_soft_cap_bends_logits(cap: float, window: int | None) -> None:
    case = Case([*DECODES, *CHUNKS])
    assert relative(case.run(window, cap), case.expected(window, cap)) < 2e-6


def test_a_saturated_cap_makes_signs_of_logits() -> None:
    case = Case([(1, 6), (2, 7)])
    case.q *= 1e4
    capped = case.run(cap=2.0)
    assert relative(capped, case.expected(cap=2.0)) < 2e-6
    assert not torch.allclose(capped, case.run())


SINKS = torch.tensor([20.0, -20.0, 0.0, 1.0])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 1.0])
def test_sinks_weigh_in_the_softmax(cap: float | None, window: int | None) -> None:
    case = Case([*DECODES, *CHUNKS])
    out, expected = case.run(window, cap, SINKS), case.expected(window, cap, SINKS)
    for head in range(4):  # apart: a sink of 20 leaves a head next to nothing
        assert relative(out[:, head], expected[:, head]) < 2e-6
    plain = case.run(window, cap)
    torch.testing.assert_close(out[:, 1], plain[:, 1], rtol=1e-6, atol=1e-6)
    assert float(out[:, 0].abs().max()) < 1e-4


def test_a_sink_far_below_or_above_all_logits_stays_finite() -> None:
    case = Case([(1, 6), (3, 5)])
    sinks = torch.tensor([1e4, -1e4, float("-inf"), 0.0])
    out = case.run(sinks=sinks)
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
    torch.testing.assert_close(out[:, 1:3], case.run()[:, 1:3], rtol=1e-6, atol=1e-6)


def test_layers_with_and_without_a_window_share_a_plan() -> None:
    case = Case([*DECODES, *CHUNKS])
    kv_lens = [kv_len for _, kv_len in case.lengths]
    plan = plan_attention(case.query_start, kv_lens, case.tables, case.block_size)
    for window in (None, 3, None, 3):
        out = paged_attention(case.q, case.k_cache, case.v_cache, plan, 0.3, window)
        assert torch.equal(out, case.run(window))


def test_equal_values_are_returned_exactly() -> None:
    case = Case([*DECODES, *CHUNKS])
    case.v_cache.fill_(3.0)
    assert torch.allclose(case.run(), torch.full_like(case.q, 3.0), rtol=1e-6)


def test_a_sequence_with_nan_leaves_the_others_as_they_were() -> None:
    case = Case([(1, 6), (1, 6), (3, 6)])
    before = case.run()
    case.k_cache[case.tables[0, 0]] = float("nan")
    after = case.run()
    assert after[0].isnan().all()
    assert torch.equal(after[1:], before[1:])


def test_long_and_short_sequences_are_not_padded_to_each_other() -> None:
    case = Case([(1, 100), (1, 3), (1, 98), (1, 2)])
    plan = plan_attention(case.query_start, [100, 3, 98, 2], case.tables, case.block_size)
    assert [group.rows.tolist() for group in plan.decodes] == [[0, 2], [1], [3]]
    assert error(case) < 2e-6


def test_groups_stay_below_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GROUP_KEYS", 20)
    case = Case([(1, 9)] * 5)
    plan = plan_attention(case.query_start, [9] * 5, case.tables, case.block_size)
    assert [group.rows.numel() for group in plan.decodes] == [2, 2, 1]
    assert error(case) < 2e-6


def test_an_empty_sequence_takes_no_rows() -> None:
    case = Case([(1, 5), (2, 5)])
    tables = torch.cat((case.tables[:1], case.tables[:1], case.tables[1:]))
    plan = plan_attention([0, 1, 1, 3], [5, 5, 5], tables, case.block_size)
    out = paged_attention(case.q, case.k_cache, case.v_cache, plan, 0.3)
    assert torch.equal(out, case.run())


@pytest.mark.parametrize(
    ("window", "few", "many"),
    [
        (1, 1, 1),
        (128, 1, 1),
        (192, 1, 1),
        (193, 2, 1),
        (1024, 5, 2),
        (4096, 13, 5),
        (10**6, 16, 16),
    ],
)
def test_windows_are_cut_into_items_of_some_size(window: int, few: int, many: int) -> None:
    assert (window_splits(window, True), window_splits(window, False)) == (few, many)


def test_the_splits_of_four_thousand_sequences_have_slots_of_their_own() -> None:
    num_seqs, shape = 4096, HeadShape(4, 2, 16)
    out = np.zeros(work_size(num_seqs, num_seqs, shape), dtype=np.int32)
    starts = np.arange(num_seqs + 1, dtype=np.int32)
    lengths = np.full(num_seqs, MAX_SPLITS * MIN_CHUNK, dtype=np.int32)
    counts = write_work(out, starts, lengths, shape)
    assert counts.num_items == num_seqs * MAX_SPLITS
    assert out[:HEADER].tolist() == [num_seqs * MAX_SPLITS, num_seqs, 0, 0]
    merge = out[HEADER : HEADER + ITEM * counts.num_items].reshape(-1, ITEM)[:, 3]
    assert set(merge & 31) == {MAX_SPLITS}
    slots = (merge >> 9) + ((merge >> 5) & 15)  # as the kernels read it
    assert sorted(slots.tolist()) == list(range(num_seqs * MAX_SPLITS))
