"""The expected and the measured duration of each step, and the estimates that learn from it.

A step with drafts is no measure of steps of prompts and decodes: only the gate of drafts learns
from it. Free of the runner and of the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.speculation import Speculation
from engine.step_cost import LongestSteps, StepCost
from engine.step_shares import charge_step
from engine.types import LaunchedStep, ScheduledBatch


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

    def observe(self, step: Step, waited_s: float) -> None:
        """Records and charges the step's duration: its launch, and the wait for it after the next
        step's launch. Do not time from the previous collect: it happens after this launch, which
        may keep the host busy longer than the device, so that prompts would look free."""
        seconds = step.launch_s + waited_s
        charge_step(step.batch, seconds)
        self._longest.observe(step.num_prompt + step.num_drafted, seconds)
        if not step.num_drafted:
            self._cost.observe(step.num_prompt, step.num_decoding, seconds)
        # Where steps run ahead, one without drafts would not have waited for the step before.
        is_usual = step.num_drafted or step.follows_at_once or not self._runs_ahead
        if self._speculation is not None and not step.num_prompt and is_usual:
            self._speculation.observe_step(step.num_decoding, step.num_drafted, seconds)
