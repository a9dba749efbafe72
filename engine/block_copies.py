"""Copies of whole KV blocks between the device and page-locked host memory.

    device [blocks, bytes of a block] <--copy engine, side stream--> host [slots, bytes of a block]

On CUDA all copies, of both directions, are on one stream, in the order of the calls: a block that
is read for a store is written by a later load in this order, too. A copy begins after all steps
that were launched before the call; steps that are launched later wait for a copy only after
`hold_steps`. On a CPU a copy has ended when the call returns. One thread calls it. CUDA's copy
engines are used and no kernel: multiprocessors are left to the steps.

A load in parts copies columns, the layers of a part in all blocks, then those of the next part:

    block | K of layers 0 1 2 3 ... | V of layers 0 1 2 3 ... |
            ^^^ part 0               ^^^ part 0
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from engine.column_copies import Columns, copy_columns
from engine.config import EngineConfig
from engine.errors import EngineMemoryError, UnsupportedModelError
from engine.host_blocks import BlockCopier, BlockCopy
from engine.kv_cache import KVCache
from lora.pinned_memory import map_memory, register

if TYPE_CHECKING:
    from engine.parallel.group import Group

logger = logging.getLogger(__name__)

# Of a load whose step computes meanwhile: the step then ends an eighth of its time after the last
# copy. More parts are more calls, one for each run of blocks and part, and graphs.
_NUM_PARTS = 8


@dataclass(frozen=True, slots=True)
class _Done:
    took_s: float

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing: the copy has ended."""

    def seconds(self) -> float:
        return self.took_s


class CpuBlockCopier:
    def __init__(self, blocks: torch.Tensor, host: torch.Tensor) -> None:
        """`blocks`: [blocks, bytes], `host`: [slots, bytes], both uint8."""
        self._blocks, self._host = blocks, host
        self.num_slots, self.block_bytes = host.shape

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> BlockCopy:
        return self._copy(self._blocks, blocks, self._host, slots)

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, in_parts: bool = False
    ) -> BlockCopy:
        return self._copy(self._host, slots, self._blocks, blocks)

    def hold_steps(self, copy: BlockCopy) -> None:
        """Does nothing: the copy has ended."""

    def _copy(
        self, source: torch.Tensor, rows: Sequence[int], to: torch.Tensor, places: Sequence[int]
    ) -> BlockCopy:
        began_s = time.perf_counter()
        _copy_rows(source, rows, to, places)
        return _Done(time.perf_counter() - began_s)


@dataclass(frozen=True, slots=True)
class _CudaCopy:
    begin: torch.cuda.Event
    end: torch.cuda.Event
    parts: tuple[tuple[int, torch.cuda.Event], ...] = ()  # first layers and ends; none: in one

    def query(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.end.synchronize()

    def seconds(self) -> float:
        return float(self.begin.elapsed_time(self.end)) / 1000


class CudaBlockCopier(CpuBlockCopier):
    """Steps are launched on the stream that is current in each call."""

    def __init__(self, kv: KVCache, host: torch.Tensor) -> None:
        """`host`: as `allocate_slots` returns it."""
        assert kv.blocks is not None
        super().__init__(kv.blocks, host)
        self._arrivals = kv.arrivals
        self._parts = layer_parts(kv)
        self._stream = torch.cuda.Stream(kv.blocks.device)  # type: ignore[no-untyped-call]

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, in_parts: bool = False
    ) -> BlockCopy:
        if not (in_parts and self._parts):
            return super().load(slots, blocks)
        begin = self._begin()
        runs = tuple(runs_of(slots, blocks))
        parts: list[tuple[int, torch.cuda.Event]] = []
        for part in self._parts:
            for slot, block, count in runs:
                copy_columns(
                    self._host[slot : slot + count],
                    self._blocks[block : block + count],
                    part.columns,
                    self._stream.cuda_stream,
                )
            parts.append((part.first_layer, self._mark()))
        return _CudaCopy(begin, parts[-1][1], tuple(parts))

    def hold_steps(self, copy: BlockCopy) -> None:
        assert isinstance(copy, _CudaCopy)
        # A step writes K and V of a layer before it waits for the layer's part: it would overtake
        # the stores before the load, for which other ranks get no message of their own.
        awaited = copy.begin if copy.parts else copy.end
        torch.cuda.current_stream(self._blocks.device).wait_event(awaited)
        if copy.parts:
            self._arrivals.expect(copy.parts)

    def _copy(
        self, source: torch.Tensor, rows: Sequence[int], to: torch.Tensor, places: Sequence[int]
    ) -> BlockCopy:
        begin = self._begin()
        with torch.cuda.stream(self._stream):
            _copy_rows(source, rows, to, places)
        return _CudaCopy(begin, self._mark())

    def _begin(self) -> torch.cuda.Event:
        """Returns the begin of a copy that follows all steps launched so far."""
        steps = torch.cuda.Event()  # type: ignore[no-untyped-call]
        steps.record(torch.cuda.current_stream(self._blocks.device))
        self._stream.wait_event(steps)
        return self._mark()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _copy_rows(
    source: torch.Tensor, rows: Sequence[int], to: torch.Tensor, places: Sequence[int]
) -> None:
    for row, place, count in runs_of(rows, places):
        to[place : place + count].copy_(source[row : row + count], non_blocking=True)


