"""An engine on a GPU that is ready compiles no kernel and reads none, whatever traffic comes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.types import SamplingParams
from kernels.backend import HAS_TRITON
from tests.engine_agreement import OWNERS, make_adapters, make_engine, neighbours, run_all
from tests.engine_helpers import make_base, make_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and HAS_TRITON), reason="needs a GPU and triton"
    ),
]
KINDS: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": ((5, 1.0),)},
    {"min_tokens": 3, "stop_token_ids": (7,), "ignore_eos": False},
    {"prompt_logprobs": 1},
)


@pytest.mark.parametrize("eager", [False, True])
def test_traffic_compiles_nothing(tmp_path: Path, eager: bool) -> None:
    base = make_base(tmp_path / "base", num_hidden_layers=2, head_dim=64)
    runner = make_runner(
        base,
        "cuda",
        backend="triton",
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_blocks=512,
        enforce_eager=eager,
        kernel_cache_dir=str(tmp_path / "kernels"),
    )
    assert runner.adapters.residents() == ()
    assert runner.adapters.num_free_blocks == runner.adapters.num_blocks
    before = runner.num_late_compilations
    buffer = runner.make_read_buffer()
    for name, path in make_adapters(base).items():
        runner.read_adapter(name, path, buffer)  # the second time by the plan of the first
        runner.adapters.insert(runner.read_adapter(name, path, buffer))
    assert runner._packer._plans
    draw = random.Random(3)
    for round_ in range(6):
        requests = [
            replace(
                request,
                request_id=f"{round_}-{request.request_id}",
                params=SamplingParams(
                    **({"max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | KINDS[i % 6])  # type: ignore[arg-type]
                ),
            )
            for i, request in enumerate(neighbours(2 + 5 * round_, round_, owners=OWNERS))
        ]
        draw.shuffle(requests)
        engine = make_engine(runner, max_num_seqs=16, max_num_batched_tokens=256)
        replies = run_all(engine, requests)
        assert not [reply.error for reply in replies.values() if reply.error]
    assert runner.num_late_compilations == before
