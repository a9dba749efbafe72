"""Decodes as a CUDA graph computes them, without one: on static buffers, padded to its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.decode_graphs import DecodeGraphs, GraphKey
from engine.device_step import DeviceSteps
from engine.runner import ModelRunner


class CalledGraphs(DecodeGraphs):
    """Calls what a graph would replay."""

    def __init__(self, steps: DeviceSteps, sizes: tuple[int, ...] = (1, 8)) -> None:
        super().__init__(sizes, steps._run_static, few_layers=())
        self.replayed: list[GraphKey] = []

    def size_for(self, num_rows: int) -> int | None:
        return next((size for size in self._sizes if size >= num_rows), None)

    def replay(self, key: GraphKey) -> torch.Tensor:
        self.replayed.append(key)
        return self._run(key, None)


def with_graphs(runner: ModelRunner, sizes: tuple[int, ...] = (1, 8)) -> CalledGraphs:
    assert isinstance(runner._steps, DeviceSteps)
    graphs = runner._steps._graphs = CalledGraphs(runner._steps, sizes)
    return graphs


def call_graphs_everywhere() -> None:
    """Lets every runner of this process call what it would replay."""
    begin = DeviceSteps.__init__

    def begin_with_graphs(self: DeviceSteps, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._graphs = CalledGraphs(self)

    DeviceSteps.__init__ = begin_with_graphs  # type: ignore[method-assign]


def use_few_programs(replace: Callable[[Any, str, int], None]) -> None:
    """Reduces the programs that walk the tiles: interpreted one after the other, they are slow."""
    from kernels import (
        triton_lora_expand,
        triton_lora_rope_kv_write,
        triton_lora_shrink,
        triton_lora_silu_mul,
    )

    for module in (
        triton_lora_expand,
        triton_lora_rope_kv_write,
        triton_lora_shrink,
        triton_lora_silu_mul,
    ):
        replace(module, "NUM_PROGRAMS", 4)