@dataclass(frozen=True, slots=True)
class _GroupCopy:
    """A copy of all ranks. Its end on the first rank counts as its end on the others for work
    that is launched after the caller has seen it."""

    own: BlockCopy
    note_end: Callable[[], None]

    def query(self) -> bool:
        if not self.own.query():
            return False
        self.note_end()
        return True

    def synchronize(self) -> None:
        self.own.synchronize()
        self.note_end()

    def seconds(self) -> float:
        return self.own.seconds()


class GroupBlockCopier:
    """The first rank's copies, which the other ranks repeat in the order of the steps."""

    def __init__(self, own: BlockCopier, group: Group) -> None:
        self._own, self._group = own, group
        self.num_slots, self.block_bytes = own.num_slots, own.block_bytes
        self._num_copies = 0
        self._num_held = 0  # copies for which the other ranks' steps wait from now on

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> BlockCopy:
        self._group.send({"do": "store", "blocks": list(blocks), "slots": list(slots)})
        return self._copy(self._own.store(blocks, slots))

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, in_parts: bool = False
    ) -> BlockCopy:
        message = {"do": "load", "blocks": list(blocks), "slots": list(slots)}
        self._group.send(message | {"in_parts": in_parts})
        return self._copy(self._own.load(slots, blocks, in_parts=in_parts))

    def hold_steps(self, copy: BlockCopy) -> None:
        assert isinstance(copy, _GroupCopy)
        self._own.hold_steps(copy.own)
        copy.note_end()

    def _copy(self, own: BlockCopy) -> BlockCopy:
        self._num_copies += 1
        return _GroupCopy(own, partial(self._hold_others, self._num_copies))

    def _hold_others(self, number: int) -> None:
        """Has the next steps of the other ranks wait for the copy of this number, and so for all
        before it: each rank's copies end in their order."""
        if number > self._num_held:
            self._num_held = number
            self._group.send({"do": "hold", "number": number})


class FollowerBlockCopier:
    """Another rank's copies."""

    def __init__(self, own: BlockCopier) -> None:
        self._own = own
        self._copies: deque[BlockCopy] = deque()  # for which no step waits yet
        self._num_held = 0

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._copies.append(self._own.store(blocks, slots))

    def load(self, slots: Sequence[int], blocks: Sequence[int], *, in_parts: bool) -> None:
        self._copies.append(self._own.load(slots, blocks, in_parts=in_parts))

    def hold_steps(self, number: int) -> None:
        """Has every step that is launched from now on begin after the copy of this number."""
        while self._num_held < number:
            copy = self._copies.popleft()
            self._num_held += 1
            if self._num_held == number:
                self._own.hold_steps(copy)


@dataclass(frozen=True, slots=True)
class LayerPart:
    first_layer: int
    columns: Columns  # of K, and of V in the row after it


