"""A step's inputs in static buffers, for a device with Triton kernels and CUDA graphs.

One instance serves the decode graphs (rows of one token, padded to the graph's size), another all
other steps. Tokens that the step before drew are named by their row on the device. Free of
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from engine import step_rows
from engine.activation import adapter_at, adapter_runs
from engine.decode_columns import DecodeColumns
from engine.inputs import (
    DeviceTokens,
    ForwardInputs,
    LoraReach,
    SamplingInputs,
    logit_rows,
    num_prompt_logprobs,
    reach_of,
)
from engine.step_buffers import BufferSizes, StepBuffers, Words
from engine.step_layout import Runs, StepLayout
from engine.types import ScheduledBatch, ScheduledSequence, Sequence
from kernels.lora_plan import LoraPlan, LoraPlanCounts, lora_plan_size, write_lora_plan
from kernels.paged_plan import (
    HEADER,
    AttentionScratch,
    HeadShape,
    PagedPlan,
    WorkCounts,
    max_tiles,
    work_size,
)
from lora.mapping import build_lora_batch
from lora.page_lists import PageList
from lora.pool import PAGE_ROWS, AdapterPool

_NO_PAGES = PageList((), ())
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"  # the kinds of the two optional sites
PageRuns = list[tuple[tuple[int, ...], int]]
Weights = list[tuple[float, ...]] | None  # of the pages of each run; None: all are 1


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The sizes of the buffers: fixed from the start, because graphs hold their addresses."""

    max_tokens: int
    max_seqs: int
    max_draws: int  # tokens drawn in a step, with those after drafts
    max_model_len: int
    block_size: int
    heads: HeadShape
    max_lora_rank: int
    num_tables: int = 1  # block tables of a sequence
    max_queries: int = 1  # of a decode with its draft; in graphs: the queries that attend together

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def max_rank_pages(self) -> int:
        return -(-self.max_lora_rank // PAGE_ROWS)


def is_decode(batch: ScheduledBatch) -> bool:
    """Returns True if every sequence computes its newest token, perhaps with a draft, and
    samples."""
    return batch.num_decoding == len(batch.sequences)


def decode_limits(limits: StepLimits) -> StepLimits:
    """Returns the sizes for graphs of decodes, where each draw may be a sequence of attention."""
    return replace(limits, max_tokens=limits.max_draws, max_seqs=limits.max_draws)


def max_words(limits: StepLimits) -> int:
    """Returns the 32-bit words that a step takes at most, whatever the size of the pool."""
    kinds = (limits, False), (decode_limits(limits), True)
    sizes = [_sizes(one, one.max_seqs * one.max_rank_pages, is_decode=d) for one, d in kinds]
    return max(one.num_words for one in sizes)


def _sizes(limits: StepLimits, max_pages: int, *, is_decode: bool) -> BufferSizes:
    return BufferSizes(
        limits.max_tokens,
        limits.max_seqs,
        limits.max_draws,
        limits.max_blocks,
        work_size(limits.max_seqs, limits.max_tokens, limits.heads),
        lora_plan_size(limits.max_tokens, max_pages, large=not is_decode),
        # A decode's logits have the rows of its tokens, and their plan.
        0 if is_decode else lora_plan_size(limits.max_draws, max_pages, large=False),
        limits.num_tables,
    )


class StepInputs:
    def __init__(
        self,
        limits: StepLimits,
        pool: AdapterPool,
        scratch: AttentionScratch,
        drawn: torch.Tensor,  # [max_draws] int32, where the sampler writes
        *,
        is_decode: bool,
    ) -> None:
        """`is_decode`: for graphs of decodes, with `for_graph` and `write_for_graph` only;
        otherwise with the other methods only."""
        self._limits = limits
        self._pool = pool
        self._scratch = scratch
        self._drawn = drawn
        # The pages of all adapters in one step together.
        self._max_pages = min(pool.num_blocks, limits.max_seqs * limits.max_rank_pages)
        sizes = _sizes(limits, self._max_pages, is_decode=is_decode)
        self._buffers = StepBuffers(sizes, drawn.device)
        self._columns = DecodeColumns(limits.max_seqs, limits.max_blocks, limits.num_tables)
        # In each of the two host buffers, of decodes.
        self._plans: list[tuple[PageRuns, Weights, bool, bool] | None] = [None, None]

    def for_graph(self, size: int, reach: LoraReach) -> tuple[ForwardInputs, SamplingInputs]:
        """Returns the inputs of `size` rows; `write_for_graph(..., size)` fills them."""
        lora = None
        if reach is not LoraReach.NONE:
            lora = self._plan_of_graph(size, has_affine=reach is LoraReach.AFFINE)
        head = lora if reach in (LoraReach.ALL, LoraReach.AFFINE) else None
        attention = self._attention_of_graph(size, max_queries=self._limits.max_queries)
        inputs = self._forward_inputs(size, attention, lora, head, reach=reach)
        return inputs, self.sampling(size)

    def for_mixed_graph(self, size: int, has_lora: bool) -> ForwardInputs:
        """Returns the inputs of `size` tokens of any sequences; `write(..., size)` fills them.
        Attention has no work until then: that of an earlier step may be for more tokens."""
        self._buffers.device("attention")[:HEADER].zero_()
        num_sequences = min(size, self._limits.max_seqs)
        tiles = max_tiles(num_sequences, size, self._limits.heads)
        attention = self._attention_of_graph(num_sequences, max_tiles=tiles)
        lora = self._plan_of_graph(size, large=True) if has_lora else None
        return self._forward_inputs(size, attention, lora)

    def _attention_of_graph(
        self, num_sequences: int, *, max_queries: int = 1, max_tiles: int = 0
    ) -> tuple[PagedPlan, ...]:
        device, scratch = self._buffers.device, self._scratch
        lengths = device("query_start")[: num_sequences + 1], device("kv_lens")[:num_sequences]
        sizes = num_sequences, max_queries, max_tiles
        return tuple(
            PagedPlan.for_graph(*lengths, table, device("attention"), scratch, *sizes)
            for table in self._buffers.device_tables(num_sequences)
        )

    def _plan_of_graph(
        self, size: int, *, large: bool = False, has_affine: bool = False
    ) -> LoraPlan:
        return LoraPlan.for_graph(
            self._buffers.device("lora"),
            size,
            self._limits.max_tokens,
            self._max_pages,
            self._limits.max_rank_pages,
            large=large,
            has_affine=has_affine,
        )

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
    ) -> StepLayout:
        """Fills the inputs of `for_graph(size)` on the host.

        Each token of a draft is a row of its own, whose keys end at its position: it sees the
        tokens before it, whose keys the layer has written."""
        self._buffers.begin()
        parts, count = batch.sequences, batch.num_tokens
        limits, written = self._limits, (self._buffers, self._columns, parts, drawn_rows, size)
        num_sequences, width, work = step_rows.write_decodes(
            *written, limits.block_size, limits.heads, limits.max_queries
        )
        runs, weights, kinds = self._lora_runs(adapter_runs(parts), size - count)
        reach = reach_of(runs, kinds)
        if reach is not LoraReach.NONE:
            self._write_decode_plan(runs, weights, kinds)
        return StepLayout(True, size, reach, count, num_sequences, width, work, count)

    def _write_decode_plan(self, runs: PageRuns, weights: Weights, kinds: frozenset[str]) -> None:
        """Writes the plan of a step in a graph, unless the step before last left the same one: the
        same sequences without drafts have the same plan until one of them ends."""
        has_head, has_embedding = _HEAD in kinds, _EMBEDDING in kinds
        plan = runs, weights, has_head, has_embedding
        turn = self._buffers.turn
        if self._plans[turn] == plan:
            return
        self._plans[turn] = None  # until it is whole
        write_lora_plan(
            self._buffers.host("lora"),
            runs,
            self._limits.max_tokens,
            self._max_pages,
            weights,
            large=False,
            has_head=has_head,
            has_embedding=has_embedding,
        )
        self._plans[turn] = plan

    def words(self, layout: StepLayout) -> Words:
        """Returns the numbers of the step that was written last, on the host."""
        return self._buffers.words(
            layout.num_sequences, layout.width, with_head=layout.head is not None
        )

    def copy(self, layout: StepLayout, words: Words) -> None:
        """Writes a step of which another rank wrote the numbers."""
        self._buffers.begin()
        self._plans[self._buffers.turn] = None
        self.words(layout)[:] = words

    def send(self, layout: StepLayout) -> None:
        """Sends the step that was written last to the device."""
        self._buffers.send(layout.num_sequences, layout.width, with_head=layout.head is not None)

    def write(
        self,
        batch: ScheduledBatch,
        drawn_rows: Mapping[Sequence, int],
        kinds: frozenset[str],
        size: int | None = None,
    ) -> StepLayout:
        """Writes any batch of up to `max_tokens` on the host, padded to `size` tokens for the
        graph of that size. `kinds`: the `site_kinds` of its sequences."""
        self._buffers.begin()
        parts = batch.sequences
        num_tokens = size or batch.num_tokens
        buffers, block_size = self._buffers, self._limits.block_size
        query_start = step_rows.write_tokens(buffers, parts, drawn_rows, num_tokens, block_size)
        work = step_rows.write_attention(buffers, parts, query_start, self._limits.heads)
        sampling = batch.rows
        step_rows.write_sampling(buffers, sampling)
        rows = logit_rows(parts, query_start)
        self._buffers.host("logit_rows")[: len(rows)] = rows
        runs, weights, _ = self._lora_runs(adapter_runs(parts), num_tokens - batch.num_tokens)
        lora = None
        reach = reach_of(runs, kinds)
        if reach is not LoraReach.NONE:
            lora = write_lora_plan(
                self._buffers.host("lora"),
                runs,
                self._limits.max_tokens,
                self._max_pages,
                weights,
                has_embedding=_EMBEDDING in kinds,
            )
        prompt_rows = tuple(count for part in parts if (count := num_prompt_logprobs(part)))
        return StepLayout(
            is_decode=False,
            size=size,
            reach=reach,
            num_tokens=batch.num_tokens,
            num_sequences=len(parts),
            width=step_rows.write_tables(buffers, parts, len(parts), block_size),
            work=work,
            num_samples=len(sampling),
            num_logit_rows=len(rows),
            lora=lora,
            head=self._write_head(sampling) if _HEAD in kinds else None,
            prompt_rows=prompt_rows,
            prompt_runs=tuple(adapter_runs(parts)) if prompt_rows and _HEAD in kinds else None,
        )

    def inputs(self, layout: StepLayout) -> ForwardInputs:
        """Returns the inputs of a step that `write` wrote, here or on another rank."""
        lora = head = None
        if layout.lora is not None:
            affine = layout.reach is LoraReach.AFFINE
            lora = LoraPlan.for_step(
                self._buffers.device("lora"),
                layout.lora,
                self._limits.max_tokens,
                self._max_pages,
                has_affine=affine,
            )
        if layout.head is not None:
            head = LoraPlan.for_step(
                self._buffers.device("head"),
                layout.head,
                self._limits.max_draws,
                self._max_pages,
                large=False,
            )
        rows = self._buffers.host("logit_rows")[: layout.num_logit_rows].tolist()
        return self._forward_inputs(
            layout.size or layout.num_tokens,
            self._attention(layout.num_sequences, layout.work),
            lora,
            head,
            tuple(rows),
            layout.num_samples,
            layout.reach,
        )

    def for_prompts(self, inputs: ForwardInputs, runs: Runs | None) -> ForwardInputs:
        """Returns inputs for the logits of prompt rows, which stay valid when the buffers have the
        next step. `runs`: as `StepLayout.prompt_runs`."""
        lora = None if runs is None else build_lora_batch(self._pool, runs, self._drawn.device)
        return replace(inputs, head_lora=lora)

    def _write_head(self, sampling: tuple[ScheduledSequence, ...]) -> LoraPlanCounts | None:
        """Writes the plan of the rows that sample; None: none of their adapters has the head."""
        if _HEAD not in self.site_kinds(sampling):
            return None
        keys = ((adapter_at(part.sequence.request, part.end - 1), 1) for part in sampling)
        runs, weights, _ = self._lora_runs(keys, 0)
        return write_lora_plan(
            self._buffers.host("head"),
            runs,
            self._limits.max_draws,
            self._max_pages,
            weights,
            large=False,
            has_head=True,
        )

    def _forward_inputs(
        self,
        num_tokens: int,
        attention: tuple[PagedPlan, ...],
        lora: LoraPlan | None,
        head: LoraPlan | None = None,
        rows: tuple[int, ...] | None = None,
        num_samples: int = 0,
        reach: LoraReach = LoraReach.ALL,
    ) -> ForwardInputs:
        device = self._buffers.device
        return ForwardInputs(
            token_ids=device("token_ids")[:num_tokens],
            positions=device("positions")[:num_tokens],
            slots=self._buffers.device_slots(num_tokens),
            attention=attention,
            logit_rows=None if rows is None else device("logit_rows")[: len(rows)],
            host_logit_rows=rows or (),
            num_samples=num_samples,
            lora=lora,
            head_lora=head,
            in_flight=DeviceTokens(device("sources")[:num_tokens], self._drawn),
            reach=reach,
        )

    def _attention(self, num_sequences: int, counts: WorkCounts) -> tuple[PagedPlan, ...]:
        """Returns the plan of each block table, with the same work."""
        device = self._buffers.device
        return tuple(
            PagedPlan.for_step(
                device("query_start")[: num_sequences + 1],
                device("kv_lens")[:num_sequences],
                table,
                device("attention"),
                self._scratch,
                counts,
            )
            for table in self._buffers.device_tables(num_sequences)
        )

    def site_kinds(self, parts: tuple[ScheduledSequence, ...]) -> frozenset[str]:
        """Returns the kinds of sites that the adapters of these have, active or not."""
        adapters = {part.sequence.request.adapter for part in parts}
        kinds = {self._pool.page_list(one).site_kinds for one in adapters if one}
        return frozenset[str]().union(*kinds)

    def _lora_runs(
        self, keys: Iterable[tuple[str | None, int]], num_padding: int
    ) -> tuple[PageRuns, Weights, frozenset[str]]:
        """Returns the runs of the plan, and the kinds of sites of their adapters. `keys`: the
        adapter key and the rows of each, in order."""
        find = self._pool.page_list
        found = [(find(key) if key is not None else _NO_PAGES, count) for key, count in keys]
        if num_padding:
            found.append((_NO_PAGES, num_padding))
        runs = [(pages.pages, count) for pages, count in found]
        is_weighted = any([pages.is_weighted for pages, _ in found])
        weights = [pages.weights for pages, _ in found] if is_weighted else None
        return runs, weights, frozenset().union(*{pages.site_kinds for pages, _ in found})
