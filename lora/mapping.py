"""The adapter of each token of a step, in the form of the operations adapter by adapter.

Built once per step from the batch's runs of tokens, shared by all layers. An owner is a small
integer, the adapter's place among those of this step; -1 means no adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora_shrink_expand import Tokens
from lora.heap import Deltas
from lora.pool import AdapterPool


@dataclass(frozen=True, slots=True)
class LoraBatch:
    owners: tuple[int, ...]  # of each token
    deltas: tuple[Deltas, ...]  # of each owner
    tokens: tuple[Tokens | None, ...]  # of each owner; None: none in these rows
    device: torch.device

    def targets(self, site: str) -> bool:
        return any(site in deltas for deltas in self.deltas)

    def select(self, rows: Sequence[int]) -> LoraBatch:
        """Returns the same for some rows of the step, e.g. those whose logits are computed."""
        owners = tuple(self.owners[row] for row in rows)
        tokens = _tokens(owners, len(self.deltas), self.device)
        return LoraBatch(owners, self.deltas, tokens, self.device)


def build_lora_batch(
    pool: AdapterPool,
    adapters_per_run: Sequence[tuple[str | None, int]],  # (digest, number of tokens), in order
    device: torch.device | str,
) -> LoraBatch | None:
    """Returns None if no token has an adapter. Every digest must be held by an `acquire`."""
    places: dict[str, int] = {}
    owners: list[int] = []
    for digest, num_tokens in adapters_per_run:
        owner = -1 if digest is None else places.setdefault(digest, len(places))
        owners += [owner] * num_tokens
    if not places:
        return None
    deltas = tuple(pool.deltas(digest) for digest in places)
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
