"""The device's steps of a model with windows, planned ahead, against the reference backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.types import Request, SamplingParams
from tests.engine_agreement import Reply, make_engine, run_all
from tests.engine_helpers import make_mixed_graphs, make_runner, random_prompt
from tests.family_bases import VARIANTS, make_family_base

PARAMS = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, ignore_eos=True)


def replies(base: Path, backend: str, sizes: tuple[int, ...] = ()) -> dict[str, Reply]:
    """Returns the replies to prompts of several windows and blocks, in chunks beside decodes.
    `sizes`: of graphs of such steps."""
    runner = make_runner(
        base, backend=backend, block_size=16, max_num_seqs=2, num_blocks=9, adapter_pool_bytes=0
    )
    if sizes:
        make_mixed_graphs(runner, *sizes)
    layout = runner.kv_layout
    assert len(layout.groups) == 2
    engine = make_engine(runner, max_num_batched_tokens=20, max_num_seqs=2)
    requests = [
        Request(f"r{i}", tuple(random_prompt(length, seed=i)), PARAMS)
        for i, length in enumerate((50, 35))
    ]
    found = run_all(engine, requests)
    assert engine.load().num_free_blocks == 9
    for tensors in (runner._kv.k, runner._kv.v):
        for table, tensor in zip(runner._kv.table_of, tensors, strict=True):
            assert not tensor[layout.entry(table, 9) :].any(), "the null block is written"
    return found


# numpy's, of what a capture computes: no step has filled its inputs.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps_planned_ahead_read_no_block_that_a_window_has_passed(tmp_path: Path) -> None:
    two_layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    variant = VARIANTS["gemma 3"]
    base = make_family_base(
        tmp_path / "base", replace(variant, changes=variant.changes | two_layers)
    )
    expected = replies(base, "reference")
    for found in (replies(base, "triton"), replies(base, "triton", (8, 24))):
        for name, reply in expected.items():
            assert reply.error is None
            assert found[name].tokens == reply.tokens
            pairs = zip(found[name].logprobs, reply.logprobs, strict=True)
            assert all(abs(one.logprob - other.logprob) < 1e-3 for one, other in pairs)
