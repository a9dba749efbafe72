"""Rank rows in integers of 8 bits: half the bytes, hardly another delta.

Each row of A and of B is divided by its scale, its largest magnitude over 127, and rounded; the
delta of a rank is the product of both rows times both scales. The rows of trained adapters are
nearly normal: over the demo's adapters the deltas of the modules change by 0.5 to 0.9 % on average,
in e4m3 with the same scales by 1.9 to 3.3 %, in bfloat16 by 0.1 to 0.2 %.

A row whose largest magnitude is far above the others would lose them. It is kept as the sum of two
rows, of which the second is the remainder of the first with 8 more bits, and its rank becomes two
ranks, or four if both of its rows are such: (a + a') b = a b + a' b. Free of pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from lora.adapter import Adapter, ModuleWeights
from lora.convert import spread
from lora.errors import AdapterError

_LARGEST = 127.0
_SMALLEST = torch.finfo(torch.float32).tiny  # rows of zeros are divided by no zero
# A row's largest magnitude, in usual ones: half of its numbers are then four steps large or more.
# It is 11 at most in the rows of the demo's adapters.
_MAX_PEAK = 32.0


def quantized(adapter: Adapter) -> Adapter:
    """Returns the adapter with int8 rows, perhaps more of them, and their scales; itself, if it has
    them already. Raises AdapterError if a scale is beyond float32."""
    if all(one.rank_scales is not None for one in adapter.modules.values()):
        return adapter
    items = list(adapter.modules.items())
    found = dict(spread(lambda item: (item[0], _quantize(*item)), items))
    modules = {name: found[name] for name in adapter.modules}
    rank = max((one.rank for one in modules.values()), default=0)
    return replace(adapter, rank=rank, modules=modules)


@torch.inference_mode()
def _quantize(name: str, module: ModuleWeights) -> ModuleWeights:
    a, of_a = _split(module.lora_a.float())
    b, of_b = _split(module.lora_b.contiguous().float())
    if len(a.rows) > module.rank or len(b.rows) > module.rank:
        # Every row of a rank's A with every row of its B.
        pairs = of_a[:, None] == of_b
        take_a, take_b = pairs.nonzero(as_tuple=True)
        a, b = _Rows(a.rows[take_a], a.scales[take_a]), _Rows(b.rows[take_b], b.scales[take_b])
    scales = a.scales * b.scales * module.scale
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise AdapterError(f"lora_A times lora_B of {name}, with the scale, overflows float32")
    return replace(module, lora_a=a.rows, lora_b=b.rows, scale=1.0, rank_scales=scales)


class _Rows(NamedTuple):
    rows: torch.Tensor  # [n, width] int8
    scales: torch.Tensor  # [n] float32


def _split(rows: torch.Tensor) -> tuple[_Rows, torch.Tensor]:
    """Returns the rows [r, width] in int8, then the remainders of rows that need them, and the rank
    of each."""
    found, high = _round(rows)
    ranks = torch.arange(len(rows), device=rows.device)
    if not len(high):
        return found, ranks
    rest, _ = _round(rows[high] - found.rows[high].float() * found.scales[high, None])
    both = _Rows(*(torch.cat(some) for some in zip(found, rest, strict=True)))
    return both, torch.cat([ranks, high])


def _round(rows: torch.Tensor) -> tuple[_Rows, torch.Tensor]:
    """Returns rows [r, width] in int8, and the indices of the rows with some numbers far above the
    usual one: the square of the mean root of the numbers that are not zero, which is the median of
    normal numbers."""
    sizes = rows.abs()
    largest = sizes.amax(1)
    numbers = (rows * (_LARGEST / largest.clamp_min(_SMALLEST))[:, None]).round_()
    found = _Rows(numbers.to(torch.int8), largest / _LARGEST)
    if rows.is_meta:
        return found, largest[:0].long()
    count = sizes.sign().sum(1).clamp_min(1)
    usual = (sizes.sqrt_().sum(1) / count).square()
    return found, (largest > _MAX_PEAK * usual).nonzero().flatten()
