"""A step's inputs in static buffers, for a device with Triton kernels and CUDA graphs.

One instance serves the decode graphs (one token per sequence, padded to the graph's size), another
all other steps. Tokens that the step before drew are named by their row on the device. Free of
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.activation import adapter_at, adapter_runs
from engine.inputs import (
    DeviceTokens,
    ForwardInputs,
    LoraReach,
    SamplingInputs,
    logit_rows,
    lora_batch,
    reach_of,
)
from engine.step_buffers import StepBuffers
from engine.types import ScheduledBatch, ScheduledSequence, Sequence
from kernels.lora_plan import LoraPlan, lora_plan_size, write_lora_plan
from kernels.paged_plan import (
    AttentionScratch,
    HeadShape,
    PagedPlan,
    WorkCounts,
    work_size,
    write_work,
)
from lora.page_lists import PageList
from lora.pool import PAGE_ROWS, AdapterPool

_SEED_MASK = 2**64 - 1
_NO_PAGES = PageList((), ())
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"  # the kinds of the two optional sites
Runs = list[tuple[tuple[int, ...], int]]
Weights = list[tuple[float, ...]] | None  # of the pages of each run; None: all are 1


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The sizes of the buffers: fixed from the start, because graphs hold their addresses."""

    max_seqs: int
    max_model_len: int
    block_size: int
    heads: HeadShape
    max_lora_rank: int

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def max_rank_pages(self) -> int:
        return -(-self.max_lora_rank // PAGE_ROWS)


def is_decode(batch: ScheduledBatch) -> bool:
    """Returns True if every sequence has one token and samples."""
    return all(part.samples and part.end - part.start == 1 for part in batch.sequences)


class StepInputs:
    def __init__(
        self,
        max_tokens: int,
        limits: StepLimits,
        pool: AdapterPool,
        scratch: AttentionScratch,
        drawn: torch.Tensor,  # [max_seqs] int32, where the sampler writes
        *,
        is_decode: bool,
    ) -> None:
        """`is_decode`: for graphs of decodes, with `for_graph` and `write_for_graph` only;
        otherwise with the other methods only."""
        self.max_tokens = max_tokens
        self._limits = limits
        self._pool = pool
        self._scratch = scratch
        self._drawn = drawn
        # Of all adapters in one step together.
        self._max_pages = min(pool.num_blocks, limits.max_seqs * limits.max_rank_pages)
        self._buffers = StepBuffers(
            max_tokens,
            limits.max_seqs,
            limits.max_blocks,
            work_size(limits.max_seqs, max_tokens, limits.heads),
            lora_plan_size(max_tokens, self._max_pages, large=not is_decode),
            # A decode's logits have the rows of its tokens, and their plan.
            0 if is_decode else lora_plan_size(limits.max_seqs, self._max_pages, large=False),
            drawn.device,
        )

    def for_graph(self, size: int, reach: LoraReach) -> tuple[ForwardInputs, SamplingInputs]:
        """Returns the inputs of `size` sequences with one token each; `write(..., size)` fills
        them."""
        device = self._buffers.device
        attention = PagedPlan.for_graph(
            device("query_start")[: size + 1],
            device("kv_lens")[:size],
            self._buffers.device_tables(size),
            device("attention"),
            self._scratch,
            size,
        )
        lora = None
        if reach is not LoraReach.NONE:
            lora = LoraPlan.for_graph(
                device("lora"),
                size,
                self.max_tokens,
                self._max_pages,
                self._limits.max_rank_pages,
                has_affine=reach is LoraReach.AFFINE,
            )
        head = lora if reach in (LoraReach.ALL, LoraReach.AFFINE) else None
        inputs = self._forward_inputs(size, attention, lora, head, reach=reach)
        return inputs, self.sampling(size)

    def sampling(self, num_rows: int) -> SamplingInputs:
        ints, floats = self._buffers.device, self._buffers.device_floats
        return SamplingInputs(
            floats("temperature")[:num_rows],
            ints("top_k")[:num_rows],
            floats("top_p")[:num_rows],
            floats("min_p")[:num_rows],
            self._buffers.device_longs("seeds")[:num_rows],
            ints("choices")[:num_rows],
            ints("draw_positions")[:num_rows],
        )

    def write_for_graph(
        self, batch: ScheduledBatch, drawn_rows: Mapping[Sequence, int], size: int
    ) -> LoraReach:
        """Fills and sends the inputs of `for_graph(size)`. Returns the reach of the rows'
        adapters."""
        self._buffers.begin()
        parts = batch.sequences
        self._write_tokens(parts, drawn_rows, size)
        self._write_attention(parts, size)
        self._write_sampling(parts, size)
        runs, weights = self._lora_runs(adapter_runs(parts), size - len(parts))
        kinds = self.site_kinds(parts)
        reach = reach_of(runs, kinds)
        if reach is not LoraReach.NONE:
            write_lora_plan(
                self._buffers.host("lora"),
                runs,
                self.max_tokens,
                self._max_pages,
                weights,
                large=False,
                has_head=_HEAD in kinds,
                has_embedding=_EMBEDDING in kinds,
            )
        self._send(parts, size)
        return reach

    def for_pieces(self, size: int, has_lora: bool) -> ForwardInputs:
        """Returns the inputs of `size` tokens of any sequences, without attention; `write(...,
        size)` fills them."""
        lora = None
        if has_lora:
            lora = LoraPlan.for_graph(
                self._buffers.device("lora"),
                size,
                self.max_tokens,
                self._max_pages,
                self._limits.max_rank_pages,
                large=True,
            )
        return self._forward_inputs(size, self._no_attention(), lora)

    def write(
        self,
        batch: ScheduledBatch,
        drawn_rows: Mapping[Sequence, int],
        kinds: frozenset[str],
        size: int | None = None,
    ) -> ForwardInputs:
        """Writes any batch of up to `max_tokens`, padded to `size` tokens for the pieces of that
        size. `kinds`: the `site_kinds` of its sequences."""
        self._buffers.begin()
        parts = batch.sequences
        num_tokens = size or batch.num_tokens
        query_start = self._write_tokens(parts, drawn_rows, num_tokens)
        counts = self._write_attention(parts, len(parts))
        sampling = tuple(part for part in parts if part.samples)
        self._write_sampling(sampling, len(sampling))
        rows = logit_rows(parts, query_start)
        self._buffers.host("logit_rows")[: len(rows)] = rows
        runs, weights = self._lora_runs(adapter_runs(parts), num_tokens - batch.num_tokens)
        lora = None
        reach = reach_of(runs, kinds)
        if reach is not LoraReach.NONE:
            max_pages = self._max_pages
            found = write_lora_plan(
                self._buffers.host("lora"),
                runs,
                self.max_tokens,
                max_pages,
                weights,
                has_embedding=_EMBEDDING in kinds,
            )
            affine = reach is LoraReach.AFFINE
            lora = LoraPlan.for_step(
                self._buffers.device("lora"), found, self.max_tokens, max_pages, has_affine=affine
            )
        head = self._write_head(sampling) if _HEAD in kinds else None
        self._send(parts, len(parts), with_head=head is not None)
        attention = PagedPlan.for_step(
            self._buffers.device("query_start")[: len(parts) + 1],
            self._buffers.device("kv_lens")[: len(parts)],
            self._buffers.device_tables(len(parts)),
            self._buffers.device("attention"),
            self._scratch,
            counts,
        )
        return self._forward_inputs(
            num_tokens, attention, lora, head, parts, rows, len(sampling), reach
        )

    def for_prompts(self, inputs: ForwardInputs, batch: ScheduledBatch) -> ForwardInputs:
        """Returns inputs for the logits of prompt rows, which stay valid when the buffers have the
        next step."""
        parts = batch.sequences
        lora = None
        if _HEAD in self.site_kinds(parts):
            lora = lora_batch(parts, self._pool, self._drawn.device)
        return replace(inputs, head_lora=lora)

    def _write_head(self, sampling: tuple[ScheduledSequence, ...]) -> LoraPlan | None:
        """Writes the plan of the rows that sample; None: none of their adapters has the head."""
        if _HEAD not in self.site_kinds(sampling):
            return None
        max_seqs, max_pages = self._limits.max_seqs, self._max_pages
        keys = ((adapter_at(part.sequence.request, part.end - 1), 1) for part in sampling)
        runs, weights = self._lora_runs(keys, 0)
        host = self._buffers.host("head")
        found = write_lora_plan(
            host, runs, max_seqs, max_pages, weights, large=False, has_head=True
        )
        return LoraPlan.for_step(
            self._buffers.device("head"), found, max_seqs, max_pages, large=False
        )

    def _forward_inputs(
        self,
        num_tokens: int,
        attention: PagedPlan,
        lora: LoraPlan | None,
        head: LoraPlan | None = None,
        parts: tuple[ScheduledSequence, ...] = (),
        rows: tuple[int, ...] = (),
        num_samples: int = 0,
        reach: LoraReach = LoraReach.ALL,
    ) -> ForwardInputs:
        device = self._buffers.device
        return ForwardInputs(
            token_ids=device("token_ids")[:num_tokens],
            positions=device("positions")[:num_tokens],
            slots=device("slots")[:num_tokens],
            attention=attention,
            logit_rows=device("logit_rows")[: len(rows)] if parts else None,
            host_logit_rows=rows,
            num_samples=num_samples,
            lora=lora,
            head_lora=head,
            in_flight=DeviceTokens(device("sources")[:num_tokens], self._drawn),
            reach=reach,
        )

    def _no_attention(self) -> PagedPlan:
        device = self._buffers.device
        return PagedPlan.for_step(
            device("query_start")[:1],
            device("kv_lens")[:0],
            self._buffers.device_tables(0),
            device("attention"),
            self._scratch,
            WorkCounts(0, 0),
        )

    def site_kinds(self, parts: tuple[ScheduledSequence, ...]) -> frozenset[str]:
        """Returns the kinds of sites that the adapters of these have, active or not."""
        adapters = {part.sequence.request.adapter for part in parts}
        return frozenset[str]().union(*(self._pool.site_kinds(one) for one in adapters if one))

    def _write_tokens(
        self,
        parts: tuple[ScheduledSequence, ...],
        drawn_rows: Mapping[Sequence, int],
        num_rows: int,
    ) -> list[int]:
        """Returns query_start. Rows past the batch's tokens become padding."""
        host = self._buffers.host
        token_ids, sources = host("token_ids"), host("sources")
        positions, slots = host("positions"), host("slots")
        sources[:num_rows] = -1
        block_size = self._limits.block_size
        query_start = [0]
        row = 0
        for part in parts:
            sequence, start, end = part.sequence, part.start, part.end
            known, table = sequence.token_ids, sequence.block_table
            if end - start == 1:
                if start < len(known):
                    token_ids[row] = known[start]
                else:
                    sources[row] = drawn_rows[sequence]
                positions[row] = start
                slots[row] = table[start // block_size] * block_size + start % block_size
                row += 1
            else:
                span = slice(row, row + end - start)
                row = span.stop
                tokens = known[start:end]
                token_ids[span.start : span.start + len(tokens)] = tokens
                if len(tokens) < end - start:
                    sources[row - 1] = drawn_rows[sequence]
                places = np.arange(start, end)
                positions[span] = places
                blocks = np.array(table, dtype=np.int32)
                slots[span] = blocks[places // block_size] * block_size + places % block_size
            query_start.append(row)
        token_ids[row:num_rows] = positions[row:num_rows] = 0
        slots[row:num_rows] = -1
        return query_start

    def _write_attention(self, parts: tuple[ScheduledSequence, ...], num_rows: int) -> WorkCounts:
        """Writes `num_rows` sequences; rows past the batch are padding, with one query and no
        keys."""
        host = self._buffers.host
        query_start, kv_lens = host("query_start"), host("kv_lens")
        lengths = [part.end - part.start for part in parts] + [1] * (num_rows - len(parts))
        query_start[0] = 0
        np.cumsum(lengths, out=query_start[1 : num_rows + 1])
        kv_lens[: len(parts)] = [part.end for part in parts]
        kv_lens[len(parts) : num_rows] = 0
        return write_work(
            host("attention"), query_start[: num_rows + 1], kv_lens[:num_rows], self._limits.heads
        )

    def _write_sampling(self, parts: tuple[ScheduledSequence, ...], num_rows: int) -> None:
        host, floats, count = self._buffers.host, self._buffers.host_floats, len(parts)
        params = [part.sequence.request.params for part in parts]
        floats("temperature")[:count] = [p.temperature for p in params]
        host("top_k")[:count] = [p.top_k for p in params]
        floats("top_p")[:count] = [p.top_p for p in params]
        floats("min_p")[:count] = [p.min_p for p in params]
        seeds = np.array([part.sequence.seed & _SEED_MASK for part in parts], dtype=np.uint64)
        self._buffers.host_longs("seeds")[:count] = seeds.view(np.int64)
        host("choices")[:count] = [part.sequence.choice for part in parts]
        host("draw_positions")[:count] = [part.end for part in parts]
        floats("temperature")[count:num_rows] = 0.0  # padding is drawn greedily and discarded

    def _lora_runs(
        self, keys: Iterable[tuple[str | None, int]], num_padding: int
    ) -> tuple[Runs, Weights]:
        """Returns the runs of the plan. `keys`: the adapter key and the rows of each, in order."""
        runs: Runs = []
        weights: list[tuple[float, ...]] = []
        lists: dict[str | None, PageList] = {None: _NO_PAGES}
        for key, num_rows in keys:
            found = lists.get(key)
            if found is None:
                assert key is not None
                found = lists[key] = self._pool.page_list(key)
            runs.append((found.pages, num_rows))
            weights.append(found.weights)
        if num_padding:
            runs.append(((), num_padding))
            weights.append(())
        is_weighted = any(weight != 1.0 for found in lists.values() for weight in found.weights)
        return runs, weights if is_weighted else None

    def _send(
        self, parts: tuple[ScheduledSequence, ...], num_rows: int, *, with_head: bool = False
    ) -> None:
        block_size = self._limits.block_size
        widths = [-(-part.end // block_size) for part in parts]
        width = max(widths)
        tables = self._buffers.host_tables(num_rows, width)
        for i, part in enumerate(parts):
            tables[i, : widths[i]] = part.sequence.block_table[: widths[i]]
        self._buffers.send(num_rows, width, with_head=with_head)
