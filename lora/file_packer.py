"""Packs the files of adapters for a pool, and repeats the copies of the first of each form.

Adapters of one training recipe have files with the same header and the same configuration, and all
checks but those of the numbers depend on these and on the base alone. So the first file of a form
is checked and packed in full, and its copies are kept as a plan. Later ones are read in one pass
and copied by the plan: on a CUDA device by the device itself, from the buffer of the file to the
image, both page-locked. Anything unusual takes the full way again, which gives the reason of a
refusal.

    84 MB, an H100, 16 cores: the full way 65 ms, of which 20 to 25 need the interpreter, and no
    more than 17 adapters a second in any number of threads

Any thread may call it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels.lora_strips import FIELDS, StripCopies, StripCopy, copy_strips
from lora.adapter import WEIGHTS_FILE, Adapter, open_weights, read_adapter
from lora.convert import RowsCopy
from lora.errors import AdapterError
from lora.header import FILE_TYPES, BufferLayout, ReadBuffer, TensorFile, read_header_text
from lora.page_image import PackedAdapter
from lora.peft_config import read_config_text
from lora.pool import AdapterPool
from lora.sites import Site
from lora.untrusted import open_regular
from lora.vectors import BaseParameter

_MAX_PLANS = 32


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
    copies: StripCopies
    largest: float  # magnitude of a number that fits into the image, with any scale of the file
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
        device; a CPU makes the copies no faster by a plan."""
        self._pool, self._sites, self._max_rank, self._base = pool, sites, max_rank, base
        self._has_plans = has_plans and not pool.is_int8
        self._plans: OrderedDict[FileForm, PackingPlan] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_plans(self) -> int:
        return len(self._plans)

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
        form = _form_of(path) if self._has_plans else None
        if form is not None and (packed := self._pack_by_plan(form, digest, path, buffer)):
            return packed
        adapter = read_adapter(path, digest, self._sites, self._max_rank, self._base, buffer)
        packed = self._pool.pack(adapter)
        if form is not None and form == _form_of(path):
            self._learn(form, path, adapter, packed, buffer)
        return packed

    def _pack_by_plan(
        self, form: FileForm, digest: str, path: Path, buffer: ReadBuffer
    ) -> PackedAdapter | None:
        """Returns None if there is no plan, or if the numbers need a closer look."""
        with self._lock:
            plan = self._plans.get(form)
            if plan is None:
                return None
            self._plans.move_to_end(form)
        if self._pool.device.type == "cuda" and not buffer.is_pinned:
            return None
        data = buffer.take(plan.layout.num_bytes)
        with open_regular(path / WEIGHTS_FILE) as file:
            TensorFile(WEIGHTS_FILE, file, {}, form.data_start).fill(data, plan.layout)
        memory = self._pool.allocate_host(plan.num_bytes)
        image = memory[: plan.num_bytes - 8 * plan.packed.entries.numel()].view(self._pool.dtype)
        assert plan.layout.dtype is not None
        largest = copy_strips(image, data.view(plan.layout.dtype), plan.copies)
        # The device has made the copies once the number is here.
        if not float(largest) <= plan.largest:
            return None
        return replace(plan.packed, digest=digest, memory=memory)

    def _learn(
        self,
        form: FileForm,
        path: Path,
        adapter: Adapter,
        packed: PackedAdapter,
        buffer: ReadBuffer,
    ) -> None:
        """Keeps the plan of a form whose adapters are A and B of the file and nothing else."""
        with open_weights(path) as file:
            if adapter.num_tensors != len(file.entries) or adapter.num_unread:
                return
            layout = file.lay_out(file.entries)
        if layout.dtype is None or not buffer.keeps(layout.num_bytes):
            return
        start = buffer.take(layout.num_bytes).data_ptr()
        end = start + layout.num_bytes
        found: list[StripCopy] = []
        for copy in self._pool.copies(adapter, packed):
            if not (start <= copy.numbers.data_ptr() < end and copy.numbers.dtype == layout.dtype):
                return  # made from the file: DoRA's gains, rows of trained tokens
            found.append(_strip_copy(copy, start, packed.memory.data_ptr()))
        # Rounded up, as the bound of `ModuleWeights`.
        scale = max(1.0, *(abs(copy.scale) for copy in found)) * (1 + 1e-6)
        plan = PackingPlan(
            layout,
            StripCopies.of(found, self._pool.device),
            torch.finfo(self._pool.dtype).max / scale if math.isfinite(scale) else -1.0,
            replace(packed, memory=torch.empty(0, dtype=torch.uint8)),
            packed.num_bytes,
        )
        with self._lock:
            self._plans[form] = plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)


def trace_copies(dtype: torch.dtype) -> None:
    """Records the kernels that a packer for a pool of this type launches, on the meta device."""
    meta = torch.device("meta")
    places = torch.empty((1, FIELDS), dtype=torch.int64, device=meta)
    tiles = torch.empty((2, 2), dtype=torch.int32, device=meta)
    image = torch.empty(1, dtype=dtype, device=meta)
    for file_type in FILE_TYPES:
        source = torch.empty(1, dtype=file_type, device=meta)
        for is_aligned in (False, True):
            copy_strips(image, source, StripCopies(places, tiles, is_aligned))


def _form_of(path: Path) -> FileForm | None:
    """Returns None for files that `read_adapter` refuses."""
    try:
        config = read_config_text(path)
        with open_regular(path / WEIGHTS_FILE) as file:
            header, num_bytes = read_header_text(file, WEIGHTS_FILE)
    except (OSError, AdapterError):
        return None
    texts = hashlib.sha256(len(config).to_bytes(8, "little") + config + header)
    return FileForm(texts.digest(), 8 + len(header), num_bytes)


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
        copy.scale,
    )
