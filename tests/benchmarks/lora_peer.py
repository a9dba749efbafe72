"""Our multi-LoRA kernels in the calling convention that the benchmarks of peers use.

A problem is one layer with one or more output slices: `K`, `Ns`, `ranks`, `idx` (the adapter of
each row, -1: none), `scales`, `A[adapter][slice]` [r, K], `B[adapter][slice]` [N_s, r].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.lora_plan import PAGE_ROWS, LoraPlan, lora_plan_size, write_lora_plan
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from tests.lora_strips import make_site_rows, pages_of

DECODE_ROWS = 256  # the engine's largest CUDA graph: beyond it a step may have large tiles


class Problem(Protocol):
    K: int
    Ns: Sequence[int]
    ranks: Sequence[int]
    idx: Sequence[int]
    dtype: torch.dtype
    device: str
    scales: Sequence[float]
    A: Sequence[Sequence[torch.Tensor]]
    B: Sequence[Sequence[torch.Tensor]]


class OurLora:
    name = "loraplex"

    def __init__(self, problem: Problem) -> None:
        p = problem
        self._pages: list[tuple[int, ...]] = []
        num_pages = 0
        for rank in p.ranks:
            count = -(-rank // PAGE_ROWS)
            self._pages.append(tuple(range(num_pages, num_pages + count)))
            num_pages += count
        a: list[dict[int, torch.Tensor]] = [{} for _ in p.Ns]
        b: list[dict[int, torch.Tensor]] = [{} for _ in p.Ns]
        for adapter, pages in enumerate(self._pages):
            for s in range(len(p.Ns)):
                a[s] |= pages_of(p.A[adapter][s], pages)
                scaled = p.B[adapter][s].float() * p.scales[adapter]
                b[s] |= pages_of(scaled.T, pages)
        self._site = make_site_rows(num_pages, a, b, p.K, p.Ns, p.dtype, p.device)
        # The engine sorts sequences by adapter; rows in another order are more runs, each of which
        # counts its pages anew.
        self._runs = [
            (() if adapter < 0 else self._pages[adapter], sum(1 for _ in run))
            for adapter, run in groupby(p.idx)
        ]
        self._tokens = len(p.idx)
        self._max_pages = sum(max(1, len(pages)) for pages, _ in self._runs)
        is_decode = self._tokens <= DECODE_ROWS
        size = lora_plan_size(self._tokens, self._max_pages, large=not is_decode)
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=p.device != "cpu")
        self._array: NDArray[np.int32] = self._host.numpy()
        self._device = torch.empty(size, dtype=torch.int32, device=p.device)

    def step(self) -> None:
        """The metadata of a step: written, and copied to the device."""
        is_decode = self._tokens <= DECODE_ROWS
        counts = write_lora_plan(
            self._array, self._runs, self._tokens, self._max_pages, large=not is_decode
        )
        self._device.copy_(self._host, non_blocking=True)
        if is_decode:
            self._plan = LoraPlan.for_graph(
                self._device, self._tokens, self._tokens, self._max_pages
            )
        else:
            self._plan = LoraPlan.for_step(self._device, counts, self._tokens, self._max_pages)

    def run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        lora_expand_(y, lora_shrink(x, self._site, self._plan), self._site, self._plan)
        return y
