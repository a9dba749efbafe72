"""A step on a CUDA device: launched without waiting, collected while the next one runs.

Decode steps, with drafts or without, replay a graph, and so do steps with prompts of up to some
thousand tokens; all others launch kernel by kernel. The drawn tokens stay on the device as the next
step's inputs; the host gets a copy. Only `collect` waits for the device.

The draw of a row with a grammar or penalties needs a token that the step before may still hold on
the device. A step with such rows launches its forward pass alone, and draws all rows later, once
the step before is committed: a row's draw depends on that row only.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from engine.decode_graphs import DecodeGraphs, GraphKey, graph_sizes
from engine.device_memory import device_faults
from engine.inputs import ForwardInputs, SamplingInputs
from engine.kv_cache import KVCache
from engine.masks import Masks
from engine.mixed_graphs import MixedGraphs, mixed_sizes
from engine.model import Model
from engine.parallel.group import Group
from engine.prompt_logprobs import completed, find_prompt_logprobs, run_prompt_logits
from engine.sampler import change_logits_, changes_logits, draws_late, upload
from engine.step_buffers import Words
from engine.step_draws import Drawn, Logprobs, drawn_rows
from engine.step_inputs import StepInputs, StepLimits, decode_limits, is_decode
from engine.step_layout import StepLayout
from engine.types import Sample, ScheduledBatch
from engine.types import Sequence as Choice
from kernels.host_words import copy_to_host
from kernels.paged_attention import max_item_queries
from kernels.paged_plan import attention_scratch
from kernels.sampling import gather_logprobs, sample_rows
from lora.page_image import AFFINE
from lora.pool import AdapterPool

logger = logging.getLogger(__name__)

# Between two looks at a step of several ranks. It is no part of a step's time: the next one runs.
_POLL_S = 20e-6
_GRAPH_BYTES = 4 * 1024**2  # the driver's memory of a graph of some 400 kernels


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The state from which prompt log-probabilities are computed when the step is collected."""

    inputs: ForwardInputs  # as `StepInputs.for_prompts` returns them
    hidden: torch.Tensor
    number: int  # of the step in the group


@dataclass(frozen=True, slots=True)
class _Undrawn:
    """The logits of a step and the source of its draw's parameters; both are valid until the next
    launch."""

    logits: torch.Tensor | None  # [R, V]; None: no sequence samples
    batch: ScheduledBatch
    # A decode is drawn by its graph, from unchanged logits; every rank draws tokens for which no
    # row has penalties, bias, bans or a grammar.
    layout: StepLayout
    inputs: StepInputs
    has_logprobs: bool  # requested for a row


@dataclass(slots=True)
class DeviceStep:
    steps: DeviceSteps
    batch: ScheduledBatch
    prompts: _Prompts | None
    undrawn: _Undrawn | None  # None: drawn, or the draw has failed
    drawn: Drawn | None = None

    def draw(self) -> None:
        """Draws if `launch` left it. After an exception the step cannot be drawn again, because its
        logits are changed in place, but no other step has read its tokens: it can be repeated."""
        undrawn, self.undrawn = self.undrawn, None
        if undrawn is None:
            return
        for part in undrawn.batch.sequences:
            draws = part.samples and part.sequence.block_table  # without blocks it has ended
            is_known = not draws or part.known_end <= len(part.sequence.token_ids)
            assert is_known, "a step is drawn before the step before is committed"
        with device_faults(), torch.inference_mode():
            self.drawn = self.steps.draw(undrawn)

    def collect(self) -> tuple[Sample, ...]:
        assert self.drawn is not None, "a step is collected before its draw"
        with device_faults():
            self.steps.wait(self.drawn)
            return self.steps.read(self.batch, self.drawn, self.prompts)


