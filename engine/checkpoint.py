"""A base's tensors as a decoder needs them, plain, dequantized or as 4-bit integers, whatever form
the files have.

Every expected tensor must be there with its shape, and no other, but for a few without effect
and for the parts of a larger model that no text reaches. All names, shapes and types are checked
before a weight is read, but for a tied head, which is compared with its embedding. Reads tensor by
tensor, and dequantizes in slices of rows on the device that receives them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from safetensors import safe_open

from engine.errors import UnsupportedModelError
from engine.model_config import ModelConfig
from engine.quantization import Scheme
from engine.stored_int4 import as_grouped, form_of, integers_of, order_of
from engine.stored_parts import FLOATS, Part, StoredError
from engine.stored_weights import (
    ROW_MULTIPLE,
    check_parts,
    dequantize,
    is_quantized,
    main_part,
    parts_of,
    prepare,
    row_scales,
)
from engine.weight_files import StoredTensor, stored_tensors, weight_files
from engine.weight_shapes import expected_shapes
from kernels.int4 import Int4Format, Integers
from lora.module_names import canonical, is_of_other_part

logger = logging.getLogger(__name__)

_HARMLESS = re.compile(r"(?:model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
# Scales of activations and of the KV cache, which stay in the type of the engine.
_OF_ACTIVATIONS = re.compile(
    r".+\.(?:input_scale|input_zero_point|input_scale_ub|output_scale|output_zero_point"
    r"|activation_scale|[qkv]_scale|kv_scale|[qkv]_zero_point|prob_output_scale)"
)
_SLICE_ELEMENTS = 4 * 1024 * 1024  # of float32 temporaries


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: ranges [first, end) of its rows, one after the other, and of its
    columns."""

    rows: Sequence[tuple[int, int]] | None = None  # None: all
    columns: tuple[int, int] | None = None  # None: all


_WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class _Weight:
    """A quantized weight: its scheme, its shape [out, in], and its parts by their names below the
    module."""

    scheme: Scheme
    shape: tuple[int, int]
    parts: Mapping[str, StoredTensor]


