"""The plan of a step's adapters, and the multi-LoRA ops over it on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora_plan import (
    EMBEDDING_LARGE,
    EMBEDDING_SMALL,
    HEAD_TILES,
    HEAD_UNITS,
    LARGE_MIN_RUN,
    MAX_RANK_PAGES,
    MAX_SPLITS,
    LoraPlan,
    lora_plan_size,
    read_tiles,
    write_lora_plan,
)
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from tests.lora_fused_cases import rope_both_ways, silu_both_ways
from tests.lora_kernel_cases import error_of, make_case

Pages = tuple[int, ...]


def tiles_of(
    runs: list[tuple[Pages, int]], *, large: bool = True, max_tokens: int = 512
) -> list[tuple[int, int, list[int]]]:
    out = np.full(lora_plan_size(max_tokens, 64, large=large), -1, dtype=np.int32)
    counts = write_lora_plan(out, runs, max_tokens, 64, large=large)
    plan = LoraPlan.for_step(torch.from_numpy(out), counts, max_tokens, 64, large=large)
    return [(start, end, pages_of(found)) for start, end, found in read_tiles(plan)]


def pages_of(found: list[tuple[int, float]]) -> list[int]:
    return [page for page, _ in found]


def test_runs_become_tiles_of_at_most_eight_rows() -> None:
    found = tiles_of([((), 3), ((5, 2), 11), ((9,), 1)])
    assert found == [(0, 3, []), (3, 11, [5, 2]), (11, 14, [5, 2]), (14, 15, [9])]


def test_neighbours_of_one_adapter_are_one_run() -> None:
    assert tiles_of([((4,), 1), ((4,), 2), ((), 0), ((4,), 1)]) == [(0, 4, [4])]


def test_a_long_run_is_cut_into_large_tiles() -> None:
    assert tiles_of([((7,), 2), ((1,), 150)]) == [(0, 2, [7]), (2, 130, [1]), (130, 152, [1])]
    small = tiles_of([((1,), 150)], large=False)
    assert [end - start for start, end, _ in small] == [8] * 18 + [6]


def test_more_than_the_plan_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="513 rows and 1 pages"):
        tiles_of([((1,), 513)])
    with pytest.raises(ValueError, match="2 rows and 65 pages"):
        tiles_of([((1,), 1), (tuple(range(64)), 1)], large=False)


@pytest.mark.parametrize(("has_head", "has_embedding"), [(False, True), (True, False)])
def test_counts_of_a_site_that_no_adapter_has_are_zero(has_head: bool, has_embedding: bool) -> None:
    out = np.full(lora_plan_size(200, 8), -1, dtype=np.int32)
    counts = write_lora_plan(
        out, [((), 1), ((3, 1), 2), ((2,), 65)], 200, 8,
        has_head=has_head, has_embedding=has_embedding,
    )  # fmt: skip
    small, units, large = counts.num_small, counts.num_units, counts.num_large
    assert (small, units, large) == (2, 2, 1)
    assert out[[HEAD_UNITS, HEAD_TILES]].tolist() == [units * has_head, small * has_head]
    assert out[[EMBEDDING_SMALL, EMBEDDING_LARGE]].tolist() == [
        small * has_embedding, large * has_embedding,
    ]  # fmt: skip
    assert counts.has_embedding == has_embedding


@given(
    st.lists(
        st.tuples(st.integers(0, MAX_RANK_PAGES), st.integers(1, 90)), min_size=1, max_size=30
    ),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_every_mix_within_the_limits_fits(sizes: list[tuple[int, int]], large: bool) -> None:
    """The base's rows once, first; each adapter once. Limits are exactly what the step has."""
    base = sum(rows for pages, rows in sizes if not pages)
    runs: list[tuple[Pages, int]] = [((), base)]
    total = 0
    for pages, rows in sizes:
        if pages:
            runs.append((tuple(range(total, total + pages)), rows))
            total += pages
    tokens = sum(rows for _, rows in runs)
    out = np.full(lora_plan_size(tokens, total, large=large), -1, dtype=np.int32)
    counts = write_lora_plan(out, runs, tokens, total, large=large)
    plan = LoraPlan.for_step(torch.from_numpy(out), counts, tokens, total, large=large)
    owned = [()] * tokens
    for start, end, found in read_tiles(plan):
        for row in range(start, end):
            assert owned[row] == ()
            owned[row] = tuple(pages_of(found)) or (-1,)
    assert owned == [pages or (-1,) for pages, rows in runs for _ in range(rows)]
    units = plan.units[: plan.max_units].tolist()
    assert sum(unit[1] for unit in units) == sum(
        rows * len(pages) for pages, rows in runs if not (large and rows >= LARGE_MIN_RUN)
    )
    graph = LoraPlan.for_graph(torch.from_numpy(out), tokens, tokens, total, large=large)
    assert graph.max_small >= plan.max_small
    assert graph.max_large >= plan.max_large
    assert graph.max_units >= plan.max_units


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.5, 1.0, -2.0, 0.1]), min_size=0, max_size=6),
            st.integers(1, 90),
        ),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_every_page_has_the_weight_of_its_run(
    drawn: list[tuple[list[float], int]], large: bool
) -> None:
    """Lists share pages: those of one adapter are in many combinations."""
    lists = {tuple(weights): rows for weights, rows in drawn}
    runs = [(tuple(range(len(weights))), rows) for weights, rows in lists.items()]
    tokens, total = sum(lists.values()), sum(map(len, lists))
    out = np.full(lora_plan_size(tokens, total, large=large), -1, dtype=np.int32)
    counts = write_lora_plan(out, runs, tokens, total, list(lists), large=large)
    plan = LoraPlan.for_step(torch.from_numpy(out), counts, tokens, total, large=large)
    found: list[tuple[float, ...]] = [()] * tokens
    for start, end, pages in read_tiles(plan):
        assert pages_of(pages) == list(range(len(pages)))
        found[start:end] = [tuple(weight for _, weight in pages)] * (end - start)
    rounded = [tuple(np.float32(weights).tolist()) for weights in lists]
    assert found == [
        own for own, rows in zip(rounded, lists.values(), strict=True) for _ in range(rows)
    ]
    for row, rows, _, index, _, bits in plan.units[: counts.num_units, :6].tolist():
        weight = np.int32(bits).view(np.float32)
        assert all(own[index] == weight for own in found[row : row + rows])


