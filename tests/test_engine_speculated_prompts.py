"""Drafts beside prompts: a prompt does not wait for the end of a sequence that always drafts."""

from __future__ import annotations

import pytest

from engine.core import Engine
from engine.drafts import Draft
from engine.types import Sequence
from tests.fakes import FakeRunner, make_config, make_request, solo_tokens
from tests.speculation_helpers import ScriptedDrafter


class LateDrafter(ScriptedDrafter):
    """Guesses from an output on, as where a text begins to repeat itself."""

    first = 0

    def propose(self, sequence: Sequence, limit: int) -> Draft | None:
        if sequence.num_output_tokens < self.first:
            return None
        return super().propose(sequence, limit)


@pytest.mark.parametrize("first", range(1, 9))
@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_do_not_put_off_the_step_that_measures_decodes(ahead: bool, first: int) -> None:
    """A prompt has no token before that step: it waited for 96 steps with drafts."""
    runner = FakeRunner(2048)
    runner.runs_ahead = ahead
    model = runner.model_config
    drafter = LateDrafter(
        "wrong", model.vocab_size, lambda s: solo_tokens(s.request, s.choice, model)
    )
    drafter.first = first
    settings = make_config(block_size=4, speculation="suffix", max_num_batched_tokens=512)
    engine = Engine(settings, runner, drafter=drafter)
    engine.add_request(make_request("decodes", 5, max_tokens=200))
    engine.step()
    engine.add_request(make_request("prompt", 4000, max_tokens=1))
    while engine.has_work:
        engine.step()
    has_prompt = [any(name == "prompt" for name, *_ in batch) for batch in runner.batches]
    newest = len(has_prompt) - has_prompt[::-1].index(True)
    assert has_prompt[has_prompt.index(True) : newest].count(False) <= 3
    assert engine.load().num_drafts > 10
