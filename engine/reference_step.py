"""A step on the reference backend: fresh inputs, torch operations, done when `launch` returns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.inputs import build_inputs
from engine.kv_cache import KVCache
from engine.model import Model
from engine.prompt_logprobs import with_prompt_logprobs
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

    def __init__(
        self, model: Model, kv: KVCache, pool: AdapterPool, eos_token_ids: Collection[int]
    ) -> None:
        self._model = model
        self._kv = kv
        self._pool = pool
        self._eos_token_ids = eos_token_ids

    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        inputs = build_inputs(batch, self._kv.block_size, self._kv.k[0].device, self._pool)
        hidden = self._model.forward(inputs, self._kv, self._pool)
        rows = batch.rows
        answers: list[Sample] = []
        if rows:
            logits = self._model.logits(hidden[: len(rows)], inputs, 0, self._pool)
            answers = sample(logits, rows, self._eos_token_ids)
        samples = by_sequence(batch, answers)
        return FinishedStep(
            with_prompt_logprobs(batch, samples, inputs, hidden, self._model, self._pool)
        )
