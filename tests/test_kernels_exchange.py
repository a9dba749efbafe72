"""The exchanges of ranks, and the way to the others from a process that had a group before."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed

from engine.inputs import LoraReach
from engine.step_layout import StepLayout
from kernels import cuda_collective
from kernels.collective import Collective, Gloo
from kernels.cuda_collective import NumberedStore, open_exchange
from kernels.lora_plan import LoraPlanCounts
from kernels.paged_plan import WorkCounts
from tests.parallel_helpers import on_ranks
from tests.rank_processes import on_processes

_C10D: Any = distributed
_PRIVATE: Any = torch._C._distributed_c10d


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


class _GlooForNccl(Gloo):
    def __init__(self, store: Any, rank: int, size: int, device: torch.device, _: float) -> None:
        super().__init__(_C10D.PrefixStore("gloo", store), rank, size, timeout_s=20.0)
        self.device, self.backend = device, self._group


class _MemoryWithFault:
    """Stands for torch's symmetric memory, with its calls of the store, and lacks one step."""

    def __init__(self, fault: str | None) -> None:
        self._fault = fault

    def _try(self, step: str) -> None:
        if step == self._fault:
            raise RuntimeError(f"no {step} on this rank")

    def empty_strided_p2p(self, shape: Any, _: Any, dtype: Any, device: Any) -> torch.Tensor:
        self._try("memory")
        return torch.empty(shape, dtype=dtype, device=device)

    def rendezvous(self, buffer: torch.Tensor, name: str) -> SimpleNamespace:
        group = _PRIVATE._resolve_process_group(name)
        store, others = group.get_group_store(), range(group.size())
        for i, step in enumerate(("request", "barrier")):
            self._try(step)
            store.set(f"Memory/{i}/{group.rank()}", b"x")
            store.wait([f"Memory/{i}/{other}" for other in others])
        return SimpleNamespace(get_signal_pad=self._pad, buffer_ptrs=[buffer.data_ptr()] * 2)

    def _pad(self, *_: object) -> None:
        self._try("pad")


_FAULTS = ("memory", "request", "barrier", "pad", None)


def _open_with_faults(rank: int, size: int, path: Path) -> list[tuple[str, float]]:
    """Opens exchanges whose second rank meets each of the faults. Returns their kinds, and sums by
    gloo after each."""
    gloos: list[_GlooForNccl] = []
    found = []

    def make(*args: Any) -> _GlooForNccl:
        gloos.append(_GlooForNccl(*args))
        return gloos[-1]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("set_device", "Stream"):
            patch.setattr(torch.cuda, name, lambda _: None)
        patch.setattr(cuda_collective, "are_peers", lambda _: True)
        patch.setattr(cuda_collective, "Nccl", make)
        for fault in _FAULTS:
            patch.setattr(_PRIVATE, "_SymmetricMemory", _MemoryWithFault(fault if rank else None))
            store = _C10D.FileStore(f"{path}-{fault}", size)
            store.set_timeout(timedelta(seconds=40))
            opened = open_exchange(store, rank, size, torch.device("cpu"), 1024, 64, 40.0)
            total = gloos[-1].all_reduce(torch.tensor([[rank + 1.0]]))
            found.append((type(opened).__name__, float(total)))
    return found


@pytest.mark.slow
def test_memory_that_one_rank_cannot_open_is_used_by_none() -> None:
    """The sum shows that no rank is an exchange ahead of the other."""
    expected = [("SymmetricMemory" if one is None else "_GlooForNccl", 3.0) for one in _FAULTS]
    assert on_processes(2, _open_with_faults) == [expected] * 2


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
