"""Kernels on contiguous blocks, where layers have views of one tensor and entries of block tables
are not block numbers: the device's steps against the reference backend on plain blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.types import Request, SamplingParams
from tests.engine_agreement import Reply, make_engine, run_all
from tests.engine_helpers import (
    make_adapter,
    make_base,
    make_mixed_graphs,
    make_runner,
    random_prompt,
)
from tests.kv_host_helpers import always_copies, layered_copies

PARAMS = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, ignore_eos=True)


# numpy's, of what a capture computes: no step has filled its inputs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def replies(
    base: Path, adapter: Path, backend: str, host: int, *, has_graphs: bool = False
) -> dict[str, Reply]:
    """Returns the replies to prompts in chunks beside decodes, then to the same from the cache:
    the device has room for one of them at a time. A part of a block that a step reads before it
    waits for the part is not a number."""
    runner = make_runner(
        base, backend=backend, block_size=16, max_num_seqs=2, num_blocks=4, kv_host_bytes=host
    )
    runner.load_adapter("x", adapter)
    copier = layered_copies(runner) if host else None
    if has_graphs:
        make_mixed_graphs(runner, 8)
    engine = make_engine(runner, max_num_batched_tokens=32, max_num_seqs=2)
    if host:
        always_copies(engine)
    found: dict[str, Reply] = {}
    for turn in range(2):
        for i, owner in enumerate((None, "x")):
            prompt = tuple(random_prompt(36, seed=i))
            found |= run_all(engine, [Request(f"{turn} {i}", prompt, PARAMS, owner)])
    if copier is not None:
        assert engine.load().kv_host.hit_tokens
        assert copier.num_in_parts
    return found


@pytest.mark.parametrize("has_graphs", [False, True])
def test_steps_on_blocks_that_came_back_from_the_host(tmp_path: Path, has_graphs: bool) -> None:
    base = make_base(tmp_path / "base", num_hidden_layers=2)
    adapter = make_adapter(tmp_path / "x", base, 4, ("q_proj", "k_proj", "v_proj"))
    expected = replies(base, adapter, "reference", 0)
    found = replies(base, adapter, "triton", 1 << 20, has_graphs=has_graphs)
    for name, reply in expected.items():
        assert reply.error is None
        assert found[name].tokens == reply.tokens
        pairs = zip(found[name].logprobs, reply.logprobs, strict=True)
        assert all(abs(one.logprob - other.logprob) < 1e-3 for one, other in pairs)
