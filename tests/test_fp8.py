"""FP8 linears on the reference backend: the scheme against float64, weights, engines, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.model_config import read_model_config
from engine.parallel.shards import Shard
from engine.resolved import resolve_fp8
from engine.types import Request
from engine.weights import WeightBuilder, Weights
from kernels.e4m3 import E4m3Rows, quantize_rows
from kernels.linear import linear
from lora.dora import dora_gains
from tests.engine_agreement import PARAMS, make_engine, run_all
from tests.engine_helpers import (
    acquire,
    hf_greedy,
    load_hf,
    make_adapter,
    make_base,
    make_runner,
    random_prompt,
)
from tests.family_bases import (
    VARIANTS,
    Decoder,
    load_family,
    make_family_adapter,
    make_family_base,
)
from tests.fp8_cases import quantised, relative, rounded, scheme, scheme_product

CPU = torch.device("cpu")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load(folder: Path, dtype: torch.dtype = torch.float32, *, is_fp8: bool = True) -> Weights:
    return WeightBuilder(Shard(read_model_config(folder)), dtype, CPU, is_fp8=is_fp8).load(folder)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fp8(matrix: torch.Tensor | E4m3Rows) -> E4m3Rows:
    assert isinstance(matrix, E4m3Rows)
    return matrix


# -- the scheme ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_a_row_becomes_the_nearest_values_of_e4m3(dtype: torch.dtype, size: float) -> None:
    x = (drawn(40, 300) * drawn(40, 300, seed=1).exp() * size).to(dtype)
    rows = quantize_rows(x)
    values, scales = scheme(x)
    assert torch.equal(rows.values.double(), values)
    assert torch.equal(rows.scales.double(), scales)
    assert (rows.values.double().abs().amax(1) == 448).all()


def test_ties_go_to_the_even_neighbour() -> None:
    ties = torch.tensor([[448.0, 17.0, -17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 0.0]])
    found = quantize_rows(ties).values.double()
    assert found.tolist() == [[448.0, 16.0, -16.0, 20.0, 0.0, 2.0**-8, 0.0]]
    assert torch.equal(found, rounded(ties))


def test_rows_of_zeros_stay_zeros_and_a_row_with_nan_or_infinity_gives_nan() -> None:
    x = drawn(4, 32)
    x[0] = 0
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    y = linear(x, quantised(drawn(8, 32, seed=1)), None)
    assert not y[0].any()
    assert y[1:3].isnan().all()
    assert y[3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_scheme_in_float64(dtype: torch.dtype) -> None:
    x, weight = drawn(20, 512, dtype=dtype), drawn(96, 512, seed=1, dtype=dtype)
    bias = drawn(96, seed=2, dtype=dtype)
    for own in (None, bias):
        y = linear(x, quantised(weight), own)
        assert y.dtype == dtype
        assert relative(y, scheme_product(x, weight, own)) < {4: 1e-6, 2: 3e-3}[dtype.itemsize]
        exact = x.double() @ weight.double().T + (0 if own is None else own.double())
        assert 0.01 < relative(y, exact) < 0.05


# -- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_matrix_of_the_layers_is_quantised_as_it_is_read(tmp_path: Path, family: str) -> None:
    base = make_base(tmp_path / "base", family)
    weights, plain = load(base, torch.bfloat16), load(base, torch.bfloat16, is_fp8=False)
    tensors = load_file(base / "model.safetensors")
    assert weights.parameters.keys() == plain.parameters.keys()
    for name, parameter in weights.parameters.items():
        if name.endswith("_proj.weight"):
            values, scales = scheme(tensors[name])
            assert torch.equal(fp8(parameter).values.double(), values)
            assert torch.equal(fp8(parameter).scales.double(), scales)
        else:
            assert torch.equal(parameter, plain.parameters[name])  # type: ignore[arg-type]
    layer, before = weights.layers[1], plain.layers[1]
    own = fp8(weights.parameters["model.layers.1.self_attn.k_proj.weight"])
    assert own.values.data_ptr() == fp8(layer.qkv)[96:].values.data_ptr()  # a view, no copy
    assert fp8(layer.gate_up).shape == before.gate_up.shape
    assert fp8(layer.down).nbytes == before.down.nbytes // 2 + 4 * 48


def test_random_weights_are_those_of_the_other_type_quantised(tmp_path: Path) -> None:
    config = read_model_config(make_base(tmp_path / "base"))
    plain = WeightBuilder(Shard(config), torch.bfloat16, CPU).fill_randomly()
    weights = WeightBuilder(Shard(config), torch.bfloat16, CPU, is_fp8=True).fill_randomly()
    for before, after in zip(plain.layers, weights.layers, strict=True):
        assert torch.equal(fp8(after.qkv).values.double(), scheme(before.qkv)[0])  # type: ignore[arg-type]
        assert torch.equal(fp8(after.down).values.double(), scheme(before.down)[0])  # type: ignore[arg-type]
    assert torch.equal(plain.head, weights.head)


def test_gains_of_dora_are_those_of_the_weight_that_is_served() -> None:
    weight, a, b = drawn(48, 64), drawn(4, 64, seed=1), drawn(48, 4, seed=2)
    rows, magnitude = quantised(weight), weight.norm(dim=1)
    found, wanted = (dora_gains(one, a, b, 0.5, magnitude) for one in (rows, rows.float()))
    assert torch.equal(found[0], wanted[0])
    # A change that takes the row away: the rest is summed row by row.
    nothing, _ = dora_gains(rows, rows.float()[:4], -torch.eye(48)[:, :4], 1.0, magnitude)
    assert nothing[:4].isinf().all()


# -- engines ------------------------------------------------------------------------------------


class Scheme(torch.nn.Module):
    """The scheme in place of a linear of transformers."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        y = scheme_product(flat, self.weight, self.bias)
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def with_scheme(
    model: torch.nn.Module, by_inputs: Callable[[torch.nn.Linear], Scheme] = Scheme
) -> torch.nn.Module:
    """Puts the scheme in place of each linear of the layers, below adapters. `by_inputs`: that of
    the linears that ranks cut by inputs."""
    for name, module in list(model.named_modules()):
        path = name.removesuffix(".base_layer")
        if isinstance(module, torch.nn.Linear) and path.endswith("_proj"):
            is_cut = path.endswith(("o_proj", "down_proj"))
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, (by_inputs if is_cut else Scheme)(module))
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.inference_mode()
def test_answers_are_those_of_transformers_with_the_scheme(tmp_path: Path, family: str) -> None:
    """The adapter's delta is that of PEFT: of the activations before they are quantised."""
    base = make_base(tmp_path / "base", family)
    adapter = make_adapter(tmp_path / "one", base, 8, LINEARS, seed=1)
    runner = make_runner(base, quantization="fp8", block_size=16)
    runner.load_adapter("one", adapter)
    acquire(runner, "one")
    prompts = {None: random_prompt(9, seed=1), "one": random_prompt(17, seed=2)}
    engine = make_engine(runner)
    requests = [Request(str(own), tuple(ids), PARAMS, own) for own, ids in prompts.items()]
    replies = run_all(engine, requests)
    plain = with_scheme(load_hf(base))
    adapted = with_scheme(PeftModel.from_pretrained(load_hf(base), adapter).eval())
    for model, owner in ((plain, None), (adapted, "one")):
        wanted = hf_greedy(model, prompts[owner], PARAMS.max_tokens)
        assert list(replies[str(owner)].tokens) == wanted


