"""Decodes as a CUDA graph computes them, without one: on static buffers, padded to its size."""

from __future__ import annotations

import torch

from engine.decode_graphs import DecodeGraphs, GraphKey
from engine.device_step import DeviceSteps
from engine.runner import ModelRunner


class CalledGraphs(DecodeGraphs):
    """Calls what a graph would replay."""

    def __init__(self, steps: DeviceSteps, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes, steps._run_static)
        self.replayed: list[GraphKey] = []

    def size_for(self, num_rows: int) -> int | None:
        return next((size for size in self._sizes if size >= num_rows), None)

    def replay(self, key: GraphKey) -> torch.Tensor:
        self.replayed.append(key)
        return self._run(key)


def with_graphs(runner: ModelRunner, sizes: tuple[int, ...] = (1, 8)) -> CalledGraphs:
    assert isinstance(runner._steps, DeviceSteps)
    graphs = runner._steps._graphs = CalledGraphs(runner._steps, sizes)
    return graphs
