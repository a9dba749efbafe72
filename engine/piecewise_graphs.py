"""CUDA graphs of everything but attention, for steps of some hundred tokens that mix prompts and
decodes.

Launched kernel by kernel, such a step costs the host more than the device: a prompt of 256 tokens
needs 7 ms on the device, 10 ms on the host, 15 ms with adapters. Attention's grid follows the
lengths in the step and stays outside; the part between the attention of two layers is one graph per
layer and number of tokens. Pieces run in one order only, so all of them share one memory pool, and
values that cross attention are in the same three tensors for all sizes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.decode_graphs import GraphKey, GraphMemory, capture_graph
from engine.inputs import ForwardInputs, LoraReach
from engine.kv_cache import KVCache
from engine.model import Model
from lora.pool import AdapterPool

# Tokens, above 512 in tiles of large matrix products. Beyond, the device is slower than the host.
SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# Larger steps are padded by a sixteenth at most: steps with decodes have these sizes, and the
# device takes as long as the host for a prompt alone, which padding would hold up.
_LARGEST_PADDED = 1024
_PIECE_BYTES = 256 * 1024  # the driver's memory of a graph of a dozen kernels

Piece = Callable[[], None]


def piece_sizes(max_tokens: int) -> tuple[int, ...]:
    return tuple(sorted({min(size, max_tokens) for size in SIZES}))


def record(piece: Piece, memory: GraphMemory) -> Piece:
    """Captures a piece and returns the function that replays it."""
    return capture_graph(piece, memory)[0].replay


@dataclass(frozen=True, slots=True)
class _Crossing:
    """The tensors that pieces and attention exchange, for the largest size."""

    queries: torch.Tensor  # [T, Hq, D]
    attended: torch.Tensor  # [T, Hq, D]
    normed: torch.Tensor  # [T, H], of the last piece


class PiecewiseGraphs:
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
        self._crossing: _Crossing | None = None
        # One piece before the first layer's attention, one after each.
        self._pieces: dict[GraphKey, tuple[Piece, ...]] = {}

    def size_for(self, num_tokens: int) -> int | None:
        """Returns the size of the pieces for so many tokens, None if there is none."""
        index = bisect.bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes) or not self._pieces:
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
        num_pieces = self._model.config.num_layers + 1
        return _PIECE_BYTES * num_pieces * len(self.keys)

    def capture(self, key: GraphKey, memory: GraphMemory) -> None:
        if self._crossing is None:
            self._crossing = self._new_crossing()
        crossing, pieces = self._crossing, []
        self._run(key, crossing, lambda piece: piece(), few=True)  # sets up libraries
        self._run(key, crossing, lambda piece: pieces.append(record(piece, memory)))
        self._pieces[key] = tuple(pieces)

    def run(self, key: GraphKey, *, few: bool = False) -> None:
        """Runs the pieces without graphs."""
        self._run(key, self._new_crossing(), lambda piece: piece(), few=few)

    def forward(self, inputs: ForwardInputs, num_tokens: int, size: int) -> torch.Tensor:
        """Computes `Model.forward` for the static inputs of `size`, of which `num_tokens` are
        real."""
        crossing = self._crossing
        assert crossing is not None
        assert inputs.logit_rows is not None
        first, *others = self._pieces[
            GraphKey(size, LoraReach.NONE if inputs.lora is None else LoraReach.ALL)
        ]
        q, attended = crossing.queries[:num_tokens], crossing.attended[:num_tokens]
        first()
        for i, piece in enumerate(others):
            self._model.attend(i, q, inputs, self._kv, attended)
            piece()
        return crossing.normed.index_select(0, inputs.logit_rows)

    def _run(
        self, key: GraphKey, crossing: _Crossing, do: Callable[[Piece], None], *, few: bool = False
    ) -> None:
        """Passes the pieces to `do`, one after the other. `few`: some that together launch every
        kernel and product."""
        model, kv, pool = self._model, self._kv, self._pool
        inputs = self._inputs_of(key.size, key.lora is not LoraReach.NONE)
        last = model.config.num_layers - 1
        q, normed = crossing.queries[: key.size], crossing.normed[: key.size]
        attended = crossing.attended[: key.size].flatten(1)
        # Passed from a piece to the next, which drops it: until then its memory is not reused.
        residuals: list[torch.Tensor] = []

        def begin() -> None:
            embedded = model.embed(inputs, pool)
            residuals.append(model.before_attention(0, None, embedded, inputs, kv, pool, q)[1])

        def go_on(i: int) -> None:
            added, residual = model.after_attention(i, attended, residuals.pop(), inputs, pool)
            if i == last:
                normed.copy_(model.finish(added, residual, inputs))
            else:
                residuals.append(
                    model.before_attention(i + 1, added, residual, inputs, kv, pool, q)[1]
                )

        layers: Iterable[int] = range(last + 1)
        if few:  # a layer's projections are in the piece of the layer before
            befores = (max(0, i - 1) for i in self._few_layers)
            layers = sorted({last, *self._few_layers, *befores})
        do(begin)
        for i in layers:
            do(partial(go_on, i))

    def _new_crossing(self) -> _Crossing:
        config, table = self._model.config, self._model.weights.embedding
        size = self._sizes[-1]
        heads = (size, config.num_heads, config.head_dim)
        return _Crossing(
            table.new_zeros(heads), table.new_zeros(heads), table.new_zeros((size, table.shape[1]))
        )
