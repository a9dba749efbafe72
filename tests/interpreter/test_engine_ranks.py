"""The device's steps over two ranks, kernels interpreted and exchanges over gloo: the tokens of one
rank, whatever a step has. Graphs of decodes are called instead of replayed, on both ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core import Engine
from engine.inputs import LoraReach
from engine.types import Grammar, Request, SamplingParams
from tests.called_graphs import use_few_programs, with_graphs
from tests.engine_helpers import make_named_adapters, make_runner, make_small_base, random_prompt
from tests.fakes import make_config
from tests.grammar_helpers import EOS, VOCAB, grammars
from tests.rank_processes import follower_main

_ADAPTERS = {
    "all": (3, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "head": (5, ("q_proj", "down_proj", "lm_head", "embed_tokens")),
}
_PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, logit_bias=((7, 3.0),), max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=2, repetition_penalty=1.4, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=3, grammar=Grammar("regex", "(ab|cd){6}")),
)
# The other rank, with the faster interpreter of these tests and its graphs called, too.
_MAIN = follower_main(
    "import tests.interpreter.conftest; "
    "from tests.called_graphs import call_graphs_everywhere, use_few_programs; "
    "call_graphs_everywhere(); use_few_programs(setattr)"
)
Tokens = dict[str, tuple[int, ...]]


def _run(engine: Engine) -> tuple[Tokens, list[float]]:
    """Returns the tokens, and all log-probabilities."""
    shared = random_prompt(18, seed=99)
    for i, params in enumerate(_PARAMS):
        adapter = (None, "all", "head", "all")[i]
        prompt = (*shared, *random_prompt(13, seed=i))
        engine.add_request(Request(f"r{i}", prompt, params, adapter))
    tokens: Tokens = {}
    logprobs: list[float] = []
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            name = output.request_id
            tokens[name] = tokens.get(name, ()) + output.token_ids
            for one in (*output.prompt_logprobs, *output.logprobs):
                logprobs += [] if one is None else [one.logprob]
    return tokens, logprobs


def test_two_ranks_of_a_device_draw_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.parallel.group._MAIN", _MAIN)
    use_few_programs(monkeypatch.setattr)
    base = make_small_base(
        tmp_path / "base",
        vocab_size=VOCAB,
        eos_token_id=EOS,
        pad_token_id=EOS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folders = make_named_adapters(base, _ADAPTERS)
    found = []
    for size in (1, 2):
        runner = make_runner(
            base,
            backend="triton",
            block_size=16,
            num_blocks=6,  # fewer than three sequences need
            max_num_seqs=8,
            tensor_parallel_size=size,
            num_threads=1,
        )
        graphs = with_graphs(runner)
        for name, path in folders.items():
            runner.load_adapter(name, path)
        config = make_config(block_size=16, max_num_batched_tokens=40, max_num_seqs=3)
        engine = Engine(config, runner, grammars=grammars())
        found.append(_run(engine))
        load = engine.load()
        assert load.prefix_hits
        assert load.num_preemptions
        assert {key.lora for key in graphs.replayed} >= {LoraReach.ALL}
        engine.close()
    assert found[1][0] == found[0][0]
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-4)
