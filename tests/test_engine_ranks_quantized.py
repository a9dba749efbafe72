"""Bases in FP8 and in 4 bits, and adapters in int8, over several ranks: parts and answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from engine.checks.fit import estimate_fit
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import UnsupportedModelError
from engine.int4_forms import Int4Forms, resolve_int4
from engine.model_config import read_model_config
from engine.parallel.shards import Shard
from engine.types import Request, SamplingParams
from engine.weights import WeightBuilder, Weights
from kernels.e4m3 import E4m3Rows
from kernels.int4 import Int4Rows
from lora.errors import AdapterTooLargeError
from tests.engine_agreement import (
    LINEARS,
    OWNERS,
    PARAMS,
    Reply,
    assert_alike,
    make_adapters,
    make_engine,
    probe,
    run_all,
)
from tests.engine_helpers import (
    acquire,
    hf_greedy,
    load_hf,
    make_adapter,
    make_base,
    make_runner,
    random_prompt,
)
from tests.fp8_cases import scheme_product
from tests.int4_bases import STORED, write_int4
from tests.layer_chains import open_quantized
from tests.quantized_bases import CPU
from tests.test_fp8 import Scheme, with_scheme
from tests.test_fp8_stored import BY_ROW, write_stored

_SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
_REQUESTS = [probe(i) for i in range(2 * len(OWNERS))]


def _joined(parts: list[torch.Tensor], name: str, shards: list[Shard]) -> torch.Tensor:
    """Returns the matrix of a module of which each rank has a part; heads of several ranks once."""
    first = shards[0]
    if first.inputs(name) is not None:
        return torch.cat(parts, dim=1)
    outputs = first.outputs(name)
    assert outputs is not None
    assert len(outputs) == 1, "no fused matrix"
    return torch.cat(parts)


def _load(folder: Path, *, is_fp8: bool, size: int = 2) -> tuple[Weights, list[Weights], Int4Forms]:
    """Returns a base whole and in the parts of two ranks, and the forms of these."""
    config = read_model_config(folder)
    forms = []
    for count in (1, size):
        asked = EngineConfig(
            str(folder), "", quantization="auto", tensor_parallel_size=count, dtype="bfloat16"
        )
        forms.append({} if is_fp8 else resolve_int4(asked, config, torch.bfloat16, (9, 0)))
    whole = WeightBuilder(Shard(config), torch.float32, CPU, is_fp8=is_fp8, int4=forms[0]).load(
        folder
    )
    parts = []
    for rank in range(size):
        shard = Shard(config, rank, size)
        part = WeightBuilder(shard, torch.float32, CPU, is_fp8=is_fp8, int4=forms[1]).load(folder)
        if not any(one.has_order for one in forms[1].values()):  # which several modules share
            held = sum(one.nbytes for one in part.parameters.values())
            meta = torch.device("meta")
            shapes = WeightBuilder(shard, torch.float32, meta, is_fp8=is_fp8, int4=forms[1])
            assert held == shapes.weights.nbytes
        parts.append(part)
    return whole, parts, forms[1]


def _check_parts(folder: Path, whole: Weights, parts: list[Weights]) -> Iterator[str]:
    """Checks that the parts are the whole bit for bit. Yields the names of the matrices."""
    config = read_model_config(folder)
    shards = [Shard(config, rank, len(parts)) for rank in range(len(parts))]
    for name, matrix in whole.parameters.items():
        if not name.endswith("_proj.weight"):
            continue
        found = [part.parameters[name].float() for part in parts]
        joined = _joined(found, name.removesuffix(".weight"), shards)
        assert torch.equal(joined, matrix.float()), name
        yield name


@pytest.mark.parametrize("name", BY_ROW)
def test_stored_rows_of_e4m3_are_cut_as_they_are(tmp_path: Path, name: str) -> None:
    folder = write_stored(tmp_path, "mistral 3", name)[1]
    whole, parts, _ = _load(folder, is_fp8=True)
    names = list(_check_parts(folder, whole, parts))
    assert names
    for weights in parts:
        assert all(isinstance(weights.parameters[one], E4m3Rows) for one in names)


@pytest.mark.parametrize("name", STORED)
def test_integers_of_4_bits_are_cut_as_they_are(tmp_path: Path, name: str) -> None:
    folder = write_int4(tmp_path, name)[1]
    whole, parts, forms = _load(folder, is_fp8=False)
    names = list(_check_parts(folder, whole, parts))
    kept = {one for one in names if isinstance(parts[0].parameters[one], Int4Rows)}
    assert {one.rsplit(".", 2)[-2] for one in kept} >= {"q_proj", "v_proj", "up_proj"}
    assert len(forms) == 8 - len({one for one in names if one not in kept})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gptq", "4 because of o_proj: 2 ranks cut its groups of 128 columns"),
        ("gptq, sorted", "of down_proj: the ranks cut its columns, which are sorted"),
    ],
)
def test_matrices_that_ranks_cannot_cut_in_4_bits_are_named(
    tmp_path: Path, name: str, reason: str
) -> None:
    folder = write_int4(tmp_path, name)[1]
    alone, both = (
        estimate_fit(folder, 8 << 30, quantization="int4", num_ranks=size) for size in (1, 2)
    )
    assert "ranks" not in alone.not_in_4_bits
    assert reason.replace("4 because", "2 because") in both.not_in_4_bits
    assert both.weight_bytes < alone.weight_bytes


def test_a_rank_quantises_its_part_of_a_row_with_a_scale_of_its_own(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base", **_SIZES)
    whole, parts, _ = _load(folder, is_fp8=True)
    for name, matrix in whole.parameters.items():
        if not name.endswith("down_proj.weight"):
            continue
        found = [part.parameters[name] for part in parts]
        exact = (
            WeightBuilder(Shard(read_model_config(folder)), torch.float32, CPU)
            .load(folder)
            .parameters[name]
        )
        joined = torch.cat([one.float() for one in found], dim=1)
        assert not torch.equal(joined, matrix.float())
        off, whole_off = ((one.float() - exact.float()).norm() for one in (joined, matrix))
        assert off <= 1.02 * whole_off


def _replies(base: Path, adapters: dict[str, Path], **settings: object) -> dict[str, Reply]:
    runner = open_quantized(base, adapters, "cpu", dtype="float32", num_threads=1, **settings)
    with closing(runner):
        return run_all(make_engine(runner), _REQUESTS)


def test_adapters_in_int8_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **_SIZES)
    adapters = make_adapters(base)
    alone, both = (
        _replies(base, adapters, lora_dtype="int8", tensor_parallel_size=size) for size in (1, 2)
    )
    for one in _REQUESTS:
        assert_alike(both[one.request_id], alone[one.request_id], 1e-4)


class SchemeOfRanks(Scheme):
    """FP8 in place of a linear that two ranks cut by inputs: each has scales of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        halves = zip(flat.chunk(2, dim=1), self.weight.chunk(2, dim=1), strict=True)
        y = sum(scheme_product(*half, None) for half in halves)
        assert isinstance(y, torch.Tensor)
        return y.to(x.dtype).view(*x.shape[:-1], -1)


