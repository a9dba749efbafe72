"""The inputs of a step's forward pass, and their construction from a batch by the reference
backend.

All layers share one ForwardInputs. `build_inputs` makes fresh tensors for every step;
`engine.step_inputs` writes into static buffers instead, for a device with graphs. Free of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from engine.activation import adapter_runs
from engine.types import ScheduledBatch, ScheduledSequence
from kernels.lora_plan import LoraPlan
from kernels.paged_attention import AttentionPlan, plan_attention
from kernels.paged_plan import PagedPlan
from lora.mapping import LoraBatch, build_lora_batch
from lora.page_image import AFFINE
from lora.pool import AdapterPool


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Tokens that the step before drew and whose ids the host may not have yet."""

    sources: torch.Tensor  # [T] int32: a row of `drawn`; below 0: the id is in token_ids
    drawn: torch.Tensor  # [rows] int32; below 0: its logits were not finite


class LoraReach(IntEnum):
    """The sites that the adapters of a step have: the others run as without adapters."""

    NONE = 0
    ALL = 1  # lm_head and the embedding included
    QKV = 2
    ATTENTION = 3  # qkv and o
    AFFINE = 4  # as ALL, of adapters with affine rows


def reach_of(runs: Iterable[tuple[Sequence[int], int]], kinds: frozenset[str]) -> LoraReach:
    """Returns the reach of a step of these runs (pages, rows). `kinds`: the kinds of the sites of
    their adapters, from the pool."""
    if not any(pages for pages, _ in runs):
        return LoraReach.NONE
    if AFFINE in kinds:
        return LoraReach.AFFINE
    if kinds <= {"qkv"}:
        return LoraReach.QKV
    return LoraReach.ATTENTION if kinds <= {"qkv", "o"} else LoraReach.ALL


class SamplingInputs(NamedTuple):
    """The sampling parameters as `sample_rows` takes them, one row for every sequence that
    samples."""

    temperature: torch.Tensor  # [R] float32
    top_k: torch.Tensor  # [R] int32
    top_p: torch.Tensor  # [R] float32
    min_p: torch.Tensor  # [R] float32
    seeds: torch.Tensor  # [R] int64
    choices: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int32, of the token that is drawn


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    # One for each block table: one, or two in models of full and windowed layers.
    slots: tuple[torch.Tensor, ...]  # [T] the KV slot of each token; below 0: none
    attention: tuple[AttentionPlan | PagedPlan, ...]
    logit_rows: torch.Tensor | None  # [rows] sampling rows, then prompt rows; None: all
    host_logit_rows: tuple[int, ...]  # the same on the host
    num_samples: int  # of logit_rows
    lora: LoraBatch | LoraPlan | None
    # For lm_head: a batch as `lora`; a plan of the rows that sample; None: no adapter here has it.
    head_lora: LoraBatch | LoraPlan | None
    in_flight: DeviceTokens | None = None  # None: all ids are in token_ids
    reach: LoraReach = LoraReach.ALL  # of `lora`

    def lora_at(self, *reaches: LoraReach) -> LoraBatch | LoraPlan | None:
        """Returns `lora` for sites that only adapters of these reaches have."""
        return self.lora if self.reach in (*reaches, LoraReach.AFFINE) else None


Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """All that a step's forward pass reads of its batch, without objects of the scheduler."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    query_start: list[int]  # [S + 1]
    kv_lens: list[int]  # [S]
    tables: tuple[Ints, ...]  # each [S, blocks]
    logit_rows: tuple[int, ...]  # sampling rows, then prompt rows
    num_samples: int  # of logit_rows
    prompt_rows: tuple[int, ...]  # of each sequence that has some, how many of logit_rows
    runs: tuple[tuple[str | None, int], ...]  # adapter key and number of tokens, in order


def step_arrays(batch: ScheduledBatch, block_size: int) -> StepArrays:
    parts = batch.sequences
    query_start = [0, *np.cumsum([part.end - part.start for part in parts]).tolist()]
    token_ids = [
        token
        for part in parts
        for token in (*part.sequence.token_ids[part.start : part.known_end], *part.draft)
    ]
    tables = [block_tables([part.sequence.block_table for part in parts], parts, block_size)]
    if parts[0].sequence.window_table:
        tables.append(block_tables([p.sequence.window_table for p in parts], parts, block_size))
    return StepArrays(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.concatenate([np.arange(part.start, part.end) for part in parts]),
        query_start=query_start,
        kv_lens=[part.end for part in parts],
        tables=tuple(tables),
        logit_rows=logit_rows(parts, query_start),
        num_samples=sum(part.samples + len(part.draft) for part in parts),
        prompt_rows=tuple(count for part in parts if (count := num_prompt_logprobs(part))),
        runs=tuple(adapter_runs(parts)),
    )


def forward_inputs(
    step: StepArrays, block_size: int, device: torch.device, pool: AdapterPool
) -> ForwardInputs:
    lengths = np.diff(step.query_start)
    owner, offsets = np.repeat(np.arange(len(lengths)), lengths), step.positions % block_size
    lora = build_lora_batch(pool, step.runs, device)
    return ForwardInputs(
        token_ids=_to_device(step.token_ids, device),
        positions=_to_device(step.positions, device),
        slots=tuple(
            _to_device(one[owner, step.positions // block_size] * block_size + offsets, device)
            for one in step.tables
        ),
        attention=tuple(
            plan_attention(step.query_start, step.kv_lens, _to_device(one, device), block_size)
            for one in step.tables
        ),
        logit_rows=_to_device(np.array(step.logit_rows, dtype=np.int64), device),
        host_logit_rows=step.logit_rows,
        num_samples=step.num_samples,
        lora=lora,
        head_lora=lora,
    )


def build_inputs(
    batch: ScheduledBatch, block_size: int, device: torch.device, pool: AdapterPool
) -> ForwardInputs:
    return forward_inputs(step_arrays(batch, block_size), block_size, device, pool)


def logit_rows(parts: tuple[ScheduledSequence, ...], query_start: list[int]) -> tuple[int, ...]:
    rows = [
        row
        for part, end in zip(parts, query_start[1:], strict=True)
        if part.samples
        for row in range(end - 1 - len(part.draft), end)
    ]
    prompt_rows = [
        start + i
        for part, start in zip(parts, query_start, strict=False)
        for i in range(num_prompt_logprobs(part))
    ]
    return (*rows, *prompt_rows)


def num_prompt_logprobs(part: ScheduledSequence) -> int:
    """Returns the number of prompt positions with a log-probability. Position p predicts prompt
    token p + 1; the last prompt token predicts the output."""
    if part.sequence.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(part.end, part.sequence.num_prompt_tokens - 1) - part.start)


def block_tables(
    lists: Sequence[Sequence[int]], parts: tuple[ScheduledSequence, ...], block_size: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Returns the lists as [S, max_blocks]; each must reach the last position of its part."""
    widths = [-(-part.end // block_size) for part in parts]
    tables = np.zeros((len(parts), max(widths)), dtype=np.int64)
    for i, (entries, width) in enumerate(zip(lists, widths, strict=True)):
        tables[i, :width] = entries[:width]
    return tables


def _to_device(array: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
