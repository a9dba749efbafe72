"""Kernels of decode steps, compiled for Hopper on a machine without a GPU: the interpreter knows
neither prefetches nor programmatic dependent launch nor which thread has what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kernels.backend import HAS_TRITON, traced_for
from kernels.linear import linear, linear_shrink
from kernels.lora_plan import Bridge, LoraPlan, lora_plan_size
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_rows import SiteRows
from kernels.rope_write import RopeWrite

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


@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_read_and_written_sixteen_bytes_at_a_time(has_norm: bool) -> None:
    """An order of columns that a version of Triton spreads over threads in another way would show
    here, in narrower or rearranged accesses."""
    from kernels.kernel_compiler import compile_call, targeted
    from kernels.triton_launch import recorded_calls

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    plan = LoraPlan.for_graph(
        meta(lora_plan_size(32, 32, large=False), dtype=torch.int32), 32, 32, 32
    )
    entries = meta(32, 3, dtype=torch.int64)
    site = SiteRows(meta(4096), entries, entries, 4096, (4096, 1024, 1024))
    planes = meta(16, 3, plan.max_rank_pages, 32, 16, dtype=torch.float32)
    positions, cos_sin = meta(32, dtype=torch.int64), meta(50, 2, 64, dtype=torch.float32)
    cache, norm = meta(10, 16, 8, 128), meta(128) if has_norm else None
    write = RopeWrite(positions, cos_sin, cache, cache, positions, 32, 8, 128, norm, norm)
    with traced_for(HOPPER), recorded_calls() as calls:
        lora_rope_kv_write(meta(32, 6144), Bridge(planes, None), site, plan, write)
    (call,) = calls
    with targeted(HOPPER):
        ptx = str(compile_call(call).asm["ptx"])
    assert "mma.sync.aligned.m16n8k16" in ptx
    assert "wgmma" not in ptx
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    # The others are the plan's, positions and slots.
    assert set(re.findall(r"ld\.global\S*", ptx)) <= {
        "ld.global.v4.b32", "ld.global.b32", "ld.global.b64"
    }  # fmt: skip


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
