"""The stored forms of quantized weights: the tensors of each, and their arithmetic.

    W[n, k] = (q[n, k] - zero[n, group of k]) * scale[n, group of k]

in float32, which holds the product with a scale of 16 bits exactly; the caller rounds to the type
that is served. Integers are packed into int32 words, the first in the lowest bits. Rows are
computed in slices, so that float32 copies of a whole tensor never exist.

Sources: compressed-tensors 0.20 (naive_quantized, pack_quantized, converters.autoawq), transformers
5 (integrations.finegrained_fp8), AutoGPTQ and GPTQModel (checkpoint formats 1 and 2), bitsandbytes
0.50 (functional.dequantize_4bit, int8_vectorwise_dequant).
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch

from engine.bitsandbytes_state import QuantState, block_scales, check_table, state_name, table
from engine.quantization import Awq, Bnb4, Bnb8, Float8, Gptq, Int8, Packed, Scheme, Strategy
from engine.stored_parts import FLOATS, Part, Parts, Reader, Shape, StoredError

# The nibble of a word of AWQ that holds each of eight columns.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
ROW_MULTIPLE = 8  # slices of rows begin at multiples: no word is cut
_INT8_STEP = 7.874015718698502e-3  # bitsandbytes' 1 / 127


def main_part(scheme: Scheme) -> str:
    """Returns the part that marks a quantized weight; a plain weight has the part `weight`."""
    match scheme:
        case Packed():
            return "weight_packed"
        case Gptq() | Awq():
            return "qweight"
    return "weight"


def is_quantized(scheme: Scheme, dtypes: Mapping[str, str]) -> bool:
    """Returns True if the parts of a module, with these types, are of the scheme and no plain
    weight."""
    if main_part(scheme) != "weight":
        return main_part(scheme) in dtypes
    if isinstance(scheme, Bnb4) and state_name(scheme) in dtypes:
        return True  # `bnb_4bit_quant_storage` may name a type of floats, for the same bytes
    return dtypes.get("weight") not in (None, *FLOATS)


def parts_of(scheme: Scheme, shape: tuple[int, int], present: Set[str]) -> dict[str, Part]:
    """Returns the parts of a weight [out_features, in_features]. `present`: the names that the file
    has, which choose among forms of one scheme. Raises StoredError if the scheme has no such
    weight."""
    rows, columns = shape
    match scheme:
        case Float8(strategy, block, scale_names):
            scale = next((name for name in scale_names if name in present), scale_names[0])
            scales = _scale_shapes(shape, strategy, block)
            return {
                "weight": Part(((rows, columns),), ("F8_E4M3",)),
                scale: Part(scales, FLOATS),
            }
        case Int8(strategy, block, is_symmetric):
            scales = _scale_shapes(shape, strategy, block)
            parts = {
                "weight": Part(((rows, columns),), ("I8",)),
                "weight_scale": Part(scales, FLOATS),
            }
            if not is_symmetric:
                parts["weight_zero_point"] = Part(scales, ("I8",))
            return parts
        case Bnb8():
            return {
                "weight": Part((shape,), ("I8",)),
                "SCB": Part(((rows,),), ("F32",)),
                "weight_format": Part((), ("U8",), is_required=False),
            }
    return _packed_parts(scheme, shape, present)


def _packed_parts(scheme: Scheme, shape: tuple[int, int], present: Set[str]) -> dict[str, Part]:
    """Returns the parts of the schemes that pack numbers of less than eight bits."""
    rows, columns = shape
    match scheme:
        case Packed(num_bits, group_size, is_symmetric):
            groups = 1 if group_size is None else _num_groups(columns, group_size)
            words = -(-columns * num_bits // 32)
            parts = {
                "weight_packed": Part(((rows, words),), ("I32",)),
                "weight_scale": Part(((rows, groups),), FLOATS),
                "weight_shape": Part(((2,),), ("I64", "I32")),
                "weight_g_idx": Part(((columns,),), ("I32",), is_required=False),
            }
            if not is_symmetric:
                # Packed along the rows; before version 0.10 as bytes.
                shapes = ((-(-rows * num_bits // 32), groups), (rows, groups))
                parts["weight_zero_point"] = Part(shapes, ("I32", "I8"))
            return parts
        case Gptq(num_bits, group_size, _, is_sorted):
            per_word = 32 // num_bits
            if columns % per_word or rows % per_word:
                raise StoredError(
                    "qweight", f"cannot hold {list(shape)}: no multiples of {per_word}"
                )
            groups = 1 if group_size is None else -(-columns // group_size)
            return {
                "qweight": Part(((columns // per_word, rows),), ("I32",)),
                "qzeros": Part(((groups, rows // per_word),), ("I32",)),
                "scales": Part(((groups, rows),), FLOATS),
                "g_idx": Part(((columns,),), ("I32",), is_required=is_sorted),
            }
        case Awq(group_size):
            if rows % 8:
                raise StoredError("qweight", f"cannot hold {rows} rows: no multiple of 8")
            groups = _num_groups(columns, group_size, "scales")
            return {
                "qweight": Part(((columns, rows // 8),), ("I32",)),
                "qzeros": Part(((groups, rows // 8),), ("I32",)),
                "scales": Part(((groups, rows),), FLOATS),
            }
        case Bnb4():
            parts = {
                "weight": Part((), ("U8", *FLOATS)),
                "weight.absmax": Part((), ("U8", "F32")),
                "weight.quant_map": Part(((16,),), ("F32",)),
                state_name(scheme): Part((), ("U8",)),
            }
            if "weight.nested_absmax" in present:
                parts["weight.nested_absmax"] = Part((), ("F32",))
                parts["weight.nested_quant_map"] = Part(((256,),), ("F32",))
            return parts
    raise AssertionError(scheme)


def check_parts(scheme: Scheme, shape: tuple[int, int], read: Reader) -> None:
    """Checks the numbers that decide how the others are read, all of them small. Raises
    StoredError."""
    match scheme:
        case Packed(_, group_size):
            stored = read("weight_shape")
            assert stored is not None
            if tuple(stored.tolist()) != shape:
                raise StoredError(
                    "weight_shape", f"is {stored.tolist()}, config.json makes it {list(shape)}"
                )
            order = read("weight_g_idx")
            if order is not None and int(order.min()) >= 0:
                _check_order("weight_g_idx", order, group_size or shape[1])
        case Gptq(num_bits, group_size, zero_offset):
            order, zeros = read("g_idx"), read("qzeros")
            if order is not None:
                _check_order("g_idx", order, group_size or shape[1])
            largest = 2**num_bits - 1
            assert zeros is not None
            if zero_offset and bool((unpack(zeros, num_bits) == largest).any()):
                raise StoredError(
                    "qzeros",
                    f"holds {largest}, which tools read as a zero point of {largest + 1} or of 0: "
                    "convert it to checkpoint_format gptq_v2",
                )
        case Bnb4():
            QuantState.read(scheme, shape, read).check(shape, read)
            check_table(scheme, read)
        case Bnb8():
            layout = read("weight_format")
            if layout is not None and bool(layout.any()):
                raise StoredError("weight_format", f"is {layout.tolist()}, only rows are read: 0")


def prepare(scheme: Scheme, shape: tuple[int, int], parts: Parts) -> dict[str, torch.Tensor]:
    """Returns the parts, unpacked where every slice of rows reads them: zero points as numbers of
    float32, and columns' groups."""
    found = dict(parts)
    match scheme:
        case Packed(num_bits):
            zeros = parts.get("weight_zero_point")
            offset = 2.0 ** (num_bits - 1)
            if zeros is not None and zeros.dtype == torch.int32:
                found["zeros"] = unpack(zeros.T, num_bits)[:, : shape[0]].T.float()
            elif zeros is not None:
                found["zeros"] = zeros.float() + offset
            else:
                found["zeros"] = torch.full((1, 1), offset, device=parts["weight_packed"].device)
            order = parts.get("weight_g_idx")
            if order is not None and int(order.min()) >= 0:
                found["order"] = order.long()
        case Gptq(num_bits, _, zero_offset):
            found["zeros"] = unpack(parts["qzeros"], num_bits).T.float() + zero_offset
            if "g_idx" in parts:
                found["order"] = parts["g_idx"].long()
        case Awq():
            found["zeros"] = _unpack_awq(parts["qzeros"]).T.float()
        case Bnb4():
            found["scales"] = block_scales(QuantState.read(scheme, shape, parts.get), parts)
            found["table"] = table(scheme, parts["weight"].device)
            found["bytes"] = parts["weight"].flatten().view(torch.uint8)
    return found


