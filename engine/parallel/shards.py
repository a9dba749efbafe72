"""The part of a base and of its adapters that each rank of a tensor-parallel group holds.

Shoeybi et al., "Megatron-LM", arXiv 1909.08053: q, k, v, gate and up are cut by outputs, o and down
by inputs, so a layer needs two sums over the ranks. Where KV heads are fewer than ranks, several
ranks hold the same head. The head is cut by tokens; the embedding is whole on every rank, since a
gather of rows is cheaper than an exchange, and a tied head is a view of its own rows there.

Adapters are cut as their sites are: B by outputs and A whole, or A by inputs and B whole. The
addition of an adapter is linear in its inputs, so the base's sum also sums the parts of the
adapters: LoRA needs no exchange of its own. All ranks have the same shapes. Numbers and views only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.errors import UnsupportedModelError
from engine.model_config import ModelConfig, lora_sites
from engine.weight_shapes import expected_shapes
from lora.adapter import Adapter, ModuleWeights
from lora.sites import Site, Slice

Range = tuple[int, int]  # [first, end)
MAX_RANKS = 64
_BY_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part. Raises UnsupportedModelError if the base cannot be cut into `size` parts."""

    whole: ModelConfig
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        config, size = self.whole, self.size
        sizes = {
            "num_attention_heads": config.num_heads,
            "intermediate_size": config.intermediate_size,
        }
        for key, value in sizes.items():
            if value % size:
                raise UnsupportedModelError(
                    f"tensor_parallel_size is {size}, which does not divide {key} {value}"
                )
        heads = config.num_kv_heads
        if heads % size and size % heads:
            raise UnsupportedModelError(
                f"tensor_parallel_size is {size}, which neither divides num_key_value_heads "
                f"{heads} nor is a multiple of it"
            )

    @property
    def config(self) -> ModelConfig:
        """The model as this rank computes it: all layers, some heads of each."""
        if self.size == 1:
            return self.whole
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.size,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.size),
            intermediate_size=self.whole.intermediate_size // self.size,
        )

    @property
    def vocab(self) -> Range:
        """The tokens of the head on this rank: fewer, or none, on the last ones if the vocabulary
        is no multiple."""
        width, size = self.vocab_width, self.whole.vocab_size
        return min(self.rank * width, size), min((self.rank + 1) * width, size)

    @property
    def vocab_width(self) -> int:
        """The columns of logits that each rank contributes; the last ones may be padding."""
        return -(-self.whole.vocab_size // self.size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of `expected_shapes` on this rank."""
        shapes = expected_shapes(self.config)
        if "lm_head.weight" in shapes:
            first, end = self.vocab
            shapes["lm_head.weight"] = (end - first, self.whole.hidden_size)
        return shapes

    def sites(self) -> tuple[Site, ...]:
        """Returns the adaptable sites with this rank's sizes."""
        sites = lora_sites(self.config)
        if self.size == 1:
            return sites
        head = Slice("lm_head", self.vocab_width)
        return tuple(replace(s, slices=(head,)) if s.name == "lm_head" else s for s in sites)

    def outputs(self, module: str) -> tuple[Range, ...] | None:
        """Returns the outputs of a module of the base that this rank computes, in order; None: all.
        Those of q_norm and k_norm, of all heads together, are their weights."""
        if self.size == 1:
            return None
        whole, own = self.whole, self.config
        q = (self.rank * own.q_size, (self.rank + 1) * own.q_size)
        head = self.rank * whole.num_kv_heads // self.size
        kv = (head * whole.head_dim, head * whole.head_dim + own.kv_size)
        inner = (self.rank * own.intermediate_size, (self.rank + 1) * own.intermediate_size)
        name = module.rsplit(".", 1)[-1]
        is_wide = whole.family.qk_norm == "all"
        match name:
            case "q_proj":
                return (q,)
            case "k_proj" | "v_proj":
                return (kv,)
            case "q_norm" if is_wide:
                return (q,)
            case "k_norm" if is_wide:
                return (kv,)
            case "qkv_proj":
                return q, _moved(kv, whole.q_size), _moved(kv, whole.q_size + whole.kv_size)
            case "gate_proj" | "up_proj":
                return (inner,)
            case "gate_up_proj":
                return inner, _moved(inner, whole.intermediate_size)
            case "lm_head":
                return (self.vocab,)
        return None

    def inputs(self, module: str) -> Range | None:
        """Returns the inputs of a module that this rank reads; None: all."""
        name = module.rsplit(".", 1)[-1]
        if self.size == 1 or name not in _BY_INPUTS:
            return None
        width = self.config.q_size if name == "o_proj" else self.config.intermediate_size
        return self.rank * width, (self.rank + 1) * width

    def adds_bias(self, module: str) -> bool:
        """Returns False if another rank adds the module's bias to the sum."""
        return self.rank == 0 or module.rsplit(".", 1)[-1] not in _BY_INPUTS

    def adapter(self, adapter: Adapter) -> Adapter:
        """Returns this rank's part of an adapter, whose halves are views where they can be."""
        if self.size == 1:
            return adapter
        modules = {name: self._module(name, one) for name, one in adapter.modules.items()}
        return replace(adapter, modules=modules)

    def _module(self, name: str, weights: ModuleWeights) -> ModuleWeights:
        affine = weights.affine
        if (inputs := self.inputs(name)) is not None:
            if affine is not None and self.rank > 0:
                # The base's part is scaled on every rank, offsets are added by one.
                affine = torch.cat((affine[:1], torch.zeros_like(affine[1:])))
            a = weights.lora_a[:, slice(*inputs)]
            return replace(weights, lora_a=a, affine=affine)
        outputs = self.outputs(name)
        if outputs is None:
            return weights
        b = _columns(weights.lora_b, outputs)
        if name == "lm_head" and b.shape[1] < self.vocab_width:
            b = torch.nn.functional.pad(b, (0, self.vocab_width - b.shape[1]))
        affine = None if affine is None else _columns(affine, outputs).contiguous()
        return replace(weights, lora_b=b, affine=affine)


def _moved(one: Range, by: int) -> Range:
    return one[0] + by, one[1] + by


def _columns(matrix: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    parts = [matrix[:, slice(*one)] for one in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
