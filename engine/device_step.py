"""A step on a CUDA device: launched without waiting, collected while the next one runs.

Decode steps, with drafts or without, replay a graph, small steps with prompts replay a graph
between the attention of every two layers, all others launch kernel by kernel. The drawn tokens stay
on the device as the next step's inputs; the host gets a copy. Only `collect` waits for the
device.

The draw of a row with a grammar or penalties needs a token that the step before may still hold on
the device. A step with such rows launches its forward pass alone, and draws all rows later, once
the step before is committed: a row's draw depends on that row only.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from engine.decode_graphs import DecodeGraphs, GraphKey, graph_sizes
from engine.errors import EngineDeadError
from engine.inputs import ForwardInputs, SamplingInputs
from engine.kv_cache import KVCache
from engine.masks import Masks
from engine.model import Model
from engine.piecewise_graphs import PiecewiseGraphs, piece_sizes
from engine.prompt_logprobs import with_prompt_logprobs
from engine.sampler import by_sequence, change_logits_, changes_logits, draws_late, upload
from engine.step_inputs import StepInputs, StepLimits, is_decode
from engine.types import Sample, ScheduledBatch, ScheduledSequence, TokenLogprobs
from engine.types import Sequence as Choice
from kernels.paged_plan import attention_scratch
from kernels.sampling import gather_logprobs, sample_rows
from lora.page_image import AFFINE
from lora.pool import AdapterPool

logger = logging.getLogger(__name__)

_GRAPH_BYTES = 4 * 1024**2  # the driver's memory of a graph of some 400 kernels


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities on their way to the host, for the rows that requested them."""

    rows: tuple[int, ...]
    limits: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]  # own [n], ranks [n], top ids [n, k], top [n, k]

    def read(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        own, ranks, top_ids, top = (tensor.tolist() for tensor in self.tensors)
        return {
            row: TokenLogprobs(
                token_ids[row],
                own[i],
                ranks[i],
                tuple(zip(top_ids[i][:limit], top[i][:limit], strict=True)),
            )
            for i, (row, limit) in enumerate(zip(self.rows, self.limits, strict=True))
        }


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The state from which prompt log-probabilities are computed when the step is collected."""

    inputs: ForwardInputs  # as `StepInputs.for_prompts` returns them
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Undrawn:
    """The logits of a step and the source of its draw's parameters; both are valid until the next
    launch."""

    logits: torch.Tensor | None  # [R, V]; None: no sequence samples
    parts: tuple[ScheduledSequence, ...]  # one per row
    inputs: StepInputs
    is_drawn: bool  # by the graph, from unchanged logits


@dataclass(frozen=True, slots=True)
class _Drawn:
    token_ids: torch.Tensor  # [rows] int32, pinned
    done: torch.cuda.Event | None  # None in the interpreter, which has no device to wait for
    logprobs: _Logprobs | None


@dataclass(slots=True)
class DeviceStep:
    steps: DeviceSteps
    batch: ScheduledBatch
    prompts: _Prompts | None
    undrawn: _Undrawn | None  # None: drawn, or the draw has failed
    drawn: _Drawn | None = None

    def draw(self) -> None:
        """Draws if `launch` left it. After an exception the step cannot be drawn again, because its
        logits are changed in place, but no other step has read its tokens: it can be repeated."""
        undrawn, self.undrawn = self.undrawn, None
        if undrawn is None:
            return
        for part in undrawn.parts:
            sequence = part.sequence  # without blocks it has ended, and its draw is discarded
            is_known = part.known_end <= len(sequence.token_ids) or not sequence.block_table
            assert is_known, "a step is drawn before the step before is committed"
        with device_faults(), torch.inference_mode():
            self.drawn = self.steps.draw(undrawn)

    def collect(self) -> tuple[Sample, ...]:
        assert self.drawn is not None, "a step is collected before its draw"
        with device_faults():
            if self.drawn.done is not None:
                self.drawn.done.synchronize()
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
        max_tokens: int,
        eos_token_ids: Collection[int],
        *,
        has_pieces: bool,
    ) -> None:
        self._model = model
        self._kv = kv
        self._pool = pool
        self._has_lora = pool.num_blocks > 0
        self._eos_token_ids = eos_token_ids
        device = kv.k[0].device
        self._drawn = torch.zeros(limits.max_draws, dtype=torch.int32, device=device)
        self._is_cuda = device.type == "cuda"
        self._host_drawn = [
            torch.zeros(limits.max_draws, dtype=torch.int32, pin_memory=self._is_cuda)
            for _ in range(2)
        ]
        self._turn = 0
        # Rows of the newest step; none before its draw, so that no step builds on an undrawn one.
        self._drawn_rows: dict[Choice, int] = {}
        self._masks = Masks(limits.max_draws, model.config.vocab_size, device)
        # In graphs of decodes every draw is a row, which attends as a sequence of its own.
        rows = replace(limits, max_seqs=limits.max_draws)
        scratch = attention_scratch(rows.max_seqs, limits.heads, device)
        self._decode = StepInputs(rows.max_seqs, rows, pool, scratch, self._drawn, is_decode=True)
        self._mixed = StepInputs(max_tokens, limits, pool, scratch, self._drawn, is_decode=False)
        self._graphs = DecodeGraphs(graph_sizes(rows.max_seqs), self._run_static)
        sizes = piece_sizes(max_tokens) if has_pieces else ()
        self._pieces = PiecewiseGraphs(sizes, model, kv, pool, self._mixed.for_pieces)

    def capture(self) -> None:
        """Captures the graphs, before the first step. Without it every step is launched kernel by
        kernel."""
        started_s = time.perf_counter()
        graphs, pieces = self._graph_keys(), self._pieces.keys(self._has_lora)
        memory = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        with tqdm(
            total=len(graphs) + len(pieces), desc="capturing CUDA graphs", unit="graph"
        ) as bar:
            for key in graphs:
                self._graphs.capture(key, memory)
                bar.update()
            for key in pieces:
                self._pieces.capture(key, memory)
                bar.update()
        gc.collect()
        seconds = time.perf_counter() - started_s
        logger.info(
            "captured graphs of %d sizes, pieces of %d in %.1f s", len(graphs), len(pieces), seconds
        )

    def _graph_keys(self) -> list[GraphKey]:
        return self._graphs.keys(self._has_lora, self._pool.serves_affine)

    @property
    def graphs_overhead(self) -> int:
        """An estimate of the bytes of captured graphs beyond their steps' tensors."""
        graphs = _GRAPH_BYTES * len(self._graph_keys())
        return graphs + self._pieces.overhead(self._has_lora)

    def run_largest_graph(self) -> None:
        """Runs the largest captured step without a graph, to measure its memory."""
        self._run_static(self._graph_keys()[0])

    def run_largest_pieces(self) -> None:
        """Runs the largest pieces without graphs, to measure their memory."""
        self._pieces.run_largest(self._has_lora)

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
            self._run_static(key)
        for key in self._pieces.keys(self._has_lora):
            self._pieces.run(key)

    def trace_batch(self, batch: ScheduledBatch) -> None:
        """Runs a step outside the graphs on meta tensors, without its copies to the host."""
        inputs, hidden = self._forward_mixed(batch)
        rows = inputs.num_samples
        logits = self._model.logits(hidden[:rows], inputs, 0, self._pool)
        self._draw(logits, self._mixed.sampling(rows))

    def launch(self, batch: ScheduledBatch) -> DeviceStep:
        with device_faults():
            return self._launch(batch)

    def _launch(self, batch: ScheduledBatch) -> DeviceStep:
        parts = batch.rows
        size = self._graphs.size_for(len(parts)) if is_decode(batch) else None
        prompts = None
        if size is not None:
            reach = self._decode.write_for_graph(batch, self._drawn_rows, size)
            logits = self._graphs.replay(GraphKey(size, reach))[: len(parts)]
            undrawn = _Undrawn(logits, parts, self._decode, True)
        else:
            inputs, hidden = self._forward_mixed(batch)
            undrawn = _Undrawn(None, parts, self._mixed, False)
            if parts:
                logits = self._model.logits(hidden[: len(parts)], inputs, 0, self._pool)
                undrawn = _Undrawn(logits, parts, self._mixed, False)
            if hidden.shape[0] > len(parts):
                prompts = _Prompts(self._mixed.for_prompts(inputs, batch), hidden)
        self._drawn_rows = {}
        if any(draws_late(part) for part in parts):
            return DeviceStep(self, batch, prompts, undrawn)
        return DeviceStep(self, batch, prompts, None, self.draw(undrawn))

    def draw(self, step: _Undrawn) -> _Drawn:
        """Draws the tokens and starts their way to the host."""
        parts = step.parts
        logprobs = None if step.logits is None else self._finish(step.logits, step)
        self._drawn_rows = {part.sequence: row for row, part in enumerate(parts)}
        self._turn ^= 1
        host_drawn = self._host_drawn[self._turn][: len(parts)]
        host_drawn.copy_(self._drawn[: len(parts)], non_blocking=True)
        done = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()
        return _Drawn(host_drawn, done, logprobs)

    def _forward_mixed(self, batch: ScheduledBatch) -> tuple[ForwardInputs, torch.Tensor]:
        kinds = self._mixed.site_kinds(batch.sequences)
        # Steps with affine rows have no pieces: their kernels are other ones.
        size = None if AFFINE in kinds else self._pieces.size_for(batch.num_tokens)
        inputs = self._mixed.write(batch, self._drawn_rows, kinds, size)
        if size is None:
            return inputs, self._model.forward(inputs, self._kv, self._pool)
        return inputs, self._pieces.forward(inputs, batch.num_tokens, size)

    def read(
        self, batch: ScheduledBatch, drawn: _Drawn, prompts: _Prompts | None
    ) -> tuple[Sample, ...]:
        token_ids: list[int] = drawn.token_ids.tolist()
        logprobs = drawn.logprobs.read(token_ids) if drawn.logprobs else {}
        answers = [
            Sample(token_id, logprobs.get(row)) if token_id >= 0 else Sample(None, is_finite=False)
            for row, token_id in enumerate(token_ids)
        ]
        samples = by_sequence(batch, answers)
        if prompts is None:
            return tuple(samples)
        inputs, hidden = prompts.inputs, prompts.hidden
        return with_prompt_logprobs(batch, samples, inputs, hidden, self._model, self._pool)

    def _run_static(self, key: GraphKey) -> torch.Tensor:
        inputs, sampling = self._decode.for_graph(key.size, key.lora)
        hidden = self._model.forward(inputs, self._kv, self._pool)
        logits = self._model.logits(hidden, inputs, 0, self._pool)
        self._draw(logits, sampling)
        return logits

    def _finish(self, logits: torch.Tensor, step: _Undrawn) -> _Logprobs | None:
        parts, is_drawn = step.parts, step.is_drawn
        wanted = tuple(
            row
            for row, part in enumerate(parts)
            if part.sequence.request.params.logprobs is not None
        )
        raw = None
        if wanted:
            rows = upload(torch.tensor(wanted), logits.device)
            raw = logits.index_select(0, rows)  # a copy, taken before the changes
        if any(changes_logits(part) for part in parts):
            change_logits_(logits, parts, self._eos_token_ids)
            is_drawn = False
        if self._masks.apply_(logits, parts):
            is_drawn = False
        if not is_drawn:
            self._draw(logits, step.inputs.sampling(len(parts)))
        if raw is None:
            return None
        limits = tuple(parts[row].sequence.request.params.logprobs or 0 for row in wanted)
        drawn = self._drawn.index_select(0, rows).clamp(min=0)
        found = gather_logprobs(raw, drawn, max(limits))
        return _Logprobs(
            wanted, limits, tuple(tensor.to("cpu", non_blocking=True) for tensor in found)
        )

    def _draw(self, logits: torch.Tensor, sampling: SamplingInputs) -> None:
        sample_rows(
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seeds,
            sampling.choices,
            sampling.positions,
            self._drawn,
        )


@contextmanager
def device_faults() -> Iterator[None]:
    """Turns a fault of the device into EngineDeadError. It is permanent: every later call fails as
    well, and torch, cuBLAS or Triton, whichever meets it first, raises its own error. Out of memory
    is no such fault."""
    try:
        yield
    except RuntimeError as error:
        if _is_device_lost():
            raise EngineDeadError(f"the device failed: {str(error)[:200]}") from error
        raise


def _is_device_lost() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
