"""The adaptable parts of a base model: its linear layers as they are fused, and its embedding.

A site is one matrix product of the forward pass; its slices are the Hugging Face modules fused into
it, side by side in the output. A module that is fused in the checkpoint already, as Phi's qkv_proj,
has several slices: one A, and B cut by rows. Names and numbers only: no tensors, no model classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Slice:
    module: str  # path below the model, e.g. "model.layers.3.self_attn.q_proj"
    out_features: int


@dataclass(frozen=True, slots=True)
class Site:
    name: str  # e.g. "model.layers.3.qkv"
    in_features: int  # for an embedding: the vocabulary size
    slices: tuple[Slice, ...]
    kind: Literal["linear", "embedding"] = "linear"

    @property
    def is_optional(self) -> bool:
        """True for the two rarely adapted sites, which have a matrix as wide as the vocabulary."""
        return self.kind == "embedding" or self.name == "lm_head"


@dataclass(frozen=True, slots=True)
class Target:
    """One module that an adapter may change."""

    site: Site
    module: str
    out_features: int  # of all its slices


def targets_by_module(sites: Sequence[Site]) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    for site in sites:
        for part in site.slices:
            before = targets[part.module].out_features if part.module in targets else 0
            targets[part.module] = Target(site, part.module, before + part.out_features)
    return targets
