"""Bases that are stored in e4m3 and served in FP8: rows are taken as they are where each has one
scale, and quantised again where it has several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from engine.model_config import read_model_config
from engine.parallel.shards import Shard
from engine.types import Request
from engine.weight_files import SINGLE_FILE
from engine.weights import WeightBuilder, Weights
from kernels.e4m3 import E4M3, E4m3Rows
from lora.module_names import canonical, is_of_other_part
from tests.engine_agreement import PARAMS, make_engine, run_all
from tests.engine_helpers import hf_greedy, make_runner, random_prompt
from tests.family_bases import VARIANTS, load_family, make_family_adapter, make_family_base
from tests.fp8_cases import scheme
from tests.quantized_bases import Tensors, read_all, write_plain, write_quantized
from tests.test_engine_compressed_tensors import SCHEMES, compress, config_of

CPU = torch.device("cpu")
BY_ROW = ("fp8 per channel", "fp8 per tensor")
OTHERS = ("fp8 in blocks", "fp8 in groups", "int8 per channel", "int4 in groups, asymmetric")
FAMILIES = ("olmo 2", "phi 3", "mistral 3")  # single matrices, fused ones, beside one for images


def write_stored(folder: Path, family: str, name: str) -> tuple[Path, Path]:
    """Returns a base and its linears in a scheme of compressed-tensors."""
    layout, args = SCHEMES[name]
    base = make_family_base(folder / "base", VARIANTS[family])
    stored, weights = write_quantized(
        base,
        folder / "stored",
        config_of(layout, args),
        lambda module, weight: compress(layout, args, weight) if weight.ndim == 2 else None,
    )
    assert weights
    return base, stored


def load(folder: Path) -> Weights:
    return WeightBuilder(Shard(read_model_config(folder)), torch.bfloat16, CPU, is_fp8=True).load(
        folder
    )


def matrices(weights: Weights) -> dict[str, E4m3Rows]:
    return {
        name: matrix for name, matrix in weights.parameters.items() if isinstance(matrix, E4m3Rows)
    }


def parts(folder: Path) -> Tensors:
    """Returns the tensors that a text reaches, by their names in a model of text."""
    tensors = load_file(folder / SINGLE_FILE).items()
    return {canonical(name): one for name, one in tensors if not is_of_other_part(name)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BY_ROW)
def test_rows_with_one_scale_are_served_bit_for_bit(tmp_path: Path, family: str, name: str) -> None:
    _, folder = write_stored(tmp_path, family, name)
    weights, stored = load(folder), parts(folder)
    found = matrices(weights)
    assert len(found) == 3 * (4 if family == "phi 3" else 7)
    for module, matrix in found.items():
        values, scale = stored[module], stored[f"{module}_scale"].float()
        assert values.dtype == E4M3
        assert torch.equal(matrix.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(matrix.scales, scale.reshape(-1).expand(len(values)))
    if family != "phi 3":  # each part of a fused matrix has its own scale
        layer, module = weights.layers[2], "model.layers.2.self_attn"
        assert isinstance(layer.qkv, E4m3Rows)
        scales = [found[f"{module}.{one}_proj.weight"].scales for one in "qkv"]
        assert torch.equal(layer.qkv.scales, torch.cat(scales))
        assert len({float(one[0]) for one in scales}) == 3


@pytest.mark.parametrize("name", OTHERS)
def test_rows_with_several_scales_are_dequantised_and_quantised_by_row(
    tmp_path: Path, name: str
) -> None:
    _, folder = write_stored(tmp_path, "olmo 2", name)
    found, wide = matrices(load(folder)), read_all(folder)
    assert len(found) == 21
    for module, matrix in found.items():
        values, scales = scheme(wide[module])
        assert torch.equal(matrix.values.double(), values)
        assert torch.equal(matrix.scales.double(), scales)


class Product(torch.nn.Module):
    """The product of x, in e4m3 token by token, and stored rows, in place of a linear."""

    def __init__(self, inner: torch.nn.Linear, values: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias  # for DoRA
        self.values, self.scale = values.double(), scale.double().reshape(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = scheme(x.flatten(0, -2))
        y = (values @ self.values.T) * scales[:, None] * self.scale
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def with_products(model: torch.nn.Module, stored: Tensors) -> torch.nn.Module:
    """Puts stored rows in place of each linear of the layers, below adapters."""
    wanted = sum(name.endswith("_scale") for name in stored)
    for path, module in list(model.named_modules()):
        name = canonical(path.removeprefix("base_model.model.").removesuffix(".base_layer"))
        if isinstance(module, torch.nn.Linear) and f"{name}.weight_scale" in stored:
            rows = Product(module, stored[f"{name}.weight"], stored[f"{name}.weight_scale"])
            parent, _, own = path.rpartition(".")
            setattr(model.get_submodule(parent), own, rows)
            wanted -= 1
    assert wanted == 0
    return model


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize(("family", "is_dora"), [("olmo 2", True), ("phi 3", False)])
@torch.inference_mode()
def test_answers_are_those_of_transformers_with_the_stored_rows(
    tmp_path: Path, name: str, family: str, is_dora: bool
) -> None:
    """The gains of DoRA are those of the stored weight."""
    base, folder = write_stored(tmp_path, family, name)
    stored = parts(folder)
    wide = {
        module: stored[module].float() * stored[f"{module}_scale"].float().view(-1, 1)
        for module in stored
        if f"{module}_scale" in stored
    }
    plain = write_plain(base, tmp_path / "plain", wide)
    linears = VARIANTS[family].linears
    adapter = make_family_adapter(tmp_path / "one", plain, linears, use_dora=is_dora)
    runner = make_runner(folder, quantization="fp8", block_size=16)
    runner.load_adapter("one", adapter)
    prompts = {None: random_prompt(9, seed=1), "one": random_prompt(17, seed=2)}
    engine = make_engine(runner)
    requests = [Request(str(own), tuple(ids), PARAMS, own) for own, ids in prompts.items()]
    replies = run_all(engine, requests)
    oracles = {
        None: with_products(load_family(plain), stored),
        "one": with_products(PeftModel.from_pretrained(load_family(plain), adapter).eval(), stored),
    }
    for owner, model in oracles.items():
        wanted = hf_greedy(model, prompts[owner], PARAMS.max_tokens)
        assert list(replies[str(owner)].tokens) == wanted
