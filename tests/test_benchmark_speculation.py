"""The benchmark of speculation, on an engine without a model."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.speculation import ReplayedDrafter, Variant, measure
from tests.fakes import FakeRunner, make_config, make_request


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_replayed_drafts_have_the_acceptance_that_was_asked_for(
    acceptance: float, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, drafter = FakeRunner(num_blocks=400), ReplayedDrafter(acceptance)
    config = make_config(enable_prefix_caching=False, num_speculative_tokens=3)
    variants = [
        Variant(mode, config, runner, drafter)  # type: ignore[arg-type]
        for mode in ("off", "suffix")
    ]
    rounds = [
        [make_request(f"r{i}", 5, seed=i + number, max_tokens=21) for i in range(4)]
        for number in range(3)
    ]
    measure("fake", variants, rounds, 2, drafter)
    plain, drafted = map(json.loads, capsys.readouterr().out.splitlines())
    assert plain["tokens_per_step"] == pytest.approx(2.0)
    assert (plain["draft_tokens"], plain["acceptance"]) == (0, None)
    assert drafted["acceptance"] == acceptance
    assert drafted["different_answers"] == 0
    # One token beside the prompt, then four a step.
    steps = 21 if acceptance == 0.0 else 6
    assert drafted["tokens_per_step"] == pytest.approx(2 * 21 / steps, abs=1e-3)