class DeviceSteps:
    """Implements the steps of `types.Runner`."""

    runs_ahead = True

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        pool: AdapterPool,
        limits: StepLimits,
        *,
        has_mixed_graphs: bool,
        group: Group | None = None,
    ) -> None:
        """`group`: the other ranks, which launch each step, too; None: there are none, or all make
        the same calls."""
        self._group = group
        self._model = model
        self._kv = kv
        self._pool = pool
        self._has_lora = pool.num_blocks > 0
        self._eos_token_ids = model.config.eos_token_ids
        device = kv.k[0].device
        num_draws = limits.max_draws
        self._is_cuda = is_cuda = device.type == "cuda"
        self._drawn = torch.zeros(num_draws, dtype=torch.int32, device=device)
        self._host_drawn = [
            torch.zeros(num_draws, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)
        ]
        self._turn = 0
        # The prompts of followed steps, with the rows of each sequence, until they are requested.
        self._kept_prompts: deque[tuple[_Prompts, tuple[int, ...]]] = deque(maxlen=2)
        # Rows of the newest step; none before its draw, so that no step builds on an undrawn one.
        self._drawn_rows: dict[Choice, int] = {}
        self._masks = Masks(num_draws, model.config.vocab_size, device)
        has_windows = any(model.config.sliding_windows)
        most = 1 if has_windows else max_item_queries(kv.k[0], limits.heads.num_heads, pool.dtype)
        most = min(most, limits.max_queries)
        rows = replace(decode_limits(limits), max_queries=most)
        scratch = attention_scratch(rows.max_seqs, limits.heads, device)
        self._decode = StepInputs(rows, pool, scratch, self._drawn, is_decode=True)
        self._mixed = StepInputs(limits, pool, scratch, self._drawn, is_decode=False)
        self._few_layers = few_layers = model.layers_of_each_kind(kv)
        self._graphs = DecodeGraphs(graph_sizes(rows.max_seqs), self._run_static, few_layers)
        sizes = mixed_sizes(limits.max_tokens) if has_mixed_graphs else ()
        inputs_of = self._mixed.for_mixed_graph
        self._mixed_graphs = MixedGraphs(sizes, model, kv, pool, inputs_of, few_layers)

    @property
    def graph_sizes(self) -> tuple[int, ...]:  # as of a Runner
        return self._graphs.sizes

    def load_head_products(self) -> None:
        """Computes the product of the head for every number of rows that sample. cuBLAS has many
        kernels for them, and waits for the device when it loads one: steps with prompts of the
        first burst of 256 requests took 20 ms longer (H200). The largest comes first: its memory,
        which the allocator keeps, then holds all others."""
        config = self._model.config
        hidden = self._model.weights.embedding.new_zeros((len(self._drawn), config.hidden_size))
        for count in range(len(hidden), 0, -1):
            self._model.head_product(hidden[:count])

    def capture(self) -> None:
        """Captures the graphs, before the first step. Without it every step is launched kernel by
        kernel."""
        started_s = time.perf_counter()
        decodes, mixed = self._graph_keys(), self._mixed_graphs.keys
        memory = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        total = len(decodes) + len(mixed)
        with tqdm(total=total, desc="capturing CUDA graphs", unit="graph") as bar:
            for of_kind, keys in ((self._graphs, decodes), (self._mixed_graphs, mixed)):
                for key in keys:
                    of_kind.capture(key, memory)
                    bar.update()
        gc.collect()
        counts, seconds = (len(decodes), len(mixed)), time.perf_counter() - started_s
        words = "captured %d graphs of decodes and %d of other steps in %.1f s"
        logger.info(words, *counts, seconds)

    def _graph_keys(self) -> list[GraphKey]:
        return self._graphs.keys(self._has_lora, self._pool.serves_affine)

    @property
    def graphs_overhead(self) -> int:
        """An estimate of the bytes of captured graphs beyond their steps' tensors."""
        graphs = _GRAPH_BYTES * len(self._graph_keys())
        return graphs + self._mixed_graphs.overhead()

    def run_largest_graph(self) -> None:
        """Runs the largest captured step without a graph, to measure its memory."""
        self._run_static(self._graph_keys()[0])

    def run_largest_mixed(self) -> None:
        """Runs the largest captured step with prompts without a graph, to measure its memory."""
        for key in self._mixed_graphs.keys[:1]:
            self._mixed_graphs.run(key)

    @property
    def mask_bytes(self) -> int:
        """The bytes on the device that the masks of grammars hold from the start."""
        return self._masks.device_bytes

    def mask_once(self) -> None:
        """Launches the mask of grammars, which no batch of the warm-up has."""
        self._masks.run_once()

    def trace(self) -> None:
        """Runs every graph's step on meta tensors, which records the kernels that it launches."""
        for key in self._graph_keys():
            self._run_static(key, self._few_layers)
        for key in self._mixed_graphs.keys:
            self._mixed_graphs.run(key, few=True)

    def trace_batch(self, batch: ScheduledBatch) -> None:
        """Runs a step outside the graphs on meta tensors, up to the copy of its tokens to the
        host."""
        logits, _ = self._run(self._write(batch), 0, self._few_layers)
        assert logits is not None
        self._draw(logits, self._mixed.sampling(len(logits)))
        copy_to_host(self._drawn, self._host_drawn[0])

    def launch(self, batch: ScheduledBatch) -> DeviceStep:
        with device_faults():
            return self._launch(batch)

    def _launch(self, batch: ScheduledBatch) -> DeviceStep:
        layout = self._write(batch)
        # The parameters belong to a sequence: its rows, many with a draft, need no check.
        drawing = [part for part in batch.sequences if part.samples]
        is_late = any(map(draws_late, drawing))
        if is_late or any(map(changes_logits, drawing)):
            layout = replace(layout, all_draw=False)
        inputs = self._decode if layout.is_decode else self._mixed
        number = 0
        in_step: AbstractContextManager[object] = nullcontext()
        if self._group is not None:
            number = self._group.num_steps
            in_step = self._group.launch(layout, inputs.words(layout))
        with in_step:
            logits, prompts = self._run(layout, number)
        has_logprobs = any(part.sequence.request.params.logprobs is not None for part in drawing)
        undrawn = _Undrawn(logits, batch, layout, inputs, has_logprobs)
        self._drawn_rows = {}
        if is_late:
            return DeviceStep(self, batch, prompts, undrawn)
        return DeviceStep(self, batch, prompts, None, self.draw(undrawn))

    def _write(self, batch: ScheduledBatch) -> StepLayout:
        """Writes a step on the host."""
        size = self._graphs.size_for(batch.num_tokens) if is_decode(batch) else None
        if size is not None:
            return self._decode.write_for_graph(batch, self._drawn_rows, size)
        kinds = self._mixed.site_kinds(batch.sequences)
        # Steps with affine rows have no such graph: their kernels are other ones.
        size = None if AFFINE in kinds else self._mixed_graphs.size_for(batch.num_tokens)
        return self._mixed.write(batch, self._drawn_rows, kinds, size)

    def _run(
        self, layout: StepLayout, number: int, layers: Sequence[int] | None = None
    ) -> tuple[torch.Tensor | None, _Prompts | None]:
        """Launches the step that was written last, with the same exchanges on every rank. Returns
        the logits [R, V] of the rows that sample, None without any."""
        count = layout.num_samples
        if layout.is_decode:
            self._decode.send(layout)
            assert layout.size is not None
            self._kv.arrivals.wait_for_all()
            return self._graphs.replay(GraphKey(layout.size, layout.reach))[:count], None
        self._mixed.send(layout)
        inputs = self._mixed.inputs(layout)
        if layout.size is None:
            hidden = self._model.forward(inputs, self._kv, self._pool, layers)
        else:
            hidden = self._mixed_graphs.forward(inputs, layout.size)
        logits = None
        if count:
            logits = self._model.logits(hidden[:count], inputs, 0, self._pool)
        if not layout.prompt_rows:
            return logits, None
        inputs = self._mixed.for_prompts(inputs, layout.prompt_runs)
        return logits, _Prompts(inputs, hidden, number)

    def follow(
        self, layout: StepLayout, words: Words, number: int, on_copied: Callable[[], None]
    ) -> None:
        """Launches a step beside the rank that wrote it, with its numbers. `on_copied`: is called
        once these are not read any more."""
        inputs = self._decode if layout.is_decode else self._mixed
        inputs.copy(layout, words)
        on_copied()
        logits, prompts = self._run(layout, number)
        if prompts is not None:
            self._kept_prompts.append((prompts, layout.prompt_rows))
        if logits is not None and layout.all_draw and not layout.is_decode:
            self._draw(logits, inputs.sampling(len(logits)))

    def follow_draw(self, count: int) -> None:
        """Receives the tokens of a step whose rows the first rank alone has drawn."""
        self._model.ranks.broadcast_(self._drawn[:count])

    def follow_prompts(self, number: int) -> None:
        """Computes the logits of the prompt rows of a step, as the first rank does. Rows of
        earlier steps are not requested any more."""
        while self._kept_prompts:
            prompts, counts = self._kept_prompts.popleft()
            if prompts.number != number:
                continue
            run_prompt_logits(prompts.inputs, prompts.hidden, counts, self._model, self._pool)
            return

    def wait(self, drawn: Drawn) -> None:
        """Waits until the step's tokens are on the host. Raises EngineDeadError if another rank is
        gone: the device may then wait for it forever."""
        if drawn.done is None:
            return
        if self._group is None:
            drawn.done.synchronize()
            return
        while not drawn.done.query():  # type: ignore[no-untyped-call]
            self._group.check()
            time.sleep(_POLL_S)
        self._group.check()  # `Collective.abort` lets a step end, with any tokens

    def draw(self, step: _Undrawn) -> Drawn:
        """Draws the tokens and starts their way to the host."""
        count = step.layout.num_samples
        logprobs = None if step.logits is None else self._finish(step.logits, step)
        if self._group is not None and count and not step.layout.all_draw:
            with self._group.together({"do": "draw", "count": count}):
                self._model.ranks.broadcast_(self._drawn[:count])
        self._turn ^= 1
        host_drawn = self._host_drawn[self._turn][:count]
        copy_to_host(self._drawn[:count], host_drawn)
        done = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()
        self._drawn_rows = drawn_rows(step.batch)
        return Drawn(host_drawn, done, logprobs)

    def read(
        self, batch: ScheduledBatch, drawn: Drawn, prompts: _Prompts | None
    ) -> tuple[Sample, ...]:
        samples = drawn.read(batch)
        if prompts is None:
            return tuple(samples)
        message = {"do": "prompts", "number": prompts.number}
        with self._group.together(message) if self._group is not None else nullcontext():
            found = find_prompt_logprobs(
                batch, prompts.inputs, prompts.hidden, self._model, self._pool
            )
            return completed(samples, found)

    def _run_static(self, key: GraphKey, layers: Sequence[int] | None = None) -> torch.Tensor:
        inputs, sampling = self._decode.for_graph(key.size, key.lora)
        hidden = self._model.forward(inputs, self._kv, self._pool, layers)
        logits = self._model.logits(hidden, inputs, 0, self._pool)
        self._draw(logits, sampling)
        return logits

    def _finish(self, logits: torch.Tensor, step: _Undrawn) -> Logprobs | None:
        is_drawn, all_draw = step.layout.is_decode, step.layout.all_draw
        if is_drawn and all_draw and not step.has_logprobs:
            return None
        parts = step.batch.rows
        wanted = tuple(
            row
            for row, part in enumerate(parts)
            if part.sequence.request.params.logprobs is not None
        )
        raw = None
        if wanted:
            rows = upload(torch.tensor(wanted), logits.device)
            raw = logits.index_select(0, rows)  # a copy, taken before the changes
        if not all_draw and any(changes_logits(part) for part in parts):
            change_logits_(logits, parts, self._eos_token_ids)
            is_drawn = False
        if not all_draw and self._masks.apply_(logits, parts):
            is_drawn = False
        if not is_drawn:
            self._draw(logits, step.inputs.sampling(len(parts)))
        if raw is None:
            return None
        limits = tuple(parts[row].sequence.request.params.logprobs or 0 for row in wanted)
        drawn = self._drawn.index_select(0, rows).clamp(min=0)
        found = gather_logprobs(raw, drawn, max(limits))
        return Logprobs(
            wanted, limits, tuple(tensor.to("cpu", non_blocking=True) for tensor in found)
        )

    def _draw(self, logits: torch.Tensor, sampling: SamplingInputs) -> None:
        sample_rows(logits, *sampling, self._drawn)
