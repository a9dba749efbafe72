"""Affine rows in the multi-LoRA kernels on a GPU, and an engine with DoRA and bias adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from engine.decode_graphs import GraphKey
from engine.device_step import DeviceSteps
from engine.inputs import LoraReach
from engine.runner import ModelRunner
from engine.types import SamplingParams
from kernels.linear import linear_shrink
from tests.engine_helpers import (
    acquire,
    make_adapter,
    make_base,
    make_runner,
    make_sequence,
    part,
    random_prompt,
    step,
)
from tests.few_rows_cases import HEADS, assert_agrees, draw_weight, norms, products, turns
from tests.lora_affine_cases import RUNS, expand, make_affine_case, without_affine
from tests.lora_fused_cases import assert_turns_agree, rope_both_ways, silu_both_ways
from tests.lora_kernel_cases import LoraCase, error_of
from tests.peft_kinds import LINEARS, check_against_peft, save_peft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FEW = ("few rows", "one row")
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=9, logprobs=3)
DTYPES = [torch.bfloat16, torch.float16]


def build(
    runs: str, sizes: tuple[int, ...], dtype: torch.dtype, in_features: int = 1024
) -> LoraCase:
    most = 8 if runs in FEW else None
    return make_affine_case(
        runs, in_features=in_features, sizes=sizes, dtype=dtype, device="cuda", max_tokens=most
    )


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("sizes", [(512, 128, 128), (200,), (4096,), (1536, 1536)])
def test_sum_is_that_of_float64(runs: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    case = build(runs, sizes, dtype)
    for plan in (case.plan(), case.plan(large=False), case.plan(graph_rows=len(case.y))):
        y = expand(case, plan)
        assert error_of(case, y) < {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 1e-2)
        untouched = case.untouched()
        assert torch.equal(y[untouched], case.y[untouched])


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(512, 128, 128), (4096,), (1536, 1536)])
def test_rows_without_affine_rows_keep_their_bits_beside_them(
    runs: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """Kernels with affine rows are other binaries: also rows with plain LoRA have the same bits."""
    case = build(runs, sizes, dtype)
    plain = torch.zeros(len(case.y), dtype=torch.bool, device="cuda")
    row = 0
    for adapter, rows in case.runs:
        plain[row : row + rows] = adapter in (None, 0)
        row += rows
    for plan in (case.plan(), case.plan(large=False)):
        assert torch.equal(expand(case, plan)[plain], expand(without_affine(case), plan)[plain])


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 14336])
def test_silu_mul_is_that_of_the_sums(runs: str, dtype: torch.dtype, width: int) -> None:
    fused, apart = silu_both_ways(build(runs, (width, width), dtype))
    torch.testing.assert_close(fused, apart, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("runs", [name for name in RUNS if name not in FEW])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_is_that_of_the_sums(runs: str, dtype: torch.dtype, has_norm: bool) -> None:
    case = build(runs, (32 * 128, 8 * 128, 8 * 128), dtype)
    for turned in rope_both_ways(case, 32, 8, 128, has_norm=has_norm):
        if has_norm:
            torch.testing.assert_close(turned[0], turned[1], rtol=3e-2, atol=3e-2)
        else:
            assert_turns_agree(turned)


@pytest.mark.parametrize("runs", FEW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_of_few_rows_are_those_of_the_sums(runs: str, dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = HEADS
    kv_size = kv_heads * head_dim
    one, two = build(runs, (4096,), dtype), build(runs, (1536, 1536), dtype)
    three = build(runs, (heads * head_dim, kv_size, kv_size), dtype)
    outcomes = [
        *((outcome, one) for outcome in norms(one, one.plan(large=False))),
        (products(two, two.plan(large=False)), two),
        *((outcome, three) for outcome in turns(three, three.plan(large=False))),
    ]
    for outcome, case in outcomes:
        assert_agrees(outcome, case.base_rows(), 3e-2)
    weight = draw_weight(one)
    y, bridge = linear_shrink(one.x, weight, None, one.site, one.plan(large=False))
    again, same = linear_shrink(
        one.x, weight, None, without_affine(one).site, one.plan(large=False)
    )
    assert torch.equal(y, again)
    live = ~one.base_rows()
    found, wanted = (planes.planes.sum(0)[0, 0, live, :5] for planes in (bridge, same))
    assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    base, linears = make_base(root / "base", "qwen2"), list(LINEARS)
    dora = LoraConfig(r=20, lora_alpha=9, target_modules=linears, use_dora=True)
    biases = LoraConfig(r=3, target_modules=["v_proj", "up_proj"], bias="all", lora_bias=True)
    return {
        "base": base,
        "dora": save_peft(root / "dora", base, dora, seed=1),
        "biases": save_peft(root / "biases", base, biases, seed=2),
        "lora": make_adapter(root / "lora", base, 8, linears, seed=3),
    }


@pytest.fixture
def runner(folders: dict[str, Path]) -> Iterator[ModelRunner]:
    runner = make_runner(folders["base"], "cuda", dtype="bfloat16", max_num_seqs=8)
    for name in ("dora", "biases", "lora"):
        runner.load_adapter(name, folders[name])
        acquire(runner, name)
    yield runner
    for name in ("dora", "biases", "lora"):
        runner.adapters.release(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["dora", "biases"])
def test_tokens_and_logits_are_pefts_in_float32(kind: str, folders: dict[str, Path]) -> None:
    runner = make_runner(folders["base"], "cuda")
    check_against_peft(runner, folders["base"], folders[kind], folders["lora"])


def test_decodes_with_them_have_graphs_and_change_no_bit_beside_them(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(runner._steps, DeviceSteps)
    graphs, replayed = runner._steps._graphs, list[GraphKey]()
    replay = graphs.replay

    def noted(key: GraphKey) -> torch.Tensor:
        replayed.append(key)
        return replay(key)

    monkeypatch.setattr(graphs, "replay", noted)

    def decoded(*owners: str | None) -> list[object]:
        sequences = [
            make_sequence(random_prompt(4, seed=i), 24 * i, LOGPROBS, owner, num_blocks=4)
            for i, owner in enumerate(owners)
        ]
        for sequence in sequences:
            step(runner, part(sequence))
        replayed.clear()
        return list(step(runner, *(part(sequence) for sequence in sequences)))

    plain = decoded(None, None, "lora", None)
    assert replayed == [GraphKey(4, LoraReach.ALL)]
    beside = decoded(None, "dora", "lora", "biases")
    assert replayed == [GraphKey(4, LoraReach.AFFINE)]
    assert plain[0] == beside[0]
    assert plain[2] == beside[2]
    assert plain[1] != beside[1]
    assert plain[3] != beside[3]