@torch.inference_mode()
def test_two_ranks_in_fp8_have_the_tokens_of_transformers_with_the_scheme(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **_SIZES)
    adapter = make_adapter(tmp_path / "one", base, 8, LINEARS, seed=1)
    prompts = {None: random_prompt(9, seed=1), "one": random_prompt(17, seed=2)}
    requests = [Request(str(own), tuple(ids), PARAMS, own) for own, ids in prompts.items()]
    runner = make_runner(
        base, quantization="fp8", block_size=16, tensor_parallel_size=2, num_threads=1
    )
    with closing(runner):
        runner.load_adapter("one", adapter)
        acquire(runner, "one")
        replies = run_all(make_engine(runner), requests)
    plain = with_scheme(load_hf(base), SchemeOfRanks)
    peft = PeftModel.from_pretrained(load_hf(base), adapter).eval()
    adapted = with_scheme(peft, SchemeOfRanks)
    for model, owner in ((plain, None), (adapted, "one")):
        wanted = hf_greedy(model, prompts[owner], PARAMS.max_tokens)
        assert list(replies[str(owner)].tokens) == wanted


def test_two_ranks_of_4_bits_have_the_tokens_of_one(tmp_path: Path) -> None:
    folder = write_int4(tmp_path, "packed, asymmetric")[1]
    found = []
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for size in (1, 2):
        runner = make_runner(
            folder, quantization="int4", tensor_parallel_size=size, num_threads=1, block_size=16
        )
        with closing(runner):
            assert len(runner._rank.int4) == 8
            engine: Engine = make_engine(runner)
            requests = [
                Request(str(i), tuple(range(3 + i, 20 + 2 * i)), params, None) for i in range(3)
            ]
            found.append({name: one.tokens for name, one in run_all(engine, requests).items()})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "fp8"}, r"shape \[24, 64\] on each of 2 ranks, .* multiples of 16"),
        ({"lora_dtype": "int8"}, "multiples of 8, .* has one of 36 on each of 2 ranks"),
    ],
)
def test_widths_that_a_rank_cannot_have_are_refused(
    tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    width = 48 if "quantization" in settings else 72
    base = make_base(
        tmp_path / "base", hidden_size=64, intermediate_size=width, num_attention_heads=4
    )
    with pytest.raises(UnsupportedModelError, match=words):
        make_runner(base, tensor_parallel_size=2, **settings)


def test_rows_that_become_two_count_for_every_rank(tmp_path: Path) -> None:
    """The number far above the others of its row is on one rank only."""
    base = make_base(tmp_path / "base", **_SIZES)
    folder = make_adapter(tmp_path / "one", base, 16, ("down_proj",))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, one in tensors.items():
        if "lora_A" in name:
            one[:, 0] = 1000.0
    save_file(tensors, path)
    settings = {"lora_dtype": "int8", "num_threads": 1, "tensor_parallel_size": 2}
    with closing(make_runner(base, **settings, max_lora_rank=32)) as runner:
        runner.load_adapter("one", folder)
        assert runner.adapters.acquire("one")
        found = run_all(make_engine(runner), [Request("a", tuple(range(9)), PARAMS, "one")])["a"]
    with closing(make_runner(base, num_threads=1)) as runner:
        runner.load_adapter("one", folder)
        acquire(runner, "one")
        wanted = run_all(make_engine(runner), [Request("a", tuple(range(9)), PARAMS, "one")])["a"]
    assert_alike(found, wanted, 0.05)
    with (
        closing(make_runner(base, **settings, max_lora_rank=16)) as runner,
        pytest.raises(AdapterTooLargeError, match="numbers far above"),
    ):
        runner.read_adapter("one", folder)
