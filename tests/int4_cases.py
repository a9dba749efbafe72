"""4-bit problems for the tests: random integers in every form, and their products in float64."""

from __future__ import annotations

import torch

from kernels.int4 import Int4Format, Int4Rows, Integers, empty_int4

CPU = torch.device("cpu")
FORMATS = {
    "groups of 128": Int4Format(128, torch.float16),
    "groups of 64, zero points": Int4Format(64, torch.bfloat16, has_zeros=True),
    "groups of 32, zero points, sorted": Int4Format(32, torch.float16, True, True),
    "groups of 128, sorted": Int4Format(128, torch.bfloat16, has_order=True),
}


def drawn_integers(
    rows: int, columns: int, form: Int4Format, seed: int = 0, scale: float = 1.0
) -> Integers:
    """Returns integers whose weight has values of about `scale`."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-columns // form.group_size)
    q = torch.randint(0, 16, (rows, columns), generator=draw).to(torch.uint8)
    scales = torch.empty(rows, groups).uniform_(0.1, 0.4, generator=draw) * scale
    zeros = torch.randint(0, 16, (rows, groups), generator=draw).to(torch.uint8)
    return Integers(q, scales.to(form.scale_type), zeros if form.has_zeros else None)


def drawn_rows(
    rows: int,
    columns: int,
    form: Int4Format,
    device: torch.device | str = CPU,
    seed: int = 0,
) -> Int4Rows:
    """Returns packed rows whose products of normal values are about 1."""
    made = empty_int4(rows, columns, form, torch.device(device))
    made.write_(drawn_integers(rows, columns, form, seed, scale=columns**-0.5))
    if made.order is not None:
        draw = torch.Generator().manual_seed(seed + 1)
        made.order.copy_(torch.randperm(columns, generator=draw))
    return made


def exact_product(
    x: torch.Tensor, weight: Int4Rows, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = x.double() @ weight.float().double().T
    return y if bias is None else y + bias.double()
