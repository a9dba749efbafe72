"""A step on the reference backend: fresh inputs, torch operations, done when `launch` returns."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from engine.inputs import StepArrays, forward_inputs, step_arrays
from engine.kv_cache import KVCache
from engine.model import Model
from engine.parallel.group import Group
from engine.prompt_logprobs import completed, find_prompt_logprobs, run_prompt_logits
from engine.sampler import by_sequence, sample
from engine.types import Sample, ScheduledBatch
from lora.pool import AdapterPool


@dataclass(frozen=True, slots=True)
class FinishedStep:
    samples: tuple[Sample, ...]

    def draw(self) -> None:
        """Does nothing: `launch` has drawn all, since no step runs ahead."""

    def collect(self) -> tuple[Sample, ...]:
        return self.samples


class ReferenceSteps:
    """Implements the steps of `types.Runner`."""

    runs_ahead = False
    graph_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        pool: AdapterPool,
        group: Group | None = None,
    ) -> None:
        """`group`: the other ranks, which compute each step, too."""
        self._model = model
        self._kv = kv
        self._pool = pool
        self._group = group

    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        step = step_arrays(batch, self._kv.block_size)
        inputs = forward_inputs(step, self._kv.block_size, self._kv.k[0].device, self._pool)
        # Whatever follows the exchanges concerns this rank only and may fail.
        with self._group.launch_arrays(step) if self._group is not None else nullcontext():
            hidden = self._model.forward(inputs, self._kv, self._pool)
            logits = None
            if step.num_samples:
                logits = self._model.logits(hidden[: step.num_samples], inputs, 0, self._pool)
            prompts = find_prompt_logprobs(batch, inputs, hidden, self._model, self._pool)
        answers = (
            [] if logits is None else sample(logits, batch.rows, self._model.config.eos_token_ids)
        )
        return FinishedStep(completed(by_sequence(batch, answers.__getitem__), prompts))


def follow(model: Model, kv: KVCache, pool: AdapterPool, step: StepArrays) -> None:
    """Computes a step beside the rank that launched it, with the same exchanges."""
    inputs = forward_inputs(step, kv.block_size, kv.k[0].device, pool)
    hidden = model.forward(inputs, kv, pool)
    if step.num_samples:
        model.logits(hidden[: step.num_samples], inputs, 0, pool)
    run_prompt_logits(inputs, hidden, step.prompt_rows, model, pool)