def dequantize(
    scheme: Scheme, shape: tuple[int, int], parts: Parts, first: int, last: int
) -> torch.Tensor:
    """Returns the rows from `first` to `last` in float32, [last - first, in_features]. `parts`: as
    `prepare` returns them; `first`: a multiple of ROW_MULTIPLE."""
    columns = shape[1]
    rows = slice(first, last)
    match scheme:
        case Float8(strategy, block, scale_names):
            scale = next(parts[name] for name in scale_names if name in parts)
            factors = _by_columns(scale, strategy, block, columns, rows)
            return parts["weight"][rows].float() * factors
        case Int8(strategy, block):
            numbers = parts["weight"][rows].float()
            zeros = parts.get("weight_zero_point")
            if zeros is not None:
                numbers -= _by_columns(zeros, strategy, block, columns, rows)
            return numbers * _by_columns(parts["weight_scale"], strategy, block, columns, rows)
        case Packed(_, group_size) | Gptq(_, group_size) | Awq(group_size):
            numbers, zeros, scale = grouped_integers(scheme, columns, parts, rows)
            order, size = parts.get("order"), group_size or columns
            differences = numbers.float() - _by_order(zeros, order, size, columns)
            return differences * _by_order(scale.float(), order, size, columns)
        case Bnb4():
            size = QuantState.read(scheme, shape, parts.get).block_size
            return _by_blocks(parts, size, first * columns, last * columns).view(-1, columns)
        case Bnb8():
            return parts["weight"][rows].float() * parts["SCB"][rows, None] * _INT8_STEP
    raise AssertionError(scheme)