def layer_parts(kv: KVCache) -> tuple[LayerPart, ...]:
    """Returns the parts of a load, first layers first; none where layers of two groups share
    blocks, in other places of each."""
    assert kv.blocks is not None, "blocks are copied whole"
    if any(kv.table_of) or not kv.k:
        return ()
    pitch, num_layers = kv.blocks.shape[1] // 2, len(kv.k)
    layer_bytes, num_parts = pitch // num_layers, min(_NUM_PARTS, num_layers)
    bounds = [num_layers * part // num_parts for part in range(num_parts + 1)]
    return tuple(
        LayerPart(first, Columns(pitch, first * layer_bytes, (end - first) * layer_bytes))
        for first, end in pairwise(bounds)
    )


def first_layers(kv: KVCache) -> tuple[int, ...]:
    """Returns the first layer of each part of a load; none if loads are whole."""
    return () if kv.blocks is None else tuple(part.first_layer for part in layer_parts(kv))


def runs_of(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields runs of consecutive pairs: the first pair of each, and its length. A run is a copy."""
    pairs = list(zip(first, second, strict=True))
    starts = [0]
    for index, ((a, b), (next_a, next_b)) in enumerate(pairwise(pairs), 1):
        if (next_a, next_b) != (a + 1, b + 1):
            starts.append(index)
    for start, stop in pairwise([*starts, len(pairs)]):
        yield (*pairs[start], stop - start)


def check_host_tier(config: EngineConfig, block_bytes: int) -> None:
    """Raises UnsupportedModelError for a host tier that the engine cannot have. `block_bytes`: of
    a KV block on each rank."""
    if not config.kv_host_bytes:
        return
    asked, size = f"kv_host_bytes is {config.kv_host_bytes}", config.tensor_parallel_size
    if not config.enable_prefix_caching:
        raise UnsupportedModelError(
            f"{asked}, and enable_prefix_caching is False: blocks on the host are found by their "
            "prefixes"
        )
    if config.kv_host_bytes // size < block_bytes:
        where = f" on each of {size} ranks" if size > 1 else ""
        raise UnsupportedModelError(f"{asked}, and a KV block has {block_bytes} bytes{where}")


def allocate_slots(num_bytes: int, kv: KVCache) -> torch.Tensor:
    """Returns as many slots of host memory as have room in so many bytes, [slots, bytes of a block]
    uint8, page-locked for a CUDA device. Raises EngineMemoryError if the memory cannot be
    locked."""
    assert kv.blocks is not None, "blocks are copied whole"
    block_bytes = kv.blocks.shape[1]
    num_slots = num_bytes // block_bytes
    if kv.blocks.device.type != "cuda":
        # Zeros are free on the CPU: the system allocates pages when they are first written.
        return torch.zeros((num_slots, block_bytes), dtype=torch.uint8)
    began_s = time.perf_counter()
    whole = map_memory(num_slots * block_bytes)
    whole.zero_()  # by all threads; registering alone would touch the pages one by one
    slots = whole.view(num_slots, block_bytes)
    try:
        register(slots)
    except RuntimeError as error:
        raise EngineMemoryError(
            f"kv_host_bytes: {whole.numel()} bytes cannot be page-locked: {error}"
        ) from error
    logger.info(
        "host memory for %d KV blocks, %.3f GiB, page-locked in %.1f s",
        num_slots,
        whole.numel() / 1024**3,
        time.perf_counter() - began_s,
    )
    return slots


def open_block_copies(config: EngineConfig, kv: KVCache, group: Group | None) -> BlockCopier | None:
    """Returns the copies to the host tier, or None if the configuration has none."""
    if not config.kv_host_bytes:
        return None
    host = allocate_slots(config.kv_host_bytes // config.tensor_parallel_size, kv)
    assert kv.blocks is not None
    is_cuda = kv.blocks.device.type == "cuda"
    own = CudaBlockCopier(kv, host) if is_cuda else CpuBlockCopier(kv.blocks, host)
    return own if group is None else GroupBlockCopier(own, group)
