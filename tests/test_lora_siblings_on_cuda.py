"""Kernels of small and of large tiles beside each other in CUDA graphs, against kernels in turn."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from kernels.triton_launch import OVERLAPS
from tests.benchmarks.lora_prefill import make_plan
from tests.benchmarks.lora_sites import Layer, Rows, lora_layer, make_layer, make_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIBLINGS = ("lora_shrink", "lora_expand", "lora_silu_mul", "lora_rope_kv_write")


def capture(layers: list[Layer], rows: Rows) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Returns a graph of the layers in a chain, and its output [tokens, hidden]."""

    def chain() -> torch.Tensor:
        hidden = rows.hidden
        for layer in layers:
            step = replace(rows, hidden=hidden, residual=rows.residual.clone())
            hidden = lora_layer(layer, step)
        return hidden

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    return graph, out


@pytest.mark.parametrize(
    "case", ["256x32+768x3", "40x9+300x2", "500x1+12x12", "1024x4", "96x96", "8x1"]
)
def test_siblings_have_the_bits_of_kernels_in_turn(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every replay has another input, and layers take each other's memory: a kernel that read too
    early would find other numbers there."""
    plan, num_pages = make_plan(case, graph=True)
    rows = make_rows(plan.num_tokens, plan)
    layers = [make_layer(plan.num_tokens, num_pages) for _ in range(3)]
    beside, found = capture(layers, rows)
    for name in SIBLINGS:
        monkeypatch.setattr(
            importlib.import_module(f"kernels.triton_{name}"), "BESIDE_SIBLING", int(OVERLAPS)
        )
    in_turn, expected = capture(layers, rows)
    caches = [cache for layer in layers for cache in (layer.k_cache, layer.v_cache)]
    for _ in range(40):
        rows.hidden.normal_()
        in_turn.replay()
        written = [cache.clone() for cache in caches]
        for cache in caches:
            cache.fill_(float("nan"))
        for _ in range(3):
            beside.replay()
            assert torch.equal(found, expected)
        at = rows.slots.long()
        for cache, other in zip(caches, written, strict=True):
            assert torch.equal(cache.flatten(0, 1)[at], other.flatten(0, 1)[at])
        assert expected.isfinite().all()
