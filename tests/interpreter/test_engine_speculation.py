"""Speculation on the device's steps, kernels interpreted: the tokens of a run without drafts. Once
drafts are tiles of queries, once rows of their own, as in graphs."""

from __future__ import annotations

import pytest

from engine.core import Engine
from engine.device_step import DeviceSteps
from engine.drafts import Drafter
from engine.runner import ModelRunner
from engine.types import Grammar, Request, SamplingParams, Sequence, TokenLogprobs
from tests.benchmarks.launch_gaps import LaunchGaps
from tests.called_graphs import with_graphs
from tests.engine_helpers import make_named_adapters, make_small_base, open_small, random_prompt
from tests.fakes import make_config
from tests.grammar_helpers import EOS, VOCAB, grammars
from tests.speculation_helpers import ScriptedDrafter

ADAPTERS = {"all": (8, ("q_proj", "o_proj", "up_proj")), "head": (16, ("v_proj", "lm_head"))}
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, top_p=0.9, max_tokens=9, logprobs=2, ignore_eos=True),
    SamplingParams(
        temperature=0.9, seed=2, repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=9
    ),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, grammar=Grammar("regex", "(ab|cd){6}")),
)
Found = dict[str, tuple[list[int], list[TokenLogprobs]]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("models") / "base"
    base = make_small_base(
        folder,
        vocab_size=VOCAB,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return open_small(base, make_named_adapters(base, ADAPTERS), "triton")


def outputs(
    runner: ModelRunner, drafter: Drafter | None, *, ahead: bool, forced: bool = True
) -> tuple[Found, Engine]:
    config = make_config(
        block_size=16,
        max_num_batched_tokens=32,
        speculation="off" if drafter is None else "suffix",
        async_scheduling=ahead,
        force_grammar_tokens=forced,
    )
    engine = Engine(config, runner, grammars=grammars(), drafter=drafter)
    for i, params in enumerate(PARAMS):
        adapter = (None, "all", "head", "all")[i]
        engine.add_request(Request(f"r{i}", tuple(random_prompt(7 + i, i)), params, adapter))
    found: Found = {f"r{i}": ([], []) for i in range(len(PARAMS))}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            found[output.request_id][0].extend(output.token_ids)
            found[output.request_id][1].extend(output.logprobs)
    assert engine.load().num_free_blocks == runner.num_blocks
    return found, engine


@pytest.fixture(scope="module")
def without_drafts(runner: ModelRunner) -> tuple[Found, int]:
    """The tokens, and the number of steps."""
    found, engine = outputs(runner, None, ahead=True)
    return found, engine.load().num_steps


@pytest.mark.parametrize(("ahead", "in_graphs"), [(False, True), (True, False)])
def test_drafts_change_no_token_of_the_device(
    runner: ModelRunner, without_drafts: tuple[Found, int], ahead: bool, in_graphs: bool
) -> None:
    plain, num_steps = without_drafts
    graphs = with_graphs(runner) if in_graphs else None
    assert isinstance(runner._steps, DeviceSteps)
    gaps = LaunchGaps(runner._steps)

    def truth(sequence: Sequence) -> tuple[int, ...]:
        return tuple(plain[sequence.request.request_id][0])

    drafter = ScriptedDrafter("half", VOCAB, truth)
    # Forced tokens, of which a sequence has several at once, are no rows of a graph.
    found, engine = outputs(runner, drafter, ahead=ahead, forced=not in_graphs)
    load = engine.load()
    assert graphs is None or {key.size for key in graphs.replayed} == {1, 8}
    assert gaps.take() or not in_graphs
    assert 0 < load.num_accepted_tokens < load.num_draft_tokens
    assert load.num_steps < num_steps
    for name, (token_ids, logprobs) in plain.items():
        assert found[name][0] == token_ids
        assert [one.token_id for one in found[name][1]] == [one.token_id for one in logprobs]
        for one, other in zip(found[name][1], logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