@pytest.mark.parametrize("name", ["gemma 2", "olmo 2", "phi 3", "granite"])
@torch.inference_mode()
def test_a_family_s_logits_are_those_of_transformers_with_the_scheme(
    tmp_path: Path, name: str
) -> None:
    """Norms after the products, fused projections, biases, soft caps and multipliers. Usually all
    logits agree to 2e-6; an activation on the border of two values may become the other one."""
    variant = VARIANTS[name]
    base = make_family_base(tmp_path / "base", variant)
    adapter = make_family_adapter(tmp_path / "one", base, variant.linears)
    ids = random_prompt(30, seed=3)
    prompts = [(ids, None), (ids, "one")]
    found = Decoder(base, [adapter], is_fp8=True).logits(prompts)
    plain = Decoder(base, [adapter]).logits(prompts)
    model = load_family(base)
    adapted = with_scheme(PeftModel.from_pretrained(load_family(base), adapter).eval())
    for own, unquantised, oracle in zip(found, plain, (with_scheme(model), adapted), strict=True):
        wanted = oracle(torch.tensor([ids]), use_cache=False).logits[0]
        assert relative(own, wanted) < relative(unquantised, wanted) / 10
        assert float((own - wanted).abs().amax(1).median()) < 1e-4


# -- refusals -----------------------------------------------------------------------------------


def test_what_fp8_cannot_serve_is_refused(tmp_path: Path) -> None:
    model = read_model_config(make_base(tmp_path / "base"))
    config = EngineConfig("", "", quantization="fp8", dtype="float16")
    assert resolve_fp8(config, model, torch.bfloat16, (9, 0))
    assert resolve_fp8(config, model, torch.float32, None)
    assert not resolve_fp8(replace(config, quantization="none"), model, torch.float16, (8, 0))
    with pytest.raises(UnsupportedModelError, match=r"compute capability 8\.9 .* has 8\.6"):
        resolve_fp8(config, model, torch.bfloat16, (8, 6))
    with pytest.raises(UnsupportedModelError, match="dtype bfloat16, which is float16"):
        resolve_fp8(config, model, torch.float16, (9, 0))
    narrow = replace(model, intermediate_size=72)
    with pytest.raises(UnsupportedModelError, match=r"gate_proj.weight has shape \[72, 48\]"):
        resolve_fp8(config, narrow, torch.bfloat16, None)


def test_a_runner_refuses_before_it_reads_weights(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", intermediate_size=72)
    (base / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="quantization is fp8"):
        make_runner(base, quantization="fp8")
