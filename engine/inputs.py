"""What a step's forward pass reads: a ScheduledBatch turned into tensors, once a step.

All layers share them. Built with numpy and handed over in one go each, so that a device needs few
copies; a pinned staging buffer would go into `_to_device`. Knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.types import ScheduledBatch, ScheduledSequence
from kernels.paged_attention import AttentionPlan, plan_attention
from lora.mapping import LoraBatch, build_lora_batch
from lora.pool import AdapterPool


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, where K and V of each token go
    attention: AttentionPlan
    logit_rows: tuple[int, ...]  # rows whose logits are wanted: those that sample, then prompts'
    num_samples: int  # of logit_rows
    lora: LoraBatch | None


def build_inputs(
    batch: ScheduledBatch, block_size: int, device: torch.device, pool: AdapterPool
) -> ForwardInputs:
    parts = batch.sequences
    lengths = [part.end - part.start for part in parts]
    query_start = [0, *np.cumsum(lengths).tolist()]
    token_ids = [
        token for part in parts for token in part.sequence.token_ids[part.start : part.end]
    ]
    positions = np.concatenate([np.arange(part.start, part.end) for part in parts])
    tables = _block_tables(parts, block_size)
    owner = np.repeat(np.arange(len(parts)), lengths)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    rows = [end - 1 for part, end in zip(parts, query_start[1:], strict=True) if part.samples]
    prompt_rows = [
        start + i
        for part, start in zip(parts, query_start, strict=False)
        for i in range(num_prompt_logprobs(part))
    ]
    return ForwardInputs(
        token_ids=_to_device(np.array(token_ids, dtype=np.int64), device),
        positions=_to_device(positions, device),
        slots=_to_device(slots, device),
        attention=plan_attention(
            query_start, [part.end for part in parts], _to_device(tables, device), block_size
        ),
        logit_rows=(*rows, *prompt_rows),
        num_samples=len(rows),
        lora=build_lora_batch(
            pool,
            [(part.sequence.request.adapter, n) for part, n in zip(parts, lengths, strict=True)],
            device,
        ),
    )


def num_prompt_logprobs(part: ScheduledSequence) -> int:
    """Position p tells of prompt token p + 1; the last prompt token tells of the output."""
    if part.sequence.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(part.end, part.sequence.num_prompt_tokens - 1) - part.start)


def _block_tables(
    parts: tuple[ScheduledSequence, ...], block_size: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[S, max_blocks]; each block table must reach the last position of its part."""
    widths = [-(-part.end // block_size) for part in parts]
    tables = np.zeros((len(parts), max(widths)), dtype=np.int64)
    for i, (part, width) in enumerate(zip(parts, widths, strict=True)):
        tables[i, :width] = part.sequence.block_table[:width]
    return tables


def _to_device(
    array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device
) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
