"""Packs the files of adapters for a pool, and repeats the copies of the first of each form.

Adapters of one training recipe have files with the same header and configurations that differ by a
scale at most. All checks but those of the numbers depend on these and on the base alone. So the
first file of a form is checked and packed in full, and its copies are kept as a plan. Later ones
are read in one pass and copied by the plan: on a CUDA device by the device itself, from the buffer
of the file to the image, both page-locked. Anything unusual takes the full way again, which gives
the reason of a refusal.

    84 MB, an H100, 16 cores: the full way 65 ms, of which 20 to 25 need the interpreter, and no
    more than 17 adapters a second in any number of threads; by a plan 9 ms, the device's part 2.2

Any thread may call it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import numpy as np
import torch

from kernels.lora_strips import copy_strips
from kernels.strip_copies import FIELDS, StripCopies, StripCopy
from lora.adapter import WEIGHTS_FILE, Adapter, read_adapter
from lora.adapter_keys import spelling_in
from lora.convert import RowsCopy
from lora.errors import AdapterError
from lora.header import (
    FILE_TYPES,
    BufferLayout,
    ReadBuffer,
    TensorFile,
    read_header,
    read_header_text,
)
from lora.module_names import Spelling
from lora.page_image import PackedAdapter
from lora.peft_config import parse_peft_config, read_fields
from lora.pool import AdapterPool
from lora.sites import Site
from lora.untrusted import open_regular
from lora.vectors import BaseParameter

logger = logging.getLogger(__name__)

_MAX_PLANS = 64
# Of a configuration: lora_alpha changes scales alone, the others nothing.
_NO_STRUCTURE = (
    "lora_alpha",
    "lora_dropout",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
)
# Lists that PEFT saves from sets: their order is another one in each training process.
_SETS = ("target_modules", "exclude_modules")


@dataclass(frozen=True, slots=True)
class FileForm:
    """All that the structure of an adapter depends on, but for the base."""

    texts: bytes  # the SHA-256 of the configuration and the header
    data_start: int
    num_bytes: int  # of the file of weights


@dataclass(frozen=True, slots=True, eq=False)
class PackingPlan:
    """The reads and copies that pack every file of a form."""

    layout: BufferLayout
    dtype: torch.dtype  # of the file
    copies: StripCopies
    spelling: Spelling  # of the modules' names in the configuration
    modules: tuple[str, ...]
    # Of each strip the place of its scale: 1 + its module's, or 0 without one.
    scale_indices: np.ndarray[tuple[int], np.dtype[np.int64]]
    packed: PackedAdapter  # the result but for its digest and memory
    num_bytes: int  # of its memory


class FilePacker:
    def __init__(
        self,
        pool: AdapterPool,
        sites: Sequence[Site],
        max_rank: int,
        base: BaseParameter,
        *,
        has_plans: bool = True,
    ) -> None:
        """`sites`, `max_rank`, `base`: as of `read_adapter`. `has_plans`: for one rank, on a CUDA
        device with Triton; a CPU makes the copies no faster by a plan."""
        self._pool, self._sites, self._max_rank, self._base = pool, sites, max_rank, base
        self._has_plans = has_plans and not pool.is_int8
        # None: of a form whose adapters have more than A and B.
        self._plans: OrderedDict[FileForm, PackingPlan | None] = OrderedDict()
        self._lock = threading.Lock()

    def make_buffer(self) -> ReadBuffer:
        """Returns a buffer for `pack`, with room for a file of rank 16 at all usual sites: it is in
        16 bits also where the pool is in int8."""
        return ReadBuffer(
            self._pool.page_bytes * (2 if self._pool.is_int8 else 1),
            is_pinned=self._has_plans and self._pool.device.type == "cuda",
        )

    def pack(self, digest: str, path: Path, buffer: ReadBuffer) -> PackedAdapter:
        """Reads, checks and packs the adapter of a folder, through the buffer. Raises
        AdapterError. On a CUDA device it is packed when the call returns."""
        form, by_plan = self._try_plan(path, buffer) if self._has_plans else (None, None)
        if by_plan is not None:
            return replace(by_plan, digest=digest)
        adapter = read_adapter(path, digest, self._sites, self._max_rank, self._base, buffer)
        packed = self._pool.pack(adapter)
        if form is not None and form not in self._plans:
            try:
                self._keep(form, self._plan(form, path, adapter, packed, buffer))
            except (OSError, AdapterError, RuntimeError) as error:  # the adapter itself is packed
                logger.warning("no plan for files like that of adapter %s: %s", digest, error)
        return packed

    def _try_plan(
        self, path: Path, buffer: ReadBuffer
    ) -> tuple[FileForm | None, PackedAdapter | None]:
        """Returns the form of the files, and the adapter if there is a plan for it; None where the
        files are not as they should be, for which the full way gives the reason."""
        form = None
        try:
            with suppress(OSError, AdapterError), open_regular(path / WEIGHTS_FILE) as file:
                fields = read_fields(path)
                form = _form_of(fields, file)
                plan = self._find(form)
                if plan is not None:
                    return form, self._pack_by_plan(plan, form, fields, file, buffer)
        except RuntimeError as error:  # the device may lack memory, which the full way needs not
            logger.warning("an adapter is packed without the plan of its form: %s", error)
        return form, None

    def _find(self, form: FileForm) -> PackingPlan | None:
        with self._lock:
            if form in self._plans:
                self._plans.move_to_end(form)
            return self._plans.get(form)

    def _pack_by_plan(
        self,
        plan: PackingPlan,
        form: FileForm,
        fields: dict[str, object],
        file: FileIO,
        buffer: ReadBuffer,
    ) -> PackedAdapter | None:
        """Returns None if the numbers need a closer look, or if no device can read the buffer."""
        pool, limit = self._pool, torch.finfo(torch.float32).max
        config = replace(parse_peft_config(fields), spelling=plan.spelling)
        scales = [1.0, *map(config.scale_of, plan.modules)]
        most = max(map(abs, scales))
        data = buffer.take(plan.layout.num_bytes)
        if not most <= limit or (pool.device.type == "cuda" and not buffer.is_pinned):
            return None
        TensorFile(WEIGHTS_FILE, file, {}, form.data_start).fill(data, plan.layout)
        packed = replace(plan.packed, memory=pool.allocate_host(plan.num_bytes))
        of_strips = np.array(scales, np.float32)[plan.scale_indices]
        largest = copy_strips(
            packed.image.view(pool.dtype),
            data.view(plan.dtype),
            plan.copies,
            torch.from_numpy(of_strips).to(pool.device),
        )
        # The device has made the copies once the number is here. Rounded up, as the bound of
        # `ModuleWeights`.
        if not float(largest) * most * (1 + 1e-6) <= torch.finfo(pool.dtype).max:
            return None
        return packed

    def _keep(self, form: FileForm, plan: PackingPlan | None) -> None:
        with self._lock:
            self._plans[form] = plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)

    def _plan(
        self,
        form: FileForm,
        path: Path,
        adapter: Adapter,
        packed: PackedAdapter,
        buffer: ReadBuffer,
    ) -> PackingPlan | None:
        """Returns None if the adapter is not A and B of the file and nothing else."""
        if adapter.num_unread or any(one.affine is not None for one in adapter.modules.values()):
            return None
        with open_regular(path / WEIGHTS_FILE) as file:
            if form != _form_of(read_fields(path), file):
                raise AdapterError("the files have changed")
            file.seek(0)
            weights = read_header(file, WEIGHTS_FILE)
        if adapter.num_tensors != len(weights.entries):
            return None
        layout = weights.lay_out(weights.entries)
        if layout.dtype is None or not buffer.keeps(layout.num_bytes):
            return None
        start = buffer.take(layout.num_bytes).data_ptr()
        end = start + layout.num_bytes
        modules = {module: 1 + number for number, module in enumerate(adapter.modules)}
        strips: list[StripCopy] = []
        scale_indices: list[int] = []
        for strip, copy in self._pool.copies(adapter, packed):
            if not (start <= copy.numbers.data_ptr() < end and copy.numbers.dtype == layout.dtype):
                return None  # made from the file, as rows of trained tokens
            strips.append(_strip_copy(copy, start, packed.memory.data_ptr()))
            scale_indices.append(modules[strip.module] if strip.side == "b" else 0)
        return PackingPlan(
            replace(layout, starts={}),
            layout.dtype,
            StripCopies.of(strips, self._pool.device),
            spelling_in(weights.entries),
            tuple(modules),
            np.array(scale_indices, np.int64),
            replace(packed, memory=torch.empty(0, dtype=torch.uint8)),
            packed.num_bytes,
        )


def trace_copies(dtype: torch.dtype) -> None:
    """Records the kernels that a packer for a pool of this type launches, on the meta device."""
    meta = torch.device("meta")
    places = torch.empty((1, FIELDS), dtype=torch.int64, device=meta)
    tiles = torch.empty((2, 2), dtype=torch.int32, device=meta)
    image, scales = torch.empty(1, dtype=dtype, device=meta), torch.empty(1, device=meta)
    for file_type in FILE_TYPES:
        source = torch.empty(1, dtype=file_type, device=meta)
        for is_aligned in (False, True):
            copy_strips(image, source, StripCopies(places, tiles, is_aligned), scales)


def _form_of(fields: dict[str, object], file: FileIO) -> FileForm:
    """`fields`: of the configuration. `file`: of weights. Raises AdapterError if the header is not
    complete."""
    header, num_bytes = read_header_text(file, WEIGHTS_FILE)
    # The order of the fields has no meaning; that of patterns in one has.
    kept = sorted(field for field in fields.items() if field[0] not in _NO_STRUCTURE)
    kept = [(name, _sorted(value) if name in _SETS else value) for name, value in kept]
    texts = hashlib.sha256(json.dumps(kept).encode() + b"\n" + header)
    return FileForm(texts.digest(), 8 + len(header), num_bytes)


def _sorted(value: object) -> object:
    """Returns the items of a list as texts in order, which items of any types have; other values as
    they are."""
    return sorted(map(json.dumps, value)) if isinstance(value, list) else value


def _strip_copy(copy: RowsCopy, source: int, image: int) -> StripCopy:
    """`source`, `image`: addresses of the buffer and of the packed adapter's memory."""
    numbers, rows = copy.numbers, copy.rows
    (row_stride, column_stride), size = numbers.stride(), numbers.element_size()
    return StripCopy(
        (numbers.data_ptr() - source) // size,
        row_stride,
        column_stride,
        numbers.shape[0],
        numbers.shape[1],
        rows.shape[1],
        (rows.data_ptr() - image) // rows.element_size(),
    )
