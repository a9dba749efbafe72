"""The expected and the measured duration of each step, the estimates that learn from it, and its
shares that sequences are charged.

A step with drafts is no measure of steps of prompts and decodes: only the gate of drafts learns
from it. A step that waits for a load of KV is a measure of nothing. Free of the runner and of the
clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.speculation import Speculation
from engine.step_cost import LongestSteps, StepCost
from engine.types import PROMPT_RANK, LaunchedStep, ScheduledBatch, ScheduledSequence


@dataclass(slots=True)
class Step:
    """A step from its launch to its commit."""

    batch: ScheduledBatch
    launched: LaunchedStep | None = None
    error: Exception | None = None  # of its launch
    lacks_memory: bool = False  # its launch ran out of memory
    launch_s: float = 0.0  # host time of its launch
    num_prompt: int = 0  # tokens
    num_decoding: int = 0  # sequences
    num_drafted: int = 0  # tokens of drafts
    loads_kv: bool = False  # it waits on the device for blocks from the host
    follows_at_once: bool = False  # launched while the step before was in flight
    usual_s: float = 0.0  # as `StepTimes.usual_step_s`
    expected_s: float = 0.0  # by its cost


class StepTimes:
    def __init__(
        self, cost: StepCost, speculation: Speculation | None, *, runs_ahead: bool
    ) -> None:
        self._cost = cost
        self._speculation = speculation
        self._runs_ahead = runs_ahead
        self._longest = LongestSteps()
        self._noted: list[tuple[Step, float]] = []
        self.usual_step_s = math.inf  # longest recent step like the steps in flight

    def begin(self, batch: ScheduledBatch, in_flight: Step) -> Step:
        """`in_flight`: the step before, if it is not collected yet."""
        num_decoding = batch.num_decoding
        num_drafted = 0 if self._speculation is None else batch.num_draft_tokens
        num_prompt = batch.num_tokens - num_decoding - num_drafted
        step = Step(
            batch,
            num_prompt=num_prompt,
            num_decoding=num_decoding,
            num_drafted=num_drafted,
            usual_s=self._longest.expect(num_prompt + num_drafted),
            expected_s=self._cost.seconds(num_prompt, num_decoding + num_drafted),
        )
        self.usual_step_s = max(step.usual_s, in_flight.usual_s)
        return step

    def note(self, step: Step, waited_s: float) -> None:
        """Notes the wait for a step, after the launch of the next one or before."""
        self._noted.append((step, waited_s))

    def learn(self) -> None:
        """Records and charges the noted steps: once the next step is launched, so that no device
        waits for it."""
        for step, waited_s in self._noted:
            self._observe(step, waited_s)
        self._noted.clear()

    def _observe(self, step: Step, waited_s: float) -> None:
        """Records and charges the step's duration: its launch, and the wait for it after the next
        step's launch. Do not time from the previous collect: it happens after this launch, which
        may keep the host busy longer than the device, so that prompts would look free."""
        seconds = step.launch_s + waited_s
        if step.loads_kv:
            charge_step(step.batch, step.expected_s or seconds)
            return
        charge_step(step.batch, seconds)
        self._longest.observe(step.num_prompt + step.num_drafted, seconds)
        if not step.num_drafted:
            self._cost.observe(step.num_prompt, step.num_decoding, seconds)
        # Where steps run ahead, one without drafts would not have waited for the step before.
        is_usual = step.num_drafted or step.follows_at_once or not self._runs_ahead
        if self._speculation is not None and not step.num_prompt and is_usual:
            self._speculation.observe_step(step.num_decoding, step.num_drafted, seconds)


def charge_step(batch: ScheduledBatch, seconds: float) -> None:
    """Adds each sequence's share of `seconds`, by its tokens and the rank of its adapter, to its
    `engine_s`, which its next output reports. 256 rows need 22 us.

    The weights are those of a token's cost in a full engine, measured on one H200 with the shape of
    Llama 3 8B (see `serve_app.admission.cost`): an output token costs as much as two prompt tokens
    of the base, and an adapter adds to both in proportion to its rank.
    """
    weights = [
        item.sequence.output_weight if item.end - item.start == 1 else _weight(item)
        for item in batch.sequences
    ]
    if weights:
        unit_s = seconds / sum(weights)
        for item, weight in zip(batch.sequences, weights, strict=True):
            item.sequence.engine_s += weight * unit_s


def _weight(item: ScheduledSequence) -> float:
    """Returns the weight of a part of a prompt, or of a decode with a draft, whose tokens weigh as
    those of a prompt; an adapter counts where it is active."""
    request = item.sequence.request
    token_weight = PROMPT_RANK * request.adapter_rank
    if item.draft and item.known_end - item.start == 1:
        return item.sequence.output_weight + len(item.draft) * (1.0 + token_weight)
    num_active = item.end - max(item.start, request.active_from or 0)
    num_tokens = item.end - item.start
    return num_tokens + token_weight * max(0, num_active)