class Checkpoint:
    """The files of a base, checked. Raises UnsupportedModelError with the tensor and the reason."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._config = config
        self._plain: dict[str, StoredTensor] = {}
        self._quantized: dict[str, _Weight] = {}  # by the name of the weight
        self._open: tuple[Path, safe_open] | None = None  # one file: its pages can be dropped
        entries = self._read_headers(folder)
        self.num_bytes = sum(path.stat().st_size for path in weight_files(folder))
        self.num_bytes_read = 0  # of tensors and of their slices
        self._sort(entries)

    @property
    def num_quantized(self) -> int:
        return len(self._quantized)

    def stream(
        self,
        device: torch.device,
        leave_out: Container[str] = (),
        cut_of: Callable[[str], Cut] | None = None,
    ) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Yields every expected tensor once, but for those left out, in slices of rows: its name in
        a model of text, the rows, and these on the device, in float32 if they are dequantized.
        `cut_of`: the part of each that is yielded, whose rows are counted from 0; of a plain tensor
        no more than that is read."""
        first = self._plain | {
            name: next(iter(weight.parts.values())) for name, weight in self._quantized.items()
        }
        # In the order of the files, as disks and their caches expect.
        for name in sorted(first, key=lambda name: (first[name].path, first[name].order)):
            if name in leave_out:
                continue
            cut = _WHOLE if cut_of is None else cut_of(name)
            if name in self._plain:
                yield from ((name, *part) for part in self._plain_parts(self._plain[name], cut))
            else:
                weight = self._quantized[name]
                yield from ((name, *part) for part in self._dequantized(weight, device, cut))

    def read(self, name: str) -> torch.Tensor | None:
        """Returns a tensor by its name in a model of text; None: there is none."""
        if name in self._plain:
            return self._read(self._plain[name])
        weight = self._quantized.get(name)
        if weight is None:
            return None
        return torch.cat([rows for _, rows in self._dequantized(weight, torch.device("cpu"))])

    def part(self, module: str, name: str) -> torch.Tensor | None:
        """Returns a part of a quantized weight as it is stored, such as `scales`; None: there is
        none."""
        weight = self._quantized.get(f"{module}.weight")
        entry = None if weight is None else weight.parts.get(name)
        return None if entry is None else self._read(entry)

    def e4m3_rows(self, module: str, cut: Cut = _WHOLE) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the stored weight of a module, e4m3 [out, in], and the scale of each row, float32
        [out], on the CPU; None if it is not stored so, be it plain or with a scale per block.
        `cut`: the part that is returned, and read."""
        weight = self._quantized.get(f"{module}.weight")
        if weight is None:
            return None
        scales = {name: self._read(e) for name, e in weight.parts.items() if name != "weight"}
        found = row_scales(weight.scheme, scales, weight.shape[0])
        if found is None:
            return None
        parts = [part for _, part in self._plain_parts(weight.parts["weight"], cut)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows, torch.cat([found[slice(*one)] for one in cut.rows or ((0, len(found)),)])

    def int4_form(self, module: str) -> Int4Format | str:
        """Returns the form that a module's weight has in 4 bits, from headers and small parts, or
        the reason why it has none."""
        weight = self._quantized.get(f"{module}.weight")
        if weight is None:
            return "it is stored plain"
        dtypes = {name: entry.dtype for name, entry in weight.parts.items()}
        return form_of(weight.scheme, weight.shape, dtypes, lambda name: self.part(module, name))

    def int4_order(self, module: str) -> torch.Tensor | None:
        """Returns the columns of a weight with a form in 4 bits, sorted by their groups, int64 [in]
        on the CPU; None: they lie so."""
        weight = self._quantized[f"{module}.weight"]
        scheme = as_grouped(weight.scheme)
        assert scheme is not None
        return order_of(scheme, weight.shape[1], lambda name: self.part(module, name))

    def int4_rows(
        self, module: str, device: torch.device, cut: Cut, *, has_zeros: bool
    ) -> Iterator[tuple[slice, Integers]]:
        """Yields the integers of a weight with a form in 4 bits, in slices of rows on the device,
        with all columns. `cut`: the rows that are yielded, counted from 0. `has_zeros`: with zero
        points, be they all alike."""
        weight = self._quantized[f"{module}.weight"]
        scheme, order = as_grouped(weight.scheme), self.int4_order(module)
        assert scheme is not None
        order = None if order is None else order.to(device)
        parts = self._prepared(weight, device)
        for place, rows, own in _row_slices(weight.shape, cut):
            found = integers_of(scheme, weight.shape[1], parts, rows, order, has_zeros)
            yield place, found.rows(own)

    def _plain_parts(self, entry: StoredTensor, cut: Cut) -> Iterator[tuple[slice, torch.Tensor]]:
        if cut.rows is None and cut.columns is None:
            yield slice(None), self._read(entry)
            return
        begin = 0
        for first, end in cut.rows or ((0, entry.shape[0]),):
            part = self._read(entry, slice(first, end), cut.columns)
            yield slice(begin, begin + len(part)), part
            begin += len(part)

    def _dequantized(
        self, weight: _Weight, device: torch.device, cut: Cut = _WHOLE
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        parts = self._prepared(weight, device)
        for place, rows, own in _row_slices(weight.shape, cut):
            found = dequantize(weight.scheme, weight.shape, parts, rows.start, rows.stop)[own]
            yield place, found if cut.columns is None else found[:, slice(*cut.columns)]

    def _prepared(self, weight: _Weight, device: torch.device) -> dict[str, torch.Tensor]:
        parts = {name: self._read(entry).to(device) for name, entry in weight.parts.items()}
        return prepare(weight.scheme, weight.shape, parts)

    def _read(
        self, entry: StoredTensor, rows: slice | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Reads a tensor, or some rows and columns of one."""
        if self._open is None or self._open[0] != entry.path:
            self._open = (entry.path, safe_open(entry.path, framework="pt"))
        file = self._open[1]
        tensor: torch.Tensor
        if rows is None:
            tensor = file.get_tensor(entry.key)  # type: ignore[no-untyped-call]
        elif columns is None:
            tensor = file.get_slice(entry.key)[rows]  # type: ignore[no-untyped-call]
        else:
            part = file.get_slice(entry.key)  # type: ignore[no-untyped-call]
            tensor = part[rows, slice(*columns)]
        self.num_bytes_read += tensor.nbytes
        return tensor

    def _read_headers(self, folder: Path) -> dict[str, StoredTensor]:
        """Returns the tensors of all files by their names in a model of text."""
        entries: dict[str, StoredTensor] = {}
        num_others = 0
        for stored in stored_tensors(folder):
            name = self._known_name(stored.key)
            num_others += self._config.is_text_part and is_of_other_part(stored.key)
            if name is None:
                continue
            if name in entries:
                raise UnsupportedModelError(f"{name} is in {entries[name].path.name} and again")
            entries[name] = stored
        if num_others:
            logger.info("%d tensors of the part for images are left unread", num_others)
        return entries

    def _known_name(self, key: str) -> str | None:
        """Returns the name of a tensor in a model of text; None: no text needs it."""
        name = key
        if self._config.is_text_part:
            if is_of_other_part(key):
                return None
            name = canonical(key)
        if _HARMLESS.fullmatch(name):
            return None
        if self._config.quantization is not None and _OF_ACTIVATIONS.fullmatch(name):
            return None
        return name

    def _sort(self, entries: dict[str, StoredTensor]) -> None:
        """Finds the form of each expected tensor among the entries, which are used up."""
        if self._config.ties_embeddings:
            self._take_tied_head(entries)
        by_module: dict[str, set[str]] = {}
        for name in entries:
            for i, letter in enumerate(name):
                if letter == ".":
                    by_module.setdefault(name[:i], set()).add(name[i + 1 :])
        expected = expected_shapes(self._config)
        missing: list[str] = []
        for name, shape in expected.items():
            module = name.removesuffix(".weight")
            is_matrix = module != name and len(shape) == 2
            scheme = self._config.scheme_of(module) if is_matrix else None
            dtypes = {part: entries[f"{module}.{part}"].dtype for part in by_module.get(module, ())}
            if scheme is not None and is_quantized(scheme, dtypes):
                self._quantized[name] = self._take(module, scheme, shape, entries)
                self._take_empty_bias(module, expected, entries)
            elif (entry := entries.pop(name, None)) is not None:
                _check(entry, Part((shape,), FLOATS))
                self._plain[name] = entry
            else:
                missing.append(name if scheme is None else f"{module}.{main_part(scheme)}")
        # Without a quantization, quantized parts are unknown and show more than a missing weight.
        if not missing or self._config.quantization is None:
            for entry in entries.values():
                raise UnsupportedModelError(
                    f"{entry.path.name} holds {entry.key}, which is unknown"
                )
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            parts = ", ".join(sorted(by_module.get(missing[0].removesuffix(".weight"), ())))
            more += f" is missing; the files have its {parts}" if parts else " is missing"
            raise UnsupportedModelError(f"tensor {missing[0]}{more}")

    def _take(
        self, module: str, scheme: Scheme, shape: tuple[int, ...], entries: dict[str, StoredTensor]
    ) -> _Weight:
        """Takes the parts of a quantized weight out of the entries, checked."""
        rows, columns = shape
        prefix = f"{module}."
        present = {name.removeprefix(prefix) for name in entries if name.startswith(prefix)}
        try:
            wanted = parts_of(scheme, (rows, columns), present)
            found: dict[str, StoredTensor] = {}
            for name, part in wanted.items():
                entry = entries.pop(prefix + name, None)
                if entry is not None:
                    _check(entry, part)
                    found[name] = entry
                elif part.is_required:
                    raise UnsupportedModelError(f"tensor {prefix}{name} is missing")
            check_parts(
                scheme,
                (rows, columns),
                lambda name: self._read(found[name]) if name in found else None,
            )
        except StoredError as error:
            raise UnsupportedModelError(f"{prefix}{error.part} {error.reason}") from None
        return _Weight(scheme, (rows, columns), found)

    def _take_tied_head(self, entries: dict[str, StoredTensor]) -> None:
        """Drops a head that is the embedding; alone, it is the embedding. Of another one, some
        tools compute the logits, as transformers 5, and others do not: the files do not tell."""
        self._take_empty_bias("lm_head", {}, entries)  # of other values, it is unknown
        heads = [n for n in entries if n.startswith("lm_head.") and n != "lm_head.bias"]
        places = {name: name.replace("lm_head", "model.embed_tokens") for name in heads}
        embeddings = {name for name in entries if name.startswith("model.embed_tokens.")}
        for name, place in places.items():
            stored = entries.pop(name)
            if not embeddings and len(heads) == 1:
                entries[place] = stored
            elif embeddings != {*places.values()} or not self._are_equal(stored, entries[place]):
                raise UnsupportedModelError(
                    f"{stored.path.name} holds {stored.key}, which is not the embedding, although "
                    "tie_word_embeddings is true: set it to false in config.json if this is the "
                    "head, otherwise remove the tensor"
                )

    def _are_equal(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Returns True for equal numbers, be they floats of two types."""
        are_floats = {one.dtype, other.dtype} <= {*FLOATS}
        if one.shape != other.shape or not (are_floats or one.dtype == other.dtype):
            return False
        rows: Iterable[slice | None] = (None,)
        if len(one.shape) == 2:
            step = max(_SLICE_ELEMENTS // max(one.shape[1], 1), 1)
            rows = (slice(first, first + step) for first in range(0, one.shape[0], step))
        return all(bool((self._read(one, r) == self._read(other, r)).all()) for r in rows)

    def _take_empty_bias(
        self, module: str, expected: Mapping[str, object], entries: dict[str, StoredTensor]
    ) -> None:
        """Drops a bias of zeros, which tools store beside quantized weights of models that have
        none."""
        name = f"{module}.bias"
        entry = entries.get(name)
        if entry is not None and name not in expected and not bool(self._read(entry).any()):
            del entries[name]


def _row_slices(shape: tuple[int, int], cut: Cut) -> Iterator[tuple[slice, slice, slice]]:
    """Yields the rows of a part of a weight in slices: their place in the part, the rows of the
    weight to compute, which begin and end at multiples, and the wanted ones among these."""
    num_rows, columns = shape
    step = max(_SLICE_ELEMENTS // columns // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    begin = 0
    for start, end in cut.rows or ((0, num_rows),):
        for first in range(start // ROW_MULTIPLE * ROW_MULTIPLE, end, step):
            last = min(first + step, num_rows, -(-end // ROW_MULTIPLE) * ROW_MULTIPLE)
            own = slice(max(0, start - first), min(last, end) - first)
            count = own.stop - own.start
            yield slice(begin, begin + count), slice(first, last), own
            begin += count


def base_reader(folder: Path, config: ModelConfig) -> Callable[[str], torch.Tensor | None]:
    """Returns a function that reads a parameter of the base by its name, from any thread, one at a
    time; None: there is none. The files are looked at when it is first called."""
    opened = lru_cache(1)(partial(Checkpoint, folder, config))
    newest = lru_cache(1)(lambda name: opened().read(name))
    # The parameters that a caller still holds, whatever other threads read meanwhile.
    held: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
    lock = threading.Lock()

    def base(name: str) -> torch.Tensor | None:
        if name == "lm_head.weight" and config.ties_embeddings:
            name = "model.embed_tokens.weight"  # the same tensor: that is how a tied head is known
        with lock:
            parameter = held.get(name)
            if parameter is None and (parameter := newest(name)) is not None:
                held[name] = parameter
            return parameter

    return base


def _check(entry: StoredTensor, part: Part) -> None:
    if part.shapes and entry.shape not in part.shapes:
        shapes = " or ".join(str(list(shape)) for shape in part.shapes)
        raise UnsupportedModelError(
            f"{entry.key} has shape {list(entry.shape)}, config.json makes it {shapes}"
        )
    if entry.dtype not in part.dtypes:
        raise UnsupportedModelError(
            f"{entry.key} has type {entry.dtype}, known are {', '.join(part.dtypes)}"
        )
