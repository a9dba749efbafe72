"""A base's safetensors read into the parameters of the decoder; q, k, v and gate, up are fused.

Reads tensor by tensor: no second copy of the model in memory. The layers' matrices can be kept in
FP8: each is quantised as it is read, or taken as it is stored. Matrices of 4-bit integers can
stay so: they are packed anew as they are read, and never dequantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import Checkpoint, Cut
from engine.int4_forms import NO_INT4, Int4Forms
from engine.parallel.shards import Shard
from engine.weight_shapes import expected_shapes, is_matrix, is_norm, layer_matrices
from kernels.e4m3 import E4m3Rows, empty_rows
from kernels.int4 import Int4Rows, empty_int4
from kernels.matrix import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    input_norm: torch.Tensor | None = None  # [H], of attention's input
    attention_post_norm: torch.Tensor | None = None  # [H], of attention's output
    mlp_norm: torch.Tensor | None = None  # [H], of the MLP's input
    mlp_post_norm: torch.Tensor | None = None  # [H], of the MLP's output
    qkv: Matrix  # [(Hq + 2 * Hkv) * D, H]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]; of all heads together [Hq * D]
    k_norm: torch.Tensor | None
    o: Matrix  # [H, Hq * D]
    o_bias: torch.Tensor | None
    gate_up: Matrix  # [2 * I, H]
    gate_up_bias: torch.Tensor | None
    down: Matrix  # [H, I]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H], or this rank's rows; the embedding itself, or a view, if tied
    # All of them by the names of the files, parts of fused ones as views. A tied head is the
    # embedding's own object.
    parameters: Mapping[str, Matrix]

    @property
    def nbytes(self) -> int:
        """The bytes in memory: a tied head has none of its own."""
        layers = [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        is_tied = self.parameters["lm_head.weight"] is self.parameters["model.embed_tokens.weight"]
        whole = [self.embedding, self.norm, *([] if is_tied else [self.head]), *layers]
        return sum(one.nbytes for one in whole if one is not None)


class WeightBuilder:
    """The parameters of a rank's part of a base, allocated and of any content at first: on the meta
    device, shapes without memory. Records, for each tensor of the files, its destination."""

    def __init__(
        self,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_fp8: bool = False,
        int4: Int4Forms = NO_INT4,
    ) -> None:
        """`is_fp8`: the matrices of the layers become e4m3 rows, except the matrices in `int4`.
        Rows that are quantised here have the scale of the part that is kept of them."""
        self._places: dict[str, Matrix] = {}
        self._is_fp8 = is_fp8
        self._int4 = int4
        self._shard = shard
        self._config = shard.whole
        self._shapes = shard.shapes()
        self._dtype = dtype
        self._device = device
        self.weights = self._allocate()

    def load(self, folder: Path) -> Weights:
        """Reads the shard's part of a base from its files."""
        shard, places = self._shard, self._places
        assert places.keys() == expected_shapes(shard.whole).keys()
        offset = shard.whole.family.norm_offset
        checkpoint = Checkpoint(folder, shard.whole)
        taken: set[str] = set()
        for name, place in places.items():
            module = name.removesuffix(".weight")
            if isinstance(place, Int4Rows):
                _take_int4(place, checkpoint, module, self._cut_of(name))
                taken.add(name)
            elif isinstance(place, E4m3Rows):
                stored = checkpoint.e4m3_rows(module, self._cut_of(name))
                if stored is not None:
                    place.copy_(E4m3Rows(*stored))
                    taken.add(name)
            elif name.endswith(".bias") and not shard.adds_bias(name.removesuffix(".bias")):
                place.zero_()
                taken.add(name)
        for name, rows, tensor in checkpoint.stream(self._device, taken, self._cut_of):
            place = places[name][rows]
            assert not isinstance(place, Int4Rows)
            if isinstance(place, E4m3Rows):
                place.write_(tensor)
                continue
            place.copy_(tensor)
            if offset and is_norm(name):
                place += offset  # in float32, as norms with an offset are kept
        return self.weights

    def fill_randomly(self) -> Weights:
        """Draws random weights, as vLLM's `--load-format dummy`: made on the device, no files.
        Scaled so that activations keep their size; the same on every call with one device and
        shape, hence the embedding on all ranks. FP8 and 4 bits hold the weights of the type,
        quantised."""
        generator = torch.Generator(self._device).manual_seed(0)
        for name, place in self._places.items():
            if isinstance(place, E4m3Rows | Int4Rows):
                drawn = torch.empty(place.shape, dtype=self._dtype, device=self._device)
                drawn.normal_(0.0, place.shape[-1] ** -0.5, generator=generator)
                if isinstance(place, E4m3Rows):
                    place.write_(drawn)
                else:
                    place.write_nearest_(drawn)
            elif is_norm(name):
                place.fill_(1)
            elif name.endswith(".bias"):
                place.zero_()
            else:
                place.normal_(0.0, place.shape[-1] ** -0.5, generator=generator)
        return self.weights

    def _cut_of(self, name: str) -> Cut:
        module, shard = name.rpartition(".")[0], self._shard
        return Cut(shard.outputs(module), shard.inputs(module) if is_matrix(name) else None)

    def _allocate(self) -> Weights:
        embedding = self._make("model.embed_tokens.weight")
        layers = tuple(self._layer(i) for i in range(self._config.num_layers))
        norm = self._make("model.norm.weight")
        if not self._config.ties_embeddings:
            head = self._make("lm_head.weight")
        elif self._shard.size == 1:
            head = embedding
        else:
            head = embedding[slice(*self._shard.vocab)]
        parameters = dict(self._places)
        if self._config.ties_embeddings:
            parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]
        return Weights(embedding, layers, norm, head, parameters)

    def _layer(self, index: int) -> LayerWeights:
        layer = f"model.layers.{index}"
        parts: dict[str, Any] = {
            place: self._make(f"{layer}.{norm}.weight")
            for place, norm in self._config.family.norms.items()
        }
        for place, names in layer_matrices(self._config, index).items():
            parts[place] = self._make_matrix(*names)
            biases = [f"{name.removesuffix('.weight')}.bias" for name in names]
            parts[f"{place}_bias"] = self._make_if_expected(*biases)
        for place in ("q_norm", "k_norm"):
            parts[place] = self._make_if_expected(f"{layer}.self_attn.{place}.weight")
        return LayerWeights(**parts)

    def _make_matrix(self, *names: str) -> Matrix:
        """Allocates one matrix of a layer, in 4 bits or FP8 if it is to be quantised."""
        form = self._int4.get(names[0])
        if form is None and not self._is_fp8:
            return self._make(*names)
        sizes = [self._shapes[name][0] for name in names]
        height, width = sum(sizes), self._shapes[names[0]][1]
        rows: E4m3Rows | Int4Rows
        if form is not None:
            rows = empty_int4(height, width, form, self._device)
        else:
            rows = empty_rows(height, width, self._device)
        self._places.update(zip(names, rows.split(sizes), strict=True))
        return rows

    def _make(self, *names: str) -> torch.Tensor:
        """Allocates one parameter with the named tensors stacked in it."""
        sizes = [self._shapes[name][0] for name in names]
        shape = (sum(sizes), *self._shapes[names[0]][1:])
        is_wide = self._config.family.has_wide_norms and is_norm(names[0])
        dtype = torch.float32 if is_wide else self._dtype
        parameter = torch.empty(shape, dtype=dtype, device=self._device)
        self._places.update(zip(names, torch.split(parameter, sizes), strict=True))
        return parameter

    def _make_if_expected(self, *names: str) -> torch.Tensor | None:
        return self._make(*names) if names[0] in self._shapes else None


def _take_int4(place: Int4Rows, checkpoint: Checkpoint, module: str, cut: Cut) -> None:
    has_zeros = place.zeros is not None
    for rows, integers in checkpoint.int4_rows(module, place.device, cut, has_zeros=has_zeros):
        if cut.columns is not None:
            integers = integers.columns(*cut.columns, place.group_size)
        place[rows].write_(integers)
    if place.order is not None:  # the same of all modules of a matrix
        order = checkpoint.int4_order(module)
        assert order is not None
        place.order.copy_(order)
