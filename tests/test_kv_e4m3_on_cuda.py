"""Keys and values in e4m3 on a CUDA device: the writes of each of the four kernels, and engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from kernels.e4m3 import FIRST_CAPABILITY
from tests.engine_helpers import make_base
from tests.kv_e4m3_cases import SIZES, assert_writes_are_rounded
from tests.lora_kernel_cases import LoraCase, Run, make_case
from tests.narrow_engines import NarrowEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < FIRST_CAPABILITY,
        reason="needs a CUDA device with e4m3",
    ),
]
# Of log-probabilities. A key that rounds to another bfloat16 can round to another e4m3, 16 times
# coarser. Tokens are the same up to near ties.
TOLERANCE = 0.3
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def cuda_case(runs: Sequence[Run], dtype: torch.dtype) -> LoraCase:
    return make_case((8, 24), runs, in_features=512, sizes=SIZES, dtype=dtype, device="cuda")


@TYPES
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 1500])
def test_the_base_rounds_as_it_writes(tokens: int, has_norm: bool, dtype: torch.dtype) -> None:
    assert_writes_are_rounded(cuda_case(((None, tokens),), dtype), None, has_norm=has_norm)


@TYPES
@pytest.mark.parametrize("has_norm", [False, True], ids=["few rows", "small tiles"])
def test_adapters_of_few_rows_round_as_they_write(has_norm: bool, dtype: torch.dtype) -> None:
    runs = ((None, 2), (1, 4))
    case = cuda_case(runs, dtype)
    assert_writes_are_rounded(case, case.plan(large=False), has_norm=has_norm)


@TYPES
@pytest.mark.parametrize("has_norm", [False, True])
def test_small_and_large_tiles_round_as_they_write(has_norm: bool, dtype: torch.dtype) -> None:
    runs = ((0, 3), (None, 2), (1, 4), (0, 300), (1, 130))
    case = cuda_case(runs, dtype)
    assert_writes_are_rounded(case, case.plan(), has_norm=has_norm)


# -- engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[16, 128], ids=["triton", "gluon"])
def base(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    return make_base(folder, num_hidden_layers=2, head_dim=request.param)


class TestEngine(NarrowEngine):
    tolerance = TOLERANCE
    settings: ClassVar[dict[str, object]] = {"kv_cache_dtype": "fp8"}
