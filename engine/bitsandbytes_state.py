"""The state beside a 4-bit weight of bitsandbytes, and the scales of its blocks.

A block of elements, in the order of the flat weight, shares one scale (`absmax`), which may be
stored as bytes of a table with a second scale and an offset (double quantization). Sources:
functional.QuantState, get_4bit_type and dequantize_4bit of bitsandbytes 0.50.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from engine.quantization import Bnb4
from engine.stored_parts import Parts, Reader, StoredError

_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # then the same, negative; over 12


@dataclass(frozen=True, slots=True)
class QuantState:
    block_size: int  # elements of one scale
    shape: tuple[int, ...]
    nested_block_size: int | None  # scales of one second scale; None: they are stored plain
    nested_offset: float

    @classmethod
    def read(cls, scheme: Bnb4, shape: tuple[int, int], read: Reader) -> QuantState:
        """Raises StoredError if the state is not of the scheme and shape."""
        name = state_name(scheme)
        stored = read(name)
        assert stored is not None
        is_nested = read("weight.nested_absmax") is not None
        try:
            values = json.loads(bytes(stored.tolist()))
            found = cls(
                int(values["blocksize"]),
                tuple(values["shape"]),
                int(values["nested_blocksize"]) if is_nested else None,
                float(values["nested_offset"]) if is_nested else 0.0,
            )
            quant_type = values["quant_type"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoredError(name, f"cannot be read: {error!r}") from None
        if quant_type != scheme.quant_type or found.shape != shape:
            raise StoredError(
                name,
                f"is of {quant_type!r} {list(found.shape)}, config.json makes it "
                f"{scheme.quant_type!r} {list(shape)}",
            )
        if found.block_size not in _BLOCK_SIZES:
            raise StoredError(name, f"has blocksize {found.block_size}, not one of {_BLOCK_SIZES}")
        if found.nested_block_size is not None and found.nested_block_size < 1:
            raise StoredError(name, f"has nested_blocksize {found.nested_block_size}")
        return found

    def check(self, shape: tuple[int, int], read: Reader) -> None:
        """Raises StoredError for a part of another size."""
        num_elements = shape[0] * shape[1]
        num_blocks = -(-num_elements // self.block_size)
        sizes = {"weight": -(-num_elements // 2)}  # bytes
        if self.nested_block_size is None:
            sizes["weight.absmax"] = num_blocks * 4
        else:
            sizes["weight.absmax"] = num_blocks
            sizes["weight.nested_absmax"] = -(-num_blocks // self.nested_block_size) * 4
        for name, size in sizes.items():
            part = read(name)
            assert part is not None
            if part.numel() * part.itemsize != size:
                held = part.numel() * part.itemsize
                raise StoredError(name, f"has {held} bytes, config.json makes it {size}")


def state_name(scheme: Bnb4) -> str:
    return f"weight.quant_state.bitsandbytes__{scheme.quant_type}"


def table(scheme: Bnb4, device: torch.device) -> torch.Tensor:
    """Returns the float32 numbers of the 16 codes. The library computes with these, whatever
    `quant_map` a file has."""
    if scheme.quant_type == "nf4":
        return torch.tensor(_NF4, device=device)
    half = torch.tensor(_FP4, device=device)
    return torch.cat((half, -half)) / 12


def check_table(scheme: Bnb4, read: Reader) -> None:
    """Raises StoredError for a `quant_map` of other numbers."""
    stored = read("weight.quant_map")
    assert stored is not None
    if not torch.allclose(stored, table(scheme, stored.device), rtol=0, atol=1e-6):
        raise StoredError("weight.quant_map", f"is not the table of {scheme.quant_type}")


def block_scales(state: QuantState, parts: Parts) -> torch.Tensor:
    """Returns the float32 scale of each block."""
    scales = parts["weight.absmax"].flatten()
    if state.nested_block_size is None:
        return scales
    second = parts["weight.nested_absmax"].flatten().repeat_interleave(state.nested_block_size)
    codes = parts["weight.nested_quant_map"][scales.int()]
    return codes * second[: len(scales)] + state.nested_offset