@given(
    st.lists(
        st.tuples(st.integers(1, MAX_RANK_PAGES), st.integers(0, 80), st.integers(1, 80)),
        min_size=1,
        max_size=MAX_SPLITS,
    ),
    st.integers(0, 90),
)
@settings(max_examples=60, deadline=None)
def test_every_mix_with_splits_fits(splits: list[tuple[int, int, int]], more: int) -> None:
    """Sequences of the base's rows and then an adapter's, and more rows of the last adapter: in the
    worst case all of one adapter, with the limits of one."""
    for same in (False, True):
        runs: list[tuple[Pages, int]] = [((), 3)]
        total = 0
        for i, (num_pages, before, after) in enumerate(splits):
            pages = tuple(range(splits[0][0])) if same else tuple(range(total, total + num_pages))
            total = len(pages) if same else total + num_pages
            runs += [((), before), (pages, after)] if i else [(pages, after), ((), before)]
        runs += [(runs[-1][0] or runs[-2][0], more), ((), 2)]
        tokens = sum(rows for _, rows in runs)
        out = np.full(lora_plan_size(tokens, total), -1, dtype=np.int32)
        counts = write_lora_plan(out, runs, tokens, total)
        plan = LoraPlan.for_step(torch.from_numpy(out), counts, tokens, total)
        owned: list[Pages] = [()] * tokens
        for start, end, found in read_tiles(plan):
            owned[start:end] = [tuple(pages_of(found))] * (end - start)
        assert owned == [pages for pages, rows in runs for _ in range(rows)]
        graph = LoraPlan.for_graph(torch.from_numpy(out), tokens, tokens, total, large=True)
        assert graph.max_small >= plan.max_small
        assert graph.max_units >= plan.max_units


def test_equal_pages_of_other_weights_are_two_runs() -> None:
    out = np.full(lora_plan_size(8, 8), -1, dtype=np.int32)
    runs = [((3, 1), 2), ((3, 1), 1), ((3, 1), 2)]
    counts = write_lora_plan(out, runs, 8, 8, [(1.0, 0.5), (1.0, 0.5), (0.5, 1.0)])
    plan = LoraPlan.for_step(torch.from_numpy(out), counts, 8, 8)
    assert read_tiles(plan) == [(0, 3, [(3, 1.0), (1, 0.5)]), (3, 5, [(3, 0.5), (1, 1.0)])]


@pytest.mark.parametrize(("num_seqs", "rank_pages"), [(300, 32), (512, 32), (600, 16), (1024, 32)])
def test_a_decode_of_one_large_adapter_fits_however_many_sequences(
    num_seqs: int, rank_pages: int
) -> None:
    pages = tuple(range(rank_pages))
    out = np.full(lora_plan_size(num_seqs, 148, large=False), -1, dtype=np.int32)
    counts = write_lora_plan(out, [(pages, num_seqs)], num_seqs, 148, large=False)
    assert counts.num_units == -(-num_seqs // 8) * rank_pages
    plan = LoraPlan.for_graph(torch.from_numpy(out), num_seqs, num_seqs, 148)
    assert plan.max_units >= counts.num_units
    start, end, found = read_tiles(plan)[-1]
    assert (start, end) == (num_seqs - (num_seqs % 8 or 8), num_seqs)
    assert pages_of(found) == list(pages)


def test_the_reference_gives_the_delta_of_float64() -> None:
    case = make_case(
        (8, 17, 64),
        ((None, 2), (0, 3), (1, 70), (2, 1), (None, 1)),
        in_features=40,
        sizes=(24, 8, 8),
        dtype=torch.float32,
    )
    y = case.y.clone()
    plan = case.plan()
    lora_expand_(y, lora_shrink(case.x, case.site, plan), case.site, plan)
    assert error_of(case, y) < 1e-5
    assert torch.equal(y[case.base_rows()], case.y[case.base_rows()])


def test_the_fused_references_are_the_two_ops() -> None:
    case = make_case(
        (8, 20), ((None, 1), (0, 3)), in_features=16, sizes=(32, 32), dtype=torch.float32
    )
    fused, apart = silu_both_ways(case)
    assert torch.equal(fused, apart)
    case = make_case(
        (8, 20), ((None, 1), (0, 3)), in_features=16, sizes=(32, 16, 16), dtype=torch.float32
    )
    for fused, apart, _ in rope_both_ways(case, 2, 1, 16):
        assert torch.equal(fused, apart)
