"""Writes into a KV cache in e4m3 in Triton's interpreter: of each of the four kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kv_e4m3_cases import SIZES, assert_writes_are_rounded
from tests.lora_kernel_cases import make_case

RUNS = ((0, 3), (None, 2), (1, 4))


def test_the_base_rounds_as_it_writes() -> None:
    case = make_case((8,), ((None, 6),), in_features=32, sizes=SIZES, dtype=torch.float16)
    for has_norm in (False, True):
        assert_writes_are_rounded(case, None, has_norm=has_norm)


@pytest.mark.parametrize("has_norm", [False, True], ids=["few rows", "small tiles"])
def test_adapters_of_few_rows_round_as_they_write(has_norm: bool) -> None:
    case = make_case((8, 24), RUNS[1:], in_features=32, sizes=SIZES, dtype=torch.float16)
    assert_writes_are_rounded(case, case.plan(large=False), has_norm=has_norm)


def test_small_and_large_tiles_round_as_they_write() -> None:
    runs = (*RUNS, (0, 70))
    case = make_case((8, 24), runs, in_features=32, sizes=SIZES, dtype=torch.float16)
    assert_writes_are_rounded(case, case.plan())
