"""Weights that are stored as 4-bit integers, as they are kept in memory: their forms, and their
integers with columns sorted by groups.

A form is derived from the headers and from small parts: zero points, and the groups of columns of
GPTQ's `desc_act` and compressed-tensors' `actorder`. Columns that are not in the order of their
groups are sorted by them, and the activations with them. Groups of more than 128 columns, whole
rows among them, become several with one scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.quantization import Awq, Gptq, Packed, Scheme
from engine.stored_parts import Parts, Reader
from engine.stored_weights import grouped_integers, prepare
from kernels.int4 import GROUP_SIZES, MIDDLE, Int4Format, Integers

_SCALE_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_LARGEST = GROUP_SIZES[-1]
Grouped = Packed | Gptq | Awq


def as_grouped(scheme: Scheme | None) -> Grouped | None:
    """Returns a scheme of 4-bit integers in groups, None if it is another."""
    match scheme:
        case Packed(4) | Gptq(4) | Awq():
            return scheme
    return None


def likely_form(scheme: Scheme | None, columns: int) -> Int4Format | None:
    """Returns the form of weights of which only the scheme is known; None: they are not kept in 4
    bits."""
    grouped = as_grouped(scheme)
    size = None if grouped is None else _packed_size(grouped.group_size, columns)
    if grouped is None or size is None:
        return None
    has_zeros = isinstance(grouped, Awq) or (
        isinstance(grouped, Packed) and not grouped.is_symmetric
    )
    kind = torch.bfloat16 if isinstance(grouped, Packed) else torch.float16
    return Int4Format(size, kind, has_zeros)


def form_of(
    scheme: Scheme, shape: tuple[int, int], dtypes: Mapping[str, str], read: Reader
) -> Int4Format | str:
    """Returns the form of a weight, or the reason why it is not kept in 4 bits. `dtypes`: of its
    parts, as safetensors names them."""
    grouped = as_grouped(scheme)
    if grouped is None:
        return "its scheme is not one of 4-bit integers"
    size = _packed_size(grouped.group_size, shape[1])
    if size is None:
        sizes = ", ".join(map(str, GROUP_SIZES))
        return f"kernels read groups of {sizes} or multiples of {_LARGEST} columns"
    scale = "weight_scale" if isinstance(grouped, Packed) else "scales"
    kind = _SCALE_TYPES.get(dtypes[scale])
    if kind is None:
        return f"its scales are {dtypes[scale]}, kernels read {' or '.join(_SCALE_TYPES)}"
    zeros = prepare(grouped, shape, _small_parts(grouped, read))["zeros"]
    if bool((zeros < 0).any() | (zeros > 15).any()):
        return "a zero point lies outside 0 to 15"
    has_zeros = bool((zeros != MIDDLE).any())
    return Int4Format(size, kind, has_zeros, order_of(grouped, shape[1], read) is not None)


def order_of(scheme: Grouped, columns: int, read: Reader) -> torch.Tensor | None:
    """Returns the columns sorted by their groups, int64 [columns]; None: they lie so."""
    if isinstance(scheme, Awq):
        return None
    groups = read("g_idx" if isinstance(scheme, Gptq) else "weight_g_idx")
    if groups is None or int(groups.min()) < 0:
        return None
    size = scheme.group_size or columns
    if torch.equal(groups.long(), torch.arange(columns, device=groups.device) // size):
        return None
    return torch.argsort(groups.long(), stable=True)


def integers_of(
    scheme: Grouped,
    columns: int,
    parts: Parts,
    rows: slice,
    order: torch.Tensor | None,
    has_zeros: bool,
) -> Integers:
    """Returns some rows with columns in the order of `order_of`. `parts` and `rows`: as for
    `grouped_integers`."""
    q, zeros, scales = grouped_integers(scheme, columns, parts, rows)
    if order is not None:
        q = q[:, order]
    stored = scheme.group_size or columns
    size = _packed_size(scheme.group_size, columns)
    assert size is not None
    groups = -(-columns // size)
    repeats = -(-stored // size)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(repeats, dim=1)[:, :groups]

    if not has_zeros:
        return Integers(q, spread(scales), None)
    found = spread(zeros.expand(len(q), scales.shape[1]))
    return Integers(q, spread(scales), found.to(torch.uint8))


def _packed_size(group_size: int | None, columns: int) -> int | None:
    """Returns the group size in memory of groups of so many columns, None: a whole row."""
    if group_size is None or group_size >= columns:
        return _LARGEST if group_size is None or group_size not in GROUP_SIZES else group_size
    if group_size in GROUP_SIZES:
        return group_size
    return None if group_size % _LARGEST else _LARGEST


def _small_parts(scheme: Grouped, read: Reader) -> Parts:
    """Returns the parts that `prepare` needs for the zero points of a weight on a CPU."""
    names = ("weight_zero_point", "qzeros")
    found = {name: part for name in names if (part := read(name)) is not None}
    if isinstance(scheme, Packed):
        found["weight_packed"] = torch.empty(0)  # of which it takes the device
    return found
