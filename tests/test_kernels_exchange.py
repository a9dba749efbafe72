"""The exchanges of ranks, and the way to the others from a process that had a group before."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed

from engine.inputs import LoraReach
from engine.step_layout import StepLayout
from kernels.collective import Collective
from kernels.cuda_collective import NumberedStore
from kernels.lora_plan import LoraPlanCounts
from kernels.paged_plan import WorkCounts
from tests.parallel_helpers import on_ranks


def test_the_first_rank_s_numbers_replace_those_of_the_others() -> None:
    def work(ranks: Collective) -> list[int]:
        numbers = torch.arange(4, dtype=torch.int32) + 10 * ranks.rank
        ranks.broadcast_(numbers[1:])
        return numbers.tolist()

    assert on_ranks(3, work) == [[0, 1, 2, 3], [10, 1, 2, 3], [20, 1, 2, 3]]


def test_a_process_of_several_rendezvous_meets_one_of_its_first(tmp_path: Path) -> None:
    """Torch's numbers go on from those of earlier groups: 7 and 8 here, 0 and 1 there."""
    c10d: Any = distributed

    def meet(rank: int) -> list[bytes]:
        store = c10d.FileStore(str(tmp_path / "store"), 2)
        store.set_timeout(timedelta(seconds=10))
        numbered = NumberedStore(c10d.PrefixStore("own", store))
        found = []
        for number in (7, 8) if rank == 0 else (0, 1):
            name = f"CUDASymmetricMemory/{number}"
            numbered.set(f"{name}/{rank}", bytes([rank, 255, number % 7]))
            numbered.wait([f"{name}/{1 - rank}"])
            found.append(numbered.get(f"{name}/{1 - rank}"))
        numbered.set(f"other-{rank}", b"x")
        numbered.wait([f"other-{1 - rank}"], timedelta(seconds=10))
        return found

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(meet, range(2))
    assert first == [b"\x01\xff\x00", b"\x01\xff\x01"]
    assert second == [b"\x00\xff\x00", b"\x00\xff\x01"]


def test_a_step_s_layout_passes_through_json() -> None:
    counts = LoraPlanCounts(9, 1, 2, 3, 4, 5, 6, has_embedding=True)
    layout = StepLayout(
        False,
        64,
        LoraReach.AFFINE,
        9,
        3,
        2,
        WorkCounts(4, 5),
        3,
        num_logit_rows=7,
        lora=counts,
        head=counts,
        prompt_rows=(2, 2),
        prompt_runs=((None, 4), ("0.5*a+ü", 5)),
        all_draw=False,
    )
    plain = StepLayout(True, 8, LoraReach.NONE, 5, 8, 1, WorkCounts(5, 0), 5)
    for one in (layout, plain):
        found = msgspec.convert(json.loads(json.dumps(asdict(one))), StepLayout)
        assert found == one
        assert isinstance(found.reach, LoraReach)
