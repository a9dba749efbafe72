"""The adapters of each token of a step, in the form of the operations adapter by adapter.

Built once per step from the batch's runs of tokens, shared by all layers. An owner is a small
integer, the place of an adapter key among those of this step; -1 means no adapter. The adapters of
a key are applied one after the other, so a row's bits depend on its own key only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.lora_shrink_expand import Tokens
from lora.adapter_key import key_adapters
from lora.heap import Deltas, SiteDeltas
from lora.pool import AdapterPool

WeightedDeltas = tuple[tuple[Deltas, float], ...]  # of each adapter of a key, with its weight


@dataclass(frozen=True, slots=True)
class LoraBatch:
    owners: tuple[int, ...]  # of each token
    deltas: tuple[WeightedDeltas, ...]  # of each owner
    tokens: tuple[Tokens | None, ...]  # of each owner; None: none in these rows
    device: torch.device

    def targets(self, site: str) -> bool:
        return any(site in deltas for own in self.deltas for deltas, _ in own)

    def deltas_at(self, site: str) -> Iterator[tuple[Tokens, SiteDeltas, float]]:
        """Yields each adapter's tokens, deltas and weight at a site."""
        for own, tokens in zip(self.deltas, self.tokens, strict=True):
            for deltas, weight in own:
                if tokens is not None and site in deltas:
                    yield tokens, deltas[site], weight

    def select(self, rows: Sequence[int]) -> LoraBatch:
        """Returns the same for some rows of the step, e.g. those whose logits are computed."""
        owners = tuple(self.owners[row] for row in rows)
        tokens = _tokens(owners, len(self.deltas), self.device)
        return LoraBatch(owners, self.deltas, tokens, self.device)


def build_lora_batch(
    pool: AdapterPool,
    adapters_per_run: Sequence[tuple[str | None, int]],  # (adapter key, number of tokens), in order
    device: torch.device | str,
) -> LoraBatch | None:
    """Returns None if no token has an adapter. Every key must be held by an `acquire`."""
    places: dict[str, int] = {}
    owners: list[int] = []
    for key, num_tokens in adapters_per_run:
        owner = -1 if key is None else places.setdefault(key, len(places))
        owners += [owner] * num_tokens
    if not places:
        return None
    deltas = tuple(
        tuple((pool.deltas(one.digest), one.weight) for one in key_adapters(key)) for key in places
    )
    device = torch.device(device)
    return LoraBatch(tuple(owners), deltas, _tokens(owners, len(places), device), device)


def _tokens(
    owners: Sequence[int], num_owners: int, device: torch.device
) -> tuple[Tokens | None, ...]:
    rows: list[list[int]] = [[] for _ in range(num_owners)]
    for row, owner in enumerate(owners):
        if owner >= 0:
            rows[owner].append(row)
    return tuple(_run_or_indices(own, device) for own in rows)


def _run_or_indices(rows: Sequence[int], device: torch.device) -> Tokens | None:
    if not rows:
        return None
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows).to(device, non_blocking=True)
