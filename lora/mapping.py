"""The adapter of each token of a step, in the forms that every layer shares.

Built once per step from the batch's runs of tokens; reads digests and pages, no weights. An owner
is a small integer, the adapter's place among those of this step; -1 means no adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from kernels.lora_shrink_expand import Segment
from lora.pool import PAGE_ROWS, AdapterPool

# A segment costs about 0.5 ms in 30 layers, the masked form 3 to 4 ms per adapter.
_SEGMENTS_PER_ADAPTER = 4


@dataclass(frozen=True, slots=True)
class LoraBatch:
    token_owner: torch.Tensor  # [T] int32
    row_ids: torch.Tensor  # [R] int64, rows of every pool
    row_owner: torch.Tensor  # [R] int32
    owners: tuple[int, ...]  # token_owner on the host
    row_runs: tuple[tuple[tuple[int, int], ...], ...]  # per owner: contiguous [start, end)
    segments: tuple[Segment, ...] | None  # None: too many to be faster

    def select(self, rows: Sequence[int]) -> LoraBatch:
        """Returns the same for some rows of the step, e.g. those whose logits are computed."""
        owners = tuple(self.owners[row] for row in rows)
        return LoraBatch(
            torch.tensor(owners, dtype=torch.int32).to(self.token_owner.device, non_blocking=True),
            self.row_ids,
            self.row_owner,
            owners,
            self.row_runs,
            _segments(owners, self.row_runs),
        )


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
    runs = tuple(_row_runs(pool.pages(digest)) for digest in places)
    row_ids = [row for owned in runs for start, end in owned for row in range(start, end)]
    row_owner = [owner for owner, owned in enumerate(runs) for a, b in owned for _ in range(b - a)]
    return LoraBatch(
        torch.tensor(owners, dtype=torch.int32).to(device, non_blocking=True),
        torch.tensor(row_ids, dtype=torch.int64).to(device, non_blocking=True),
        torch.tensor(row_owner, dtype=torch.int32).to(device, non_blocking=True),
        tuple(owners),
        runs,
        _segments(owners, runs),
    )


def _row_runs(pages: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the rows of the pages, in the pages' order (any order is right, if A and B agree)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        start, end = page * PAGE_ROWS, (page + 1) * PAGE_ROWS
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return tuple(runs)


def _segments(
    owners: Sequence[int], row_runs: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Segment, ...] | None:
    segments: list[Segment] = []
    start = 0
    for owner, group in groupby(owners):
        end = start + sum(1 for _ in group)
        if owner >= 0:
            segments += [(start, end, row, row_end) for row, row_end in row_runs[owner]]
        start = end
    return tuple(segments) if len(segments) <= _SEGMENTS_PER_ADAPTER * len(row_runs) else None
