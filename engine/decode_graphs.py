"""CUDA graphs of decode steps: forward pass, logits and draw, one graph per batch size.

A replay costs the host one launch instead of some hundreds. Everything that changes between steps
(tokens, block tables, adapters) is data in static buffers, so a graph serves every mix of adapters.
Steps without any adapter have graphs of their own, without LoRA kernels, and so have steps whose
adapters have attention's sites only, and steps with affine rows (DoRA, biases), which need kernels
with more registers. The kernels of the head and the embedding, which few adapters
have, are in the graphs of all sites: where no adapter needs them, their programs end at once. All
graphs share one memory pool: only one runs at a time.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from engine.inputs import LoraReach

GraphMemory = Any  # torch's handle of the pool that a graph's tensors come from
BeforeLayer = Callable[[int], None]
T = TypeVar("T")
# Together these launch every kernel of the other reaches, too.
_RUN_FIRST = (LoraReach.ALL, LoraReach.NONE, LoraReach.AFFINE)


@dataclass(frozen=True, slots=True)
class GraphKey:
    size: int  # rows: sequences, or also the tokens of their drafts; of mixed steps: tokens
    lora: LoraReach


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, then steps of 8, wider as padding costs less: at most 1/8 beyond 64."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_rows + 32, 32)]
    return tuple(sorted({min(size, max_rows) for size in sizes}))


def capture_graphs(
    run: Callable[[BeforeLayer], T], cuts: Collection[int], memory: GraphMemory
) -> tuple[tuple[torch.cuda.CUDAGraph, ...], T]:
    """Captures the launches of `run`, which must have run before, and returns its result. `run`
    calls the function that it gets before the attention of each layer; at the layers of `cuts` a
    graph ends there and the next begins.

    `torch.cuda.graph` empties the allocators' caches before each capture, the pinned one included:
    4.8 of the 9 s that 884 graphs took (H200).
    """
    graphs: list[torch.cuda.CUDAGraph] = []

    def begin() -> None:
        graphs.append(torch.cuda.CUDAGraph())
        # Other threads go on: that of NCCL queries events.
        graphs[-1].capture_begin(pool=memory, capture_error_mode="thread_local")

    def cut(layer: int) -> None:
        if layer in cuts:
            graphs[-1].capture_end()
            begin()

    torch.cuda.synchronize()
    with torch.cuda.stream(_capture_stream()):
        begin()
        try:
            result = run(cut)
        finally:
            graphs[-1].capture_end()
    return tuple(graphs), result


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class DecodeGraphs:
    def __init__(
        self,
        sizes: tuple[int, ...],
        run: Callable[[GraphKey, Sequence[int] | None], torch.Tensor],
        few_layers: Sequence[int],
    ) -> None:
        """`run` computes some or all layers of one step of the key's size on the static buffers
        and returns its logits. `few_layers`: as `Model.layers_of_each_kind`."""
        self._sizes = sizes
        self._run = run
        self._few_layers = few_layers
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the captured graphs, ascending."""
        return self._sizes if self._graphs else ()

    def size_for(self, num_rows: int) -> int | None:
        """Returns the smallest graph that holds the rows."""
        sizes = self.sizes
        index = bisect.bisect_left(sizes, num_rows)
        return sizes[index] if index < len(sizes) else None

    def keys(self, with_lora: bool, with_affine: bool) -> list[GraphKey]:
        """Returns the keys, largest first: smaller graphs then fit into the memory of the first."""
        reaches = [LoraReach.NONE]
        if with_lora:
            reaches = [LoraReach.ALL, LoraReach.ATTENTION, LoraReach.QKV, LoraReach.NONE]
            reaches += [LoraReach.AFFINE] if with_affine else []
        return [GraphKey(size, reach) for size in reversed(self._sizes) for reach in reaches]

    def capture(self, key: GraphKey, memory: GraphMemory) -> None:
        if key.lora in _RUN_FIRST:
            # Loads kernels, sets up libraries: neither may happen in a capture. Of 32 equal layers
            # two do, which spares 1.3 s of the host's time.
            self._run(key, self._few_layers)
        (graph,), logits = capture_graphs(lambda _: self._run(key, None), (), memory)
        self._graphs[key] = graph, logits

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Returns the logits [size, V], valid until the next replay."""
        graph, logits = self._graphs[key]
        graph.replay()
        return logits