def grouped_integers(
    scheme: Packed | Gptq | Awq, columns: int, parts: Parts, rows: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the unsigned numbers of some rows, uint8 [rows, columns], their zero points, float32
    [rows, groups] or [1, 1] if all are equal, and their scales [rows, groups]. `parts`: as
    `prepare` returns them; `rows` begins at a multiple of ROW_MULTIPLE."""
    zeros = parts["zeros"]
    match scheme:
        case Packed(num_bits):
            numbers = unpack(parts["weight_packed"][rows], num_bits)[:, :columns]
            zeros = zeros if len(zeros) == 1 else zeros[rows]
            return numbers, zeros, parts["weight_scale"][rows]
        case Gptq(num_bits):
            numbers = unpack(parts["qweight"][:, rows].T, num_bits)
        case Awq():
            words = slice(rows.start // 8, -(-rows.stop // 8))
            numbers = _unpack_awq(parts["qweight"][:, words]).T
    return numbers, zeros[rows], parts["scales"][:, rows].T


def row_scales(scheme: Scheme, parts: Parts, num_rows: int) -> torch.Tensor | None:
    """Returns the scales of a weight of which each row has one, [num_rows] in float32."""
    if not isinstance(scheme, Float8) or scheme.strategy not in ("tensor", "channel"):
        return None
    scale = next(parts[name] for name in scheme.scale_names if name in parts)
    return scale.float().reshape(-1).expand(num_rows).contiguous()


def unpack(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Returns the unsigned numbers of 4 or 8 bits in int32 words [rows, words], the lowest bits
    first: uint8 [rows, words * 32 / num_bits]."""
    packed = words.contiguous().view(torch.uint8)  # the first byte is the lowest
    if num_bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Returns [columns, rows] of 4-bit numbers in the words [columns, rows / 8] of AWQ's gemm."""
    nibbles = unpack(words, 4).view(len(words), -1, 8)
    return nibbles[:, :, list(_AWQ_NIBBLES)].flatten(1)


def _scale_shapes(
    shape: tuple[int, int], strategy: Strategy, block: tuple[int, int] | None
) -> tuple[Shape, ...]:
    rows, columns = shape
    if strategy == "tensor":
        return (), (1,), (1, 1)
    if strategy == "channel":
        return (rows, 1), (rows,)
    assert block is not None
    if strategy == "group":
        return ((rows, _num_groups(columns, block[1])),)
    return ((-(-rows // block[0]), -(-columns // block[1])),)


def _num_groups(columns: int, group_size: int, part: str = "weight_scale") -> int:
    if columns % group_size:
        raise StoredError(
            part, f"cannot have groups of {group_size}: they do not divide {columns} columns"
        )
    return columns // group_size


def _by_columns(
    values: torch.Tensor,
    strategy: Strategy,
    block: tuple[int, int] | None,
    columns: int,
    rows: slice,
) -> torch.Tensor:
    """Returns the values in float32 in a shape that spreads over [rows, columns]."""
    values = values.float()
    if strategy == "tensor":
        return values.reshape(1, 1)
    if strategy == "channel":
        return values.reshape(-1, 1)[rows]
    assert block is not None
    lines = torch.arange(rows.start, rows.stop, device=values.device) // block[0]
    # A block may be wider than the matrix.
    return values[lines].repeat_interleave(min(block[1], columns), dim=1)[:, :columns]


def _by_order(
    values: torch.Tensor, order: torch.Tensor | None, group_size: int, columns: int
) -> torch.Tensor:
    """Spreads [rows, groups] over the columns, whose groups are `order` or follow each other."""
    if values.shape[1] == 1:
        return values
    if order is not None:
        return values[:, order]
    return values.repeat_interleave(group_size, dim=1)[:, :columns]


def _by_blocks(parts: Parts, block_size: int, first: int, last: int) -> torch.Tensor:
    """Returns the elements of a weight of bitsandbytes from `first`, which is even, to `last`: the
    high nibble of a byte goes before the low one."""
    packed = parts["bytes"][first // 2 : -(-last // 2)]
    numbers = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[: last - first]
    begin = first // block_size
    scales = parts["scales"][begin : -(-last // block_size)].repeat_interleave(block_size)
    skipped = first - begin * block_size
    return parts["table"][numbers.int()] * scales[skipped : skipped + last - first]


def _check_order(part: str, order: torch.Tensor, group_size: int) -> None:
    """Refuses groups of columns that are not all full: tools sort the columns, then cut."""
    num_groups = -(-order.numel() // group_size)
    if int(order.min()) < 0 or int(order.max()) >= num_groups:
        raise StoredError(part, f"names groups outside 0 to {num_groups - 1}")
    counts = torch.bincount(order.long(), minlength=num_groups)
    if bool((counts[:-1] != group_size).any()):
        raise StoredError(part, f"has groups of other sizes than {group_size}")
