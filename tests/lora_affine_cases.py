"""Adapters with affine rows: gains alone, gains and offsets, in all slices or in some."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.lora_plan import LoraPlan
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from tests.lora_kernel_cases import LoraCase, Rank, Run, make_case

# Of each adapter: ranks and affine rows of three slices. The first has none.
RANKS: tuple[Rank, ...] = (8, 16, 20, 5, (9, 0, 1))
AFFINE: tuple[Rank, ...] = (0, 1, 2, (2, 0, 1), (0, 0, 2))
RUNS: dict[str, tuple[Run, ...]] = {
    "few rows": ((None, 1), (1, 1), (2, 2), (0, 1), (4, 2)),
    "one row": ((2, 1),),
    "small tiles": ((None, 3), (0, 1), (1, 9), (2, 5), (3, 3), (4, 4), (None, 1)),
    "large tiles": ((None, 2), (1, 66), (4, 65), (0, 1)),
    "a large tile of several pages": ((2, 67), (None, 1)),
    "a large tile without affine rows": ((0, 65), (3, 1)),
}
SHAPES = {"one slice": (40,), "two slices": (24, 24), "three slices": (64, 32, 32)}


def make_affine_case(
    runs: str,
    *,
    in_features: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    max_tokens: int | None = None,
) -> LoraCase:
    def of_slices(values: tuple[Rank, ...]) -> list[Rank]:
        return [one if isinstance(one, int) else one[: len(sizes)] for one in values]

    return make_case(
        of_slices(RANKS),
        RUNS[runs],
        in_features=in_features,
        sizes=sizes,
        dtype=dtype,
        device=device,
        affine=of_slices(AFFINE),
        max_tokens=max_tokens,
    )


def expand(case: LoraCase, plan: LoraPlan) -> torch.Tensor:
    y = case.y.clone()
    lora_expand_(y, lora_shrink(case.x, case.site, plan), case.site, plan)
    return y


def without_affine(case: LoraCase) -> LoraCase:
    """Returns the case in a pool that has no affine rows, for adapters that have none."""
    return replace(case, site=replace(case.site, affine=0), affine=())
