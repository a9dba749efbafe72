"""A page image spread over rank rows: bit for bit what the reference writes, and nothing beside."""

from __future__ import annotations

import pytest
import torch

from kernels.scatter_page import TILE_WORDS, plan_pages, scatter_page_, scatter_page_reference

ROWS = 16


def image_of(widths: list[int], present: list[bool], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(widths))
    head = -(-8 * len(widths) // 32) * 32
    table, strips, end = [0] * len(widths), [], head
    for i, width in enumerate(widths):
        if present[i]:
            table[i] = end // 4
            strips.append(torch.randn(ROWS * width, generator=generator).to(dtype))
            end += strips[-1].numel() * dtype.itemsize
    image = torch.zeros(end, dtype=torch.uint8)
    image[: 8 * len(widths)] = torch.tensor(table).view(torch.uint8)
    if strips:
        image[head:] = torch.cat(strips).view(torch.uint8)
    return image


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("page", [0, 1, 3])
def test_a_page_is_written_and_only_that(dtype: torch.dtype, page: int) -> None:
    widths = [5, TILE_WORDS // 4 + 3, 1, 64]
    image = image_of(widths, [True, True, False, True], dtype)
    whole = [torch.full((2, 4 * ROWS, width), 7.0).to(dtype) for width in widths]
    pools = [pool[1] for pool in whole]
    expected = [pool.clone() for pool in whole]
    scatter_page_reference(image, plan_pages([e[1] for e in expected], range(4), ROWS), page)
    plan = plan_pages(pools, range(4), ROWS)
    assert plan.tiles is not None
    scatter_page_(image, plan, page)
    for ours, theirs in zip(whole, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not pools[2][page * ROWS : (page + 1) * ROWS].any()


def test_strips_without_a_pool_are_left_out() -> None:
    image = image_of([4, 8, 4], [True, True, True], torch.float32)
    pool = torch.zeros(ROWS, 4)
    scatter_page_(image, plan_pages([pool], [2], ROWS), 0)
    assert torch.equal(pool.flatten(), image[-ROWS * 16 :].view(torch.float32))


def test_an_image_without_strips_clears_the_page() -> None:
    pools = [torch.ones(2 * ROWS, width) for width in (3, 40)]
    scatter_page_(
        image_of([3, 40], [False, False], torch.float32), plan_pages(pools, [0, 1], ROWS), 1
    )
    assert all(pool[:ROWS].all() and not pool[ROWS:].any() for pool in pools)
