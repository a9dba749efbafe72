"""The multi-LoRA kernels in the interpreter, tiny shapes."""

from __future__ import annotations

import pytest
import torch

from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from tests.lora_kernel_cases import BLANK, LoraCase, Rank, Run, error_of, make_case

MIXES: dict[str, tuple[tuple[Rank, ...], tuple[Run, ...]]] = {
    "one row": ((16,), ((0, 1),)),
    "a base row between": ((8, 17), ((None, 2), (0, 3), (1, 1), (None, 1))),
    "a run of two tiles": ((16, 40), ((0, 18), (1, 2))),
    "a large tile of one page": ((8,), ((None, 1), (0, 67))),
    "a large tile": ((20, 16), ((None, 1), (0, 66), (1, 1))),
    "some slices": (((8, 0, 20), (0, 33, 16), (0, 0, 5)), ((0, 1), (1, 2), (None, 1), (2, 1))),
    "some slices of large tiles": (((33, 0, 5), (0, 20, 0)), ((None, 1), (0, 66), (1, 65))),
    "adapters with weights": (
        (8, 17, 20),
        ((None, 1), (((0, 0.5), (1, -1.25)), 3), (1, 2), (((2, 3.0), (0, 1.0)), 9), (None, 1)),
    ),
    "a large tile of adapters with weights": ((8, 20), ((None, 1), (((0, 0.5), (1, 2.0)), 67))),
    "adapters of other slices": (
        ((8, 0, 0), (0, 33, 16), (0, 0, 5)),
        ((((BLANK, 1.0), (0, 2.0), (1, 0.5)), 3), (2, 1), (((BLANK, 1.0), (0, 1.0), (2, 1.0)), 66)),
    ),
}


def run(case: LoraCase, *, graph_rows: int | None = None) -> torch.Tensor:
    y = case.y.clone()
    plan = case.plan(graph_rows=graph_rows)
    lora_expand_(y, lora_shrink(case.x, case.site, plan), case.site, plan)
    return y


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("sizes", [(32,), (48, 16, 16)])
def test_the_delta_is_that_of_float64(mix: str, sizes: tuple[int, ...]) -> None:
    ranks, runs = MIXES[mix]
    case = make_case(ranks, runs, in_features=48, sizes=sizes, dtype=torch.float16)
    y = run(case)
    assert error_of(case, y) < 2e-3
    untouched = case.untouched()
    assert torch.equal(y[untouched], case.y[untouched])


def test_small_integers_are_exact() -> None:
    case = make_case(
        (8, 33),
        ((None, 1), (0, 2), (1, 3)),
        in_features=32,
        sizes=(32, 16),
        dtype=torch.float16,
        integers=True,
    )
    assert torch.equal(run(case).double(), case.y.double() + case.delta())


def test_a_plan_for_a_graph_gives_the_same_bits() -> None:
    ranks, runs = MIXES["a base row between"]
    case = make_case(ranks, runs, in_features=32, sizes=(32,), dtype=torch.float16, max_tokens=32)
    assert torch.equal(run(case, graph_rows=7), run(case))


def test_a_step_without_adapters_changes_nothing() -> None:
    case = make_case((16,), ((None, 3),), in_features=32, sizes=(32,), dtype=torch.float16)
    assert torch.equal(run(case, graph_rows=3), case.y)
    assert torch.equal(run(case), case.y)


def test_a_chunked_large_tile_is_summed_by_the_last_to_arrive() -> None:
    case = make_case(
        (8, 24), ((0, 1), (1, 130)), in_features=1100, sizes=(16, 16), dtype=torch.float16
    )
    plan = case.plan()
    assert plan.max_large == 2
    y = case.y.clone()
    for _ in range(2):  # the counters are as they were
        y.copy_(case.y)
        lora_expand_(y, lora_shrink(case.x, case.site, plan), case.site, plan)
        assert error_of(case, y) < 2e-3
