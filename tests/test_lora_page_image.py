"""The layout of adapters: the bytes that they take on the device, and the place of each strip."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora_rows import ROW_BITS, UNIT_BYTES
from lora.adapter import Adapter, ModuleWeights
from lora.page_image import PAGE_ROWS, PageLayout
from lora.sites import Site, Slice
from tests.lora_helpers import SHAPES, SITES, make_adapter

_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


def llama(
    num_layers: int = 4, hidden: int = 4096, kv: int = 1024, inner: int = 14336
) -> list[Site]:
    """The sites of Llama-3-8B, of fewer layers."""
    sites: list[Site] = []
    for i in range(num_layers):
        q, k, v, o, gate, up, down = (f"{i}.{name}" for name in _LINEARS)
        sites += [
            Site(f"{i}.qkv", hidden, (Slice(q, hidden), Slice(k, kv), Slice(v, kv))),
            Site(f"{i}.o", hidden, (Slice(o, hidden),)),
            Site(f"{i}.gate_up", hidden, (Slice(gate, inner), Slice(up, inner))),
            Site(f"{i}.down", inner, (Slice(down, hidden),)),
        ]
    return [*sites, Site("lm_head", hidden, (Slice("lm_head", 128256),))]


def adapter_of(sites: list[Site], targets: str, ranks: tuple[int, ...]) -> Adapter:
    """Zeros; ranks in turn, module by module."""
    modules = {}
    for site in sites:
        for part in site.slices:
            if part.module.rsplit(".", 1)[-1] in targets.split():
                rank = ranks[len(modules) % len(ranks)]
                a, b = torch.zeros(rank, site.in_features), torch.zeros(rank, part.out_features)
                modules[part.module] = ModuleWeights(a, b)
    return Adapter("x", max(ranks), modules, 0, False)


@pytest.mark.parametrize(
    ("targets", "ranks"),
    [
        ("q v", (8,)),
        ("q k v o gate up down", (8,)),
        ("q v", (16,)),
        ("q k v o gate up down", (64,)),
        ("q k v o gate up down", (8, 16, 32, 64)),  # as by rank_pattern
        ("q v", (12,)),
        ("lm_head", (16,)),
    ],
)
def test_an_adapter_takes_little_more_than_its_own_bytes(
    targets: str, ranks: tuple[int, ...]
) -> None:
    sites = llama(num_layers=16)
    adapter = adapter_of(sites, targets, ranks)
    own = sum(2 * (w.a.numel() + w.b.numel()) for w in adapter.modules.values())
    assert own <= PageLayout(sites, torch.bfloat16).num_bytes(adapter) <= 1.15 * own


def with_affine(adapter: Adapter, rows: dict[str, int]) -> Adapter:
    """Returns the adapter with affine rows of those of the modules that it has."""
    modules = {
        name: replace(weights, affine=torch.ones(rows[name], weights.lora_b.shape[1]))
        if name in rows
        else weights
        for name, weights in adapter.modules.items()
    }
    return replace(adapter, modules=modules)


def numbers_of(weights: ModuleWeights, side: str) -> torch.Tensor | None:
    return {"a": weights.a, "b": weights.b, "affine": weights.affine}[side]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(SHAPES)), st.integers(1, 70), min_size=1),
    st.dictionaries(st.sampled_from(("q", "k", "down")), st.integers(1, 2)),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_strips_overlap_nowhere_and_hold_the_adapter(
    ranks: dict[str, int], affine: dict[str, int], dtype: torch.dtype
) -> None:
    layout = PageLayout(SITES, dtype)
    adapter = with_affine(make_adapter("a", ranks), affine)
    packed = layout.pack(adapter, lambda size: torch.full((size,), 255, dtype=torch.uint8))
    assert packed.num_blocks * layout.bytes_per_block == layout.num_bytes(adapter)
    assert packed.num_pages == -(-max(ranks.values()) // PAGE_ROWS)
    assert packed.entries.shape == packed.rows.shape
    taken: list[tuple[int, int]] = []
    for place, strip in enumerate(layout.strips):
        for page, entry in enumerate(packed.entries[:, place].tolist()):
            rows = entry & (1 << ROW_BITS) - 1
            weights = adapter.modules.get(strip.module)
            own = None if weights is None else numbers_of(weights, strip.side)
            height = 0 if own is None else len(own)
            assert rows == max(0, min(PAGE_ROWS, height - page * PAGE_ROWS))
            if rows == 0:
                assert entry == 0
                continue
            start = (entry >> ROW_BITS) * UNIT_BYTES
            end = start + rows * strip.width * dtype.itemsize
            taken.append((start, end))
            assert start // layout.block_bytes == (end - 1) // layout.block_bytes
            assert own is not None
            own = own[page * PAGE_ROWS :][:rows]
            found = packed.image[start:end].view(dtype).view(rows, strip.width)
            assert torch.equal(found.float(), own[:, strip.start : strip.start + strip.width])
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


def test_a_matrix_wider_than_a_block_is_cut_into_equal_pieces() -> None:
    layout = PageLayout(llama(num_layers=1), torch.bfloat16)
    pieces = [s for s in layout.strips if s.site == "lm_head" and s.side == "b"]
    assert layout.block_bytes == 512 * 1024
    assert [piece.start for piece in pieces] == [i * pieces[0].width for i in range(len(pieces))]
    assert pieces[-1].start < 128256 <= pieces[-1].start + pieces[-1].width
    assert {piece.width for piece in pieces} == {pieces[0].width}
    assert pieces[0].width * PAGE_ROWS * 2 <= layout.block_bytes
