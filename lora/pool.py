"""Adapters in memory: all loaded adapters packed on the host, those in use in blocks on the device.

An adapter takes as many blocks of the heap as its rows fill, at the sites that it has. On a CPU
an adapter is copied when it is acquired; on CUDA copies run while steps run, and the caller must
ask again. Uses digests and tensors; free of adapter names, requests and files. One thread calls it,
except for `pack`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from kernels.lora_rows import SiteRows
from lora.adapter import Adapter
from lora.blocks import BlockTable
from lora.copies import AdapterCopies, Copier, CudaCopier, Event
from lora.errors import AdapterNotLoadedError, HostMemoryError
from lora.heap import AdapterHeap, Deltas
from lora.page_image import AFFINE as AFFINE
from lora.page_image import PAGE_ROWS as PAGE_ROWS
from lora.page_image import PackedAdapter, PageLayout
from lora.pinned_memory import PinnedMemory
from lora.pins import check_pin, check_room_beside
from lora.resident import Resident
from lora.sites import Site

_NEWEST_COPY = 0.1  # weight of the newest copy in the mean
_WATCHED_S = 0.1  # a copy is timed only if two polls are closer than this
# Copies slow down the steps beside them: in flight are at most four adapters of rank 16 on all
# linear layers, or one that is larger.
_MAX_PAGES_FLYING = 4


class AdapterPool:
    def __init__(
        self,
        sites: Sequence[Site],
        bytes_budget: int,
        dtype: torch.dtype,
        device: torch.device | str,
        host_bytes: int,
        stream: torch.cuda.Stream | None = None,
        copier: Copier | None = None,
        *,
        has_affine: bool = True,
    ) -> None:
        """`stream`: the CUDA stream of the steps; None: the stream that is current in each call.
        `copier`: None selects the device's, none on a CPU. `has_affine`: also for adapters with
        affine rows, as DoRA and biases need."""
        self.dtype = dtype
        self.device = torch.device(device)
        self._layout = PageLayout(sites, dtype, has_affine=has_affine)
        self._table = BlockTable(bytes_budget // self._layout.bytes_per_block)
        self._heap = AdapterHeap(sites, self._layout, self._table.num_blocks, self.device)
        if copier is None and self.device.type == "cuda":
            copier = CudaCopier(self.device, stream, _MAX_PAGES_FLYING * self.page_bytes)
            torch.cuda.synchronize(self.device)  # the table's zeros are written before any copy
        self._copier = copier
        self._copies = AdapterCopies(copier) if copier is not None else None
        # The ends of the last steps that read idle adapters, and of the last that read a block
        # which is free now or was since: marks of a later time include the earlier ones.
        self._read_until: dict[str, tuple[int, Event]] = {}
        self._free_from: tuple[int, Event] | None = None
        self._num_marks = 0
        self._deltas: dict[str, Deltas] = {}  # of adapters on the device, made when first used
        # In flight to the device, and since when; the pool itself holds their references.
        self._arriving: dict[str, float] = {}
        self._copy_s = 0.0
        self._polled_s = 0.0
        self._wanted: frozenset[str] = frozenset()  # adapters that the next sequences need
        self._protected: frozenset[str] = frozenset()  # not dropped by insertions
        # A device copies from page-locked memory on its own; a CPU needs none of that.
        is_cuda = self.device.type == "cuda"
        spare_bytes = min(self._layout.page_bytes, host_bytes)
        pinned = PinnedMemory(host_bytes, spare_bytes) if is_cuda else None
        self._allocate_host = pinned.allocate if pinned else _allocate
        self._host: OrderedDict[str, PackedAdapter] = OrderedDict()  # least recently used first
        self._host_limit = host_bytes
        self._host_bytes = 0
        self._used_s: dict[str, float] = {}  # last use of adapters on the host
        self._num_copied = 0  # copies to the device
        self._leaving: set[str] = set()  # removed while referenced

    @property
    def num_blocks(self) -> int:
        return self._table.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._table.num_free

    @property
    def serves_affine(self) -> bool:
        """Returns whether adapters may have affine rows."""
        return self._layout.has_affine

    @property
    def page_bytes(self) -> int:
        """The bytes on the device of an adapter of rank 16 at all sites but the optional."""
        return self._layout.page_bytes

    @property
    def device_bytes_used(self) -> int:
        return (self.num_blocks - self.num_free_blocks) * self._layout.bytes_per_block

    @property
    def host_bytes_used(self) -> int:
        return self._host_bytes

    @property
    def num_pinned(self) -> int:
        return self._table.num_pinned

    @property
    def num_copied_to_device(self) -> int:
        """The number of copies since the start."""
        return self._num_copied

    @property
    def copy_s(self) -> float:
        """The time from the host to the device until the adapter can be used: a mean of recent
        copies; 0 before the first."""
        return self._copy_s

    def has(self, digest: str) -> bool:
        """Returns False for an adapter never added, removed, or dropped from a full host tier."""
        return digest in self._host and digest not in self._leaving

    @property
    def reserved_bytes(self) -> int:
        """The bytes of device memory: never more than the budget."""
        return self.num_blocks * self._layout.bytes_per_block

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Packs the adapter into the form that `insert` accepts. Slow; any thread may call it.
        Raises AdapterTooLargeError if the empty pool has no room for it."""
        return self._layout.pack(adapter, self._allocate_host, self.reserved_bytes)

    def insert(self, packed: PackedAdapter) -> tuple[str, ...]:
        """Keeps an adapter on the host. Returns the digests that were dropped to make room."""
        self._leaving.discard(packed.digest)
        if packed.digest in self._host:
            return ()
        check_room_beside(packed, self._pinned(), self.num_blocks)
        dropped = self._make_host_room(packed.num_bytes)
        self._host[packed.digest] = packed
        self._host_bytes += packed.num_bytes
        self._used_s[packed.digest] = time.time()
        return dropped

    def add(self, adapter: Adapter) -> tuple[str, ...]:
        return self.insert(self.pack(adapter))

    def protect(self, digests: Iterable[str]) -> None:
        """Protects adapters from insertions from now on, though they have no reference yet."""
        self._protected = frozenset(digests)

    def remove(self, digest: str) -> bool:
        """Returns False if it is still referenced; it then accepts no new reference and leaves with
        the last one."""
        if digest not in self._host:
            return True
        if digest in self._arriving and self._table.num_references(digest) == 1:
            self._cancel(digest)
        if self._table.num_references(digest):
            self._leaving.add(digest)
            return False
        self._forget(digest)
        return True

    def land_copies(self) -> None:
        """Makes adapters whose copies have ended acquirable from now on. Only this call and
        `wait_pending` land copies: an adapter that `acquire` refuses stays refused until the next
        one."""
        if self._copies is None:
            return
        polled_s, self._polled_s = self._polled_s, time.monotonic()
        for digest in self._copies.poll():
            began_s = self._arriving.pop(digest)
            if self._polled_s - polled_s < _WATCHED_S:
                self._note_copy(began_s)
            self.release(digest)

    def acquire(self, digest: str) -> bool:
        """Adds a reference if every step launched from now on finds the adapter on the device.

        Returns False if all blocks are in use, or if its copy has not landed. If there was room,
        its copy is in flight after the call.
        """
        packed = self._known(digest)
        if digest in self._arriving or not self._can_bring(digest):
            return False
        placement = self._table.acquire(digest, packed.num_blocks, self._wanted)
        if placement is None:
            return False
        self._leave(placement.evicted)
        self._host.move_to_end(digest)
        self._used_s[digest] = time.time()
        return not placement.is_new or self._bring(packed, placement.blocks)

    def release(self, digest: str) -> None:
        self._table.release(digest)
        if self._table.num_references(digest):
            return
        if self._copier is not None:
            self._num_marks += 1
            self._read_until[digest] = self._num_marks, self._copier.mark_steps()
        if digest in self._leaving:
            self._forget(digest)

    def prefetch(self, digests: Iterable[str]) -> None:
        """Starts copies of the adapters needed next, most urgent first. On CUDA they begin while
        blocks are free, or idle and not needed by others of the list."""
        in_order = tuple(digests)
        self._wanted = frozenset(in_order)
        if self._copies is None:
            return
        for digest in in_order:
            if not self._copies.can_start:
                return
            if self._table.is_resident(digest) or not self.has(digest):
                continue
            packed = self._host[digest]
            placement = self._table.acquire_keeping(digest, packed.num_blocks, self._wanted)
            if placement is None:
                return  # later adapters must not overtake it
            self._leave(placement.evicted)
            self._bring(packed, placement.blocks)

    def has_pending_copies(self) -> bool:
        """Returns True if an adapter that `acquire` refuses now may be granted after the next
        `land_copies` without any other change. True until all copies have landed, not only
        ended."""
        return self._copies is not None and self._copies.is_busy

    def wait_pending(self) -> None:
        """Blocks until one more adapter can be acquired: about 2 ms for 84 MB. For an idle
        engine."""
        num_arriving = len(self._arriving)
        while (
            self._copies is not None
            and self._copies.is_busy
            and len(self._arriving) == num_arriving
        ):
            self._copies.wait()
            self.land_copies()

    def pin(self, digest: str) -> None:
        """Pins an adapter: only `remove` drops it from a tier. Raises PinnedMemoryError if too
        little room would be left for others."""
        packed = self._known(digest)
        pinned = {one.digest for one in self._pinned()}
        check_pin(packed, self._host.values(), pinned, self.num_blocks, self._host_limit)
        self._table.pin(digest)

    def unpin(self, digest: str) -> None:
        self._table.unpin(digest)

    def is_pinned(self, digest: str) -> bool:
        return self._table.is_pinned(digest)

    def residents(self) -> tuple[Resident, ...]:
        """Returns all adapters in memory, least recently used first."""
        return tuple(
            Resident(
                digest,
                self._table.is_resident(digest),
                packed.num_bytes,
                packed.num_pages,
                self._table.num_references(digest),
                self._table.is_pinned(digest),
                digest in self._leaving,
                self._used_s[digest],
            )
            for digest, packed in self._host.items()
        )

    def pages(self, digest: str) -> tuple[int, ...]:
        """Returns the pages of an adapter on the device, in the order of its rank rows."""
        return self._table.blocks(digest)[: self._host[digest].num_pages]

    def deltas(self, digest: str) -> Deltas:
        """Returns the rows of an adapter on the device, by site."""
        if digest not in self._deltas:
            blocks = self._table.blocks(digest)
            self._deltas[digest] = self._heap.deltas(self._host[digest], blocks)
        return self._deltas[digest]

    def site_rows(self, name: str, *, has_affine: bool = False) -> SiteRows:
        """Returns the strips of a site. They never move. `has_affine`: with affine rows, if the
        pool has room for them."""
        return self._heap.site_rows(name, has_affine=has_affine)

    def on_device(self) -> tuple[str, ...]:
        return self._table.resident()

    def on_host(self) -> tuple[str, ...]:
        """Returns all adapters that can be acquired, including those on the device."""
        return tuple(digest for digest in self._host if digest not in self._leaving)

    def site_kinds(self, digest: str) -> frozenset[str]:
        """Returns the last parts of the names of the adapter's sites, e.g. qkv, and AFFINE if it
        has affine rows."""
        return self._host[digest].site_kinds

    def _known(self, digest: str) -> PackedAdapter:
        if not self.has(digest):
            raise AdapterNotLoadedError(f"adapter {digest} is not loaded")
        return self._host[digest]

    def _pinned(self) -> list[PackedAdapter]:
        return [packed for packed in self._host.values() if self._table.is_pinned(packed.digest)]

    def _can_bring(self, digest: str) -> bool:
        is_ready = self._copies is None or self._copies.can_start
        return is_ready or self._table.is_resident(digest)

    def _bring(self, packed: PackedAdapter, blocks: tuple[int, ...]) -> bool:
        """Returns True if the adapter is on the device. Otherwise the pool keeps the new reference
        until the copy has landed."""
        self._num_copied += 1
        began_s = time.monotonic()
        if self._copies is None:
            self._heap.write(packed, blocks)
            self._note_copy(began_s)
            return True
        self._arriving[packed.digest] = began_s
        after = None if self._free_from is None else self._free_from[1]
        self._copies.start(packed, partial(self._heap.write, packed, blocks), after)
        return False

    def _leave(self, digests: Iterable[str]) -> None:
        """Notes that adapters have left the device: their blocks may be written once the steps that
        read them have ended."""
        for digest in digests:
            self._deltas.pop(digest, None)
            mark = self._read_until.pop(digest, None)
            if mark is not None and (self._free_from is None or mark[0] > self._free_from[0]):
                self._free_from = mark

    def _note_copy(self, began_s: float) -> None:
        took_s = time.monotonic() - began_s
        self._copy_s += (took_s - self._copy_s) * (_NEWEST_COPY if self._copy_s else 1.0)

    def _cancel(self, digest: str) -> None:
        assert self._copies is not None
        self._copies.cancel(digest)
        del self._arriving[digest]
        self._table.release(digest)

    def _forget(self, digest: str) -> None:
        self._leaving.discard(digest)
        self._table.unpin(digest)
        if self._table.is_resident(digest):
            self._table.drop(digest)
            self._leave((digest,))
        self._host_bytes -= self._host.pop(digest).num_bytes
        del self._used_s[digest]

    def _make_host_room(self, num_bytes: int) -> tuple[str, ...]:
        """Drops idle adapters, least recently used first; then adapters on the device; adapters
        with waiting requests last."""
        idle = [d for d in self._host if self._table.is_evictable(d) and d not in self._protected]
        resident = set(self._table.resident())
        room = self._host_limit - self.host_bytes_used
        dropped: list[str] = []
        # Stable: least recently used first within each kind.
        for digest in sorted(idle, key=lambda d: (d in self._wanted, d in resident)):
            if room >= num_bytes:
                break
            room += self._host[digest].num_bytes
            dropped.append(digest)
        if room < num_bytes:
            raise HostMemoryError(
                f"the adapter needs {num_bytes} bytes of host memory; of {self._host_limit} only "
                f"{room} are free or idle"
            )
        for digest in dropped:
            self._forget(digest)
        return tuple(dropped)


def _allocate(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)
