"""Whose adapter each token of a step uses, as the tensors that every layer shares.

Built once a step from the batch's runs of tokens; knows digests and pages, no weights. An owner is
a small integer, the adapter's place among those of this step; -1 is nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lora.pool import PAGE_ROWS, AdapterPool


@dataclass(frozen=True, slots=True)
class LoraBatch:
    token_owner: torch.Tensor  # [T] int32
    row_ids: torch.Tensor  # [R] int64, rows of every pool
    row_owner: torch.Tensor  # [R] int32

    def select(self, rows: torch.Tensor) -> LoraBatch:
        """The same for some rows of the step, e.g. those whose logits are computed."""
        return LoraBatch(self.token_owner[rows], self.row_ids, self.row_owner)


def build_lora_batch(
    pool: AdapterPool,
    adapters_per_run: Sequence[tuple[str | None, int]],  # (digest, number of tokens), in order
    device: torch.device | str,
) -> LoraBatch | None:
    """None when no token has an adapter. Every digest must be held by an `acquire`."""
    owners: dict[str, int] = {}
    token_owner: list[int] = []
    for digest, num_tokens in adapters_per_run:
        owner = -1 if digest is None else owners.setdefault(digest, len(owners))
        token_owner += [owner] * num_tokens
    if not owners:
        return None
    row_ids: list[int] = []
    row_owner: list[int] = []
    for digest, owner in owners.items():
        for page in pool.pages(digest):
            row_ids += range(page * PAGE_ROWS, (page + 1) * PAGE_ROWS)
            row_owner += [owner] * PAGE_ROWS
    return LoraBatch(
        torch.tensor(token_owner, dtype=torch.int32).to(device, non_blocking=True),
        torch.tensor(row_ids, dtype=torch.int64).to(device, non_blocking=True),
        torch.tensor(row_owner, dtype=torch.int32).to(device, non_blocking=True),
    )
