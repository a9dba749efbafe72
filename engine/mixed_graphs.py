"""CUDA graphs of steps of up to some thousand tokens that mix prompts and decodes.

Launched kernel by kernel, such a step costs the host more than the device: a prompt of 256 tokens
needs 7 ms on the device, 10 ms on the host, 15 ms with adapters. A graph is captured for a number
of tokens, whatever their sequences: attention's programs draw as many units of work as the step
has, as in the graphs of decodes. The logits and the draw stay outside, because their rows do not
follow from the tokens.

Where a load of KV blocks arrives in parts (`engine.block_copies`), the graph of a step is cut
before the first attention that reads each part, and computes the layers before it meanwhile.
Graphs run in one order only, so all of them share one memory pool, and the normed rows of all sizes
are in the same tensor.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch

from engine.block_copies import first_layers
from engine.decode_graphs import BeforeLayer, GraphKey, GraphMemory, capture_graphs
from engine.inputs import ForwardInputs, LoraReach
from engine.kv_cache import KVCache
from engine.model import Model
from lora.pool import AdapterPool

# Tokens, above 512 in tiles of large matrix products. Beyond, the device is slower than the host.
SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# Larger steps are padded by a sixteenth at most: steps with decodes have these sizes, and the
# device takes as long as the host for a prompt alone, which padding would hold up.
_LARGEST_PADDED = 1024
_LAYER_BYTES = 256 * 1024  # the driver's memory of a layer in a graph: some 25 kernels


def mixed_sizes(max_tokens: int) -> tuple[int, ...]:
    return tuple(sorted({min(size, max_tokens) for size in SIZES}))


class MixedGraphs:
    def __init__(
        self,
        sizes: tuple[int, ...],
        model: Model,
        kv: KVCache,
        pool: AdapterPool,
        # Static, for a number of tokens and with or without LoRA.
        inputs_of: Callable[[int, bool], ForwardInputs],
        few_layers: Sequence[int],  # as `Model.layers_of_each_kind`
    ) -> None:
        self._sizes = sizes
        self._model = model
        self._kv = kv
        self._pool = pool
        self._inputs_of = inputs_of
        self._few_layers = few_layers
        self._normed: torch.Tensor | None = None  # [T, H], for the largest size
        self._firsts = first_layers(kv) or (0,)  # layers whose attention begins a graph
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, ...]] = {}

    def size_for(self, num_tokens: int) -> int | None:
        """Returns the size of the graph for so many tokens, None if there is none."""
        index = bisect.bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes) or not self._graphs:
            return None
        size = self._sizes[index]
        is_near = size <= _LARGEST_PADDED or 16 * num_tokens >= 15 * size
        return size if is_near else None

    @property
    def keys(self) -> list[GraphKey]:
        """The keys, largest first: smaller graphs then fit into the memory of the first."""
        has_lora = self._pool.num_blocks > 0
        reaches = (LoraReach.ALL, LoraReach.NONE) if has_lora else (LoraReach.NONE,)
        return [GraphKey(size, reach) for size in reversed(self._sizes) for reach in reaches]

    def overhead(self) -> int:
        """Returns an estimate of the graphs' bytes beyond their steps' tensors."""
        return _LAYER_BYTES * self._model.config.num_layers * len(self.keys)

    def capture(self, key: GraphKey, memory: GraphMemory) -> None:
        if self._normed is None:
            self._normed = self._new_normed()
        normed = self._normed
        self.run(key, few=True)  # sets up libraries
        inputs = self._inputs_of(key.size, key.lora is not LoraReach.NONE)
        self._graphs[key] = capture_graphs(
            lambda before: self._run(inputs, normed, None, before), self._firsts[1:], memory
        )[0]

    def run(self, key: GraphKey, *, few: bool = False) -> None:
        """Runs a step without a graph. `few`: some of its layers, which together launch every
        kernel and product."""
        normed = self._new_normed() if self._normed is None else self._normed
        inputs = self._inputs_of(key.size, key.lora is not LoraReach.NONE)
        self._run(inputs, normed, self._few_layers if few else None, None)

    def forward(self, inputs: ForwardInputs, size: int) -> torch.Tensor:
        """Computes `Model.forward` for the static inputs of `size`."""
        assert self._normed is not None
        assert inputs.logit_rows is not None
        reach = LoraReach.NONE if inputs.lora is None else LoraReach.ALL
        for first, graph in zip(self._firsts, self._graphs[GraphKey(size, reach)], strict=True):
            self._kv.arrivals.wait(first)
            graph.replay()
        return self._normed.index_select(0, inputs.logit_rows)

    def _run(
        self,
        inputs: ForwardInputs,
        normed: torch.Tensor,
        layers: Sequence[int] | None,
        before: BeforeLayer | None,
    ) -> None:
        rows = self._model.forward(inputs, self._kv, self._pool, layers, before)
        normed[: len(rows)].copy_(rows)

    def _new_normed(self) -> torch.Tensor:
        table = self._model.weights.embedding
        return table.new_zeros((self._sizes[-1], table.shape[1]))
