"""Adapters whose rank rows are in int8: rounding, outliers, memory, answers and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checks.fit import estimate_fit
from engine.errors import UnsupportedModelError
from lora.adapter import Adapter, ModuleWeights
from lora.errors import AdapterError, AdapterTooLargeError
from lora.int8 import quantized
from lora.page_image import PageLayout
from lora.sites import Site, Slice
from serve_app.cli.demo.prepare import ADAPTER_NAMES, ADAPTERS_DIR
from tests.engine_agreement import OWNERS, assert_alike, make_adapters, make_engine, probe, run_all
from tests.engine_helpers import make_base, make_runner
from tests.layer_chains import open_quantized


def adapter_of(**modules: ModuleWeights) -> Adapter:
    rank = max(one.rank for one in modules.values())
    return Adapter("digest", rank, modules, 0, is_noop=False)


def normal(rank: int = 16, in_features: int = 512, out_features: int = 256) -> ModuleWeights:
    draw = torch.Generator().manual_seed(7)
    a = torch.randn(rank, in_features, generator=draw)
    return ModuleWeights(a, torch.randn(out_features, rank, generator=draw).T, 0.25)


def delta_of(module: ModuleWeights) -> torch.Tensor:
    scales = module.rank_scales
    h = module.a if scales is None else module.a * scales[:, None]
    return h.double().T @ module.b.double()


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_a_row_is_rounded_to_a_127th_of_its_largest_number() -> None:
    module = normal()
    rows = quantized(adapter_of(q=module)).modules["q"]
    assert rows.lora_a.dtype == rows.lora_b.dtype == torch.int8
    assert int(rows.lora_a.abs().amax()) == int(rows.lora_b.abs().amax()) == 127
    step_a, step_b = module.lora_a.abs().amax(1) / 127, module.lora_b.abs().amax(1) / 127
    assert rows.rank_scales is not None
    assert torch.equal(rows.rank_scales, step_a * step_b * 0.25)
    off = (rows.lora_a.float() * step_a[:, None] - module.lora_a).abs() / step_a[:, None]
    assert float(off.max()) <= 0.5001
    assert error_of(delta_of(rows), delta_of(module)) < 0.012


@pytest.mark.parametrize(
    ("in_a", "in_b", "ranks"), [((), (), 16), ((3,), (), 17), ((3, 5), (7,), 19), ((3,), (3,), 19)]
)
def test_a_row_with_numbers_far_above_the_others_keeps_them_all(
    in_a: tuple[int, ...], in_b: tuple[int, ...], ranks: int
) -> None:
    module = normal()
    for row in in_a:
        module.lora_a[row, 11] = 1000.0
    for row in in_b:
        module.lora_b[row, 13] = -1000.0
    adapter = quantized(adapter_of(q=module))
    rows = adapter.modules["q"]
    assert rows.rank_scales is not None
    assert adapter.rank == rows.rank == len(rows.rank_scales) == ranks
    assert quantized(adapter) is adapter
    others = torch.ones(512, 256, dtype=torch.bool)
    others[11], others[:, 13] = False, False
    found, wanted = delta_of(rows), delta_of(module)
    assert error_of(found[others], wanted[others]) < 0.012
    assert error_of(found, wanted) < 0.012


def test_a_row_of_zeros_stays_zero() -> None:
    module = normal()
    module.lora_a[2] = 0
    module.lora_b[5] = 0
    rows = quantized(adapter_of(q=module)).modules["q"]
    assert rows.rank_scales is not None
    assert rows.rank_scales[[2, 5]].tolist() == [0, 0]
    assert bool(delta_of(rows).isfinite().all())


def test_a_scale_beyond_float32_is_refused() -> None:
    huge = normal()
    huge.lora_a.mul_(1e30)
    huge.lora_b.mul_(1e30)
    with pytest.raises(AdapterError, match="lora_A times lora_B of q, with the scale, overflows"):
        quantized(adapter_of(q=huge))


def test_the_demo_s_deltas_change_by_a_percent() -> None:
    from safetensors.torch import load_file

    for name in ADAPTER_NAMES:
        tensors = load_file(ADAPTERS_DIR / name / "adapter_model.safetensors")
        modules = {
            key: ModuleWeights(a, tensors[key.replace("lora_A", "lora_B")].T)
            for key, a in tensors.items()
            if "lora_A" in key
        }
        adapter = quantized(adapter_of(**modules))
        errors = [
            error_of(delta_of(adapter.modules[key]), delta_of(module))
            for key, module in modules.items()
        ]
        assert adapter.rank == max(module.rank for module in modules.values())
        assert sum(errors) / len(errors) < 0.01
        assert max(errors) < 0.012


def memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


SITE = Site("q", 512, (Slice("q", 256),))


def test_a_page_takes_half_the_bytes() -> None:
    sites = [Site(f"layer.{i}.q", 4096, (Slice(f"q{i}", 4096),)) for i in range(8)]
    wide = PageLayout(sites, torch.bfloat16, has_affine=False)
    narrow = PageLayout(sites, torch.bfloat16, has_affine=False, is_int8=True)
    assert narrow.page_bytes < 0.54 * wide.page_bytes


def test_more_ranks_than_a_request_may_have_are_refused() -> None:
    module = normal()
    module.lora_a[3, 11] = 1000.0
    layout = PageLayout([SITE], torch.float32, is_int8=True)
    with pytest.raises(AdapterTooLargeError, match=r"17 ranks in int8; the limit is 16 .*auto"):
        layout.pack(adapter_of(q=module), memory, max_pages=1)


def test_a_width_that_kernels_cannot_read_is_refused() -> None:
    with pytest.raises(AdapterError, match="multiples of 8, but q has one of 260"):
        PageLayout([Site("q", 512, (Slice("q", 260),))], torch.float32, is_int8=True)


def test_a_base_of_such_widths_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", intermediate_size=100)
    (base / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"lora_dtype is int8: .* multiples of 8, but "):
        make_runner(base, lora_dtype="int8", adapter_pool_bytes=1 << 20)


def test_answers_are_nearly_those_without(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", num_hidden_layers=2)
    adapters = make_adapters(base)
    requests = [probe(i) for i in range(2 * len(OWNERS))]
    replies = [
        run_all(
            make_engine(open_quantized(base, adapters, "cpu", dtype="float32", lora_dtype=kind)),
            requests,
        )
        for kind in ("auto", "int8")
    ]
    for one in requests:
        assert_alike(replies[1][one.request_id], replies[0][one.request_id], 0.05)


def test_doctor_counts_twice_the_adapters(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    auto, int8 = (estimate_fit(base, 8 << 30, lora_dtype=kind) for kind in ("auto", "int8"))
    assert int8.adapter_bytes < 0.6 * auto.adapter_bytes
    assert "in int8 on the device" in int8.facts()["fits"]
