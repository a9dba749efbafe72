"""The product of few rows, compiled for Hopper on a machine without a GPU: the interpreter knows
neither its prefetches nor programmatic dependent launch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kernels.backend import HAS_TRITON, traced_for
from kernels.linear import linear, linear_shrink
from kernels.lora_plan import LoraPlan, lora_plan_size
from kernels.lora_rows import SiteRows

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Triton on its next version's defaults
]
HOPPER = (9, 0)
FOUND = re.compile(r"griddepcontrol\.(\w+)|cp\.async\.bulk\.(prefetch)\.L2|cp\.async\.(cg)\.")
WALK = ["prefetch", "wait", "cg"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("height", [4096, 28672])
def test_a_weight_is_prefetched_before_the_wait(height: int) -> None:
    assert instructions(height, 4096) == ["launch_dependents", *WALK]


def test_a_page_is_prefetched_before_the_wait() -> None:
    buffer = torch.empty(lora_plan_size(8, 8, large=False), dtype=torch.int32, device="meta")
    plan = LoraPlan.for_graph(buffer, 8, 8, 8)
    assert instructions(4096, 14336, plan) == ["launch_dependents", *WALK, *WALK]


def instructions(height: int, width: int, plan: LoraPlan | None = None) -> list[str]:
    """Returns the prefetches, copies and halves of dependent launch in the order of the binary,
    copies in a row as one."""
    from kernels.kernel_compiler import compile_call, targeted
    from kernels.triton_launch import recorded_calls

    weight = torch.empty(height, width, dtype=torch.bfloat16, device="meta")
    x = torch.empty(8, width, dtype=torch.bfloat16, device="meta")
    with traced_for(HOPPER), recorded_calls() as calls:
        if plan is None:
            linear(x, weight, None)
        else:
            entries = torch.empty(8, 1, dtype=torch.int64, device="meta")
            site = SiteRows(torch.empty_like(x[0]), entries, entries, width, (height,))
            linear_shrink(x, weight, None, site, plan)
    (call,) = calls
    with targeted(HOPPER):
        ptx = str(compile_call(call).asm["ptx"])
    names = ["".join(groups) for groups in FOUND.findall(ptx)]
    return [name for i, name in enumerate(names) if name != "cg" or names[i - 1] != "cg"]
