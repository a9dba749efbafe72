"""CUDA graphs of decode steps: forward pass, logits and draw, one graph a batch size.

A replay costs the host one launch instead of some hundreds. Whatever changes between steps (tokens,
block tables, which adapters) is data in static buffers, so a graph serves every mix of adapters;
steps without any adapter have graphs of their own, without LoRA kernels. All graphs share one
memory pool: only one runs at a time.
"""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphKey:
    size: int  # sequences
    has_lora: bool


def graph_sizes(max_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8, wider as padding costs less: at most 1/8 beyond 64."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_seqs + 32, 32)]
    return tuple(sorted({min(size, max_seqs) for size in sizes}))


class DecodeGraphs:
    def __init__(self, sizes: tuple[int, ...], run: Callable[[GraphKey], torch.Tensor]) -> None:
        """`run` does one step of the key's size on the static buffers and returns its logits."""
        self._sizes = sizes
        self._run = run
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def size_for(self, num_sequences: int) -> int | None:
        """The smallest graph that holds them."""
        index = bisect.bisect_left(self._sizes, num_sequences)
        return self._sizes[index] if index < len(self._sizes) and self._graphs else None

    def keys(self, with_lora: bool) -> list[GraphKey]:
        """Largest first: smaller ones then fit into the memory that it took."""
        return [
            GraphKey(size, has_lora)
            for size in reversed(self._sizes)
            for has_lora in ((True, False) if with_lora else (False,))
        ]

    def capture(self, with_lora: bool) -> None:
        started_s = time.perf_counter()
        keys = self.keys(with_lora)
        memory = torch.cuda.graph_pool_handle()
        for key in tqdm(keys, desc="capturing CUDA graphs", unit="graph"):
            self._run(key)  # compiles kernels, sets up libraries: neither may happen in a capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                logits = self._run(key)
            self._graphs[key] = (graph, logits)
        gc.collect()
        logger.info("captured %d graphs in %.1f s", len(keys), time.perf_counter() - started_s)

    def replay(self, key: GraphKey) -> torch.Tensor:
        """The logits [size, V], valid until the next replay."""
        graph, logits = self._graphs[key]
        graph.replay()
        return logits
