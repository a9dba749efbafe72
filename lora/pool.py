"""Adapters in memory: all loaded adapters packed on the host, those in use in blocks on the device.

An adapter takes as many blocks of the heap as its rows fill, at the sites that it has. On a CPU
an adapter is copied when it is acquired; on CUDA copies run while steps run, and the caller must
ask again. Steps acquire and read the adapters of a key (`lora.adapter_key`) together. Free of
adapter names, requests and files. One thread calls it, except for `pack`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from kernels.lora_plan import MAX_RANK_PAGES
from kernels.lora_rows import SiteRows
from lora.adapter import Adapter
from lora.adapter_key import key_digests
from lora.blocks import BlockTable, Resident
from lora.convert import RowsCopy
from lora.copies import AdapterCopies, Copier, CudaCopier, ReadMarks
from lora.errors import AdapterNotLoadedError
from lora.heap import AdapterHeap, Deltas
from lora.host_tier import HostTier
from lora.page_image import PAGE_ROWS as PAGE_ROWS
from lora.page_image import PackedAdapter, PageLayout, Strip
from lora.page_lists import PageList, PageLists
from lora.pinned_memory import allocator
from lora.pins import check_pin, check_room_beside, obstacle
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
        max_list: int = MAX_RANK_PAGES,
        *,
        has_affine: bool = True,
        is_int8: bool = False,
        allocate_host: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`stream`: the CUDA stream of the steps; None: the stream that is current in each call.
        `copier`: None selects the device's, none on a CPU. `max_list`: the most pages of a key.
        `has_affine`: also for adapters with affine rows, as DoRA and biases need. `is_int8`: A and
        B are in int8 (`lora.int8`). `allocate_host`: returns memory for images; None: such as the
        device's copies need."""
        self.dtype = dtype
        self.device = torch.device(device)
        self.serves_affine, self.is_int8 = has_affine, is_int8
        self._layout = PageLayout(sites, dtype, has_affine=has_affine, is_int8=is_int8)
        # On the device, of an adapter of rank 16 at all sites but the optional.
        self.page_bytes = self._layout.page_bytes
        self.num_blocks = bytes_budget // self._layout.bytes_per_block
        self.reserved_bytes = self.num_blocks * self._layout.bytes_per_block  # of the device
        self._table = BlockTable(self.num_blocks)
        self._heap = AdapterHeap(sites, self._layout, self.num_blocks, self.device)
        if copier is None and self.device.type == "cuda":
            copier = CudaCopier(self.device, stream, _MAX_PAGES_FLYING * self.page_bytes)
            torch.cuda.synchronize(self.device)  # the table's zeros are written before any copy
        self._copier = copier
        self._copies = AdapterCopies(copier) if copier is not None else None
        self._reads = ReadMarks()
        self._deltas: dict[str, Deltas] = {}  # of adapters on the device, made when first used
        # In flight to the device, and since when; the pool itself holds their references.
        self._arriving: dict[str, float] = {}
        # The time from the host to the device until the adapter can be used: a mean of recent
        # copies; 0 before the first.
        self.copy_s = 0.0
        self._polled_s = 0.0
        self._wanted: frozenset[str] = frozenset()  # adapters that the next sequences need
        self._protected: frozenset[str] = frozenset()  # not dropped by insertions
        spare_bytes = min(self.page_bytes, host_bytes)
        # Returns memory for a packed adapter, [bytes] uint8 of any content.
        self.allocate_host = allocate_host or allocator(host_bytes, spare_bytes, self.device)
        self._host = HostTier(host_bytes)
        self.num_copied_to_device = 0
        self._leaving: set[str] = set()  # removed while referenced
        self._max_list = max_list
        self._lists = PageLists(self.num_blocks, self._heap.blank_page)
        # The adapters of the first combination refused since copies last landed: others do not
        # take their room, so all of them are on the device in the end.
        self._gathered: frozenset[str] = frozenset()

    @property
    def num_free_blocks(self) -> int:
        return self._table.num_free

    @property
    def device_bytes_used(self) -> int:
        return (self.num_blocks - self.num_free_blocks) * self._layout.bytes_per_block

    @property
    def host_bytes_used(self) -> int:
        return self._host.num_bytes

    @property
    def num_pinned(self) -> int:
        return len(self._table.pinned)

    def has(self, key: str) -> bool:
        """Returns False if an adapter was never added, removed, or dropped from a full host
        tier."""
        return all(one in self._host and one not in self._leaving for one in key_digests(key))

    def obstacle(self, key: str) -> str | None:
        """Returns why the adapters of a key can never be used together; None: they can."""
        return obstacle(key, self._packed(key), self._pinned, self.num_blocks, self._max_list)

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Packs the adapter into the form that `insert` accepts. Slow; any thread may call it.
        Raises AdapterTooLargeError if the empty pool has no room for it, or a request none."""
        return self._layout.pack(adapter, self.allocate_host, self.reserved_bytes, self._max_list)

    def copies(self, adapter: Adapter, packed: PackedAdapter) -> list[tuple[Strip, RowsCopy]]:
        """Returns the copies by which `pack` made the packed adapter. Not for a pool in int8."""
        return self._layout.copies(adapter, packed)

    def insert(self, packed: PackedAdapter) -> tuple[str, ...]:
        """Keeps an adapter on the host. Returns the digests that were dropped to make room."""
        self._leaving.discard(packed.digest)
        if packed.digest in self._host:
            return ()
        check_room_beside(packed, self._pinned(), self.num_blocks)
        # Idle adapters first; then those on the device; those with waiting requests, or with one on
        # its way, last.
        dropped = self._host.victims(
            packed.num_bytes,
            lambda d: self._table.is_evictable(d) and d not in self._protected,
            lambda d: (d in self._wanted or self._host.is_fresh(d), self._table.is_resident(d)),
        )
        for digest in dropped:
            self._forget(digest)
        self._host.add(packed)
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
            assert self._copies is not None
            self._copies.cancel(digest)
            del self._arriving[digest]
            self._table.release(digest)
        if self._table.num_references(digest):
            self._leaving.add(digest)
            return False
        self._forget(digest)
        return True

    def land_copies(self) -> None:
        """Makes adapters whose copies have ended acquirable from now on. Only this call and
        `wait_pending` land copies: an adapter that `acquire` refuses stays refused until the next
        one."""
        self._gathered = frozenset()
        if self._copies is None:
            return
        polled_s, self._polled_s = self._polled_s, time.monotonic()
        for digest in self._copies.poll():
            began_s = self._arriving.pop(digest)
            if self._polled_s - polled_s < _WATCHED_S:
                self._note_copy(began_s)
            self._release(digest)

    def acquire(self, key: str) -> bool:
        """Adds a reference if every step launched from now on finds all adapters of the key on the
        device. Returns False if all blocks are in use, or if a copy has not landed; if there was
        room, the copies are in flight after the call."""
        adapters = tuple(self._known(digest) for digest in key_digests(key))
        if not self._lists.hold(key, adapters):
            return False
        together = frozenset(key_digests(key) if len(adapters) > 1 else ())
        held = [one.digest for one in adapters if self._acquire(one, together)]
        if len(held) == len(adapters):
            return True
        self._lists.release(key)
        for digest in held:
            self._release(digest)
        self._gathered = self._gathered or together
        return False

    def _acquire(self, packed: PackedAdapter, together: frozenset[str]) -> bool:
        digest = packed.digest
        is_room = self._copies is None or self._copies.can_start
        if digest in self._arriving or not (is_room or self._table.is_resident(digest)):
            return False
        if kept := self._gathered | together:
            placement = self._table.acquire_keeping(digest, packed.num_blocks, kept)
        else:
            placement = self._table.acquire(digest, packed.num_blocks, self._wanted)
        if placement is None:
            return False
        self._leave(placement.evicted)
        self._host.note_use(digest)
        return not placement.is_new or self._bring(packed, placement.blocks)

    def release(self, key: str) -> None:
        self._lists.release(key)
        for digest in key_digests(key):
            self._release(digest)

    def _release(self, digest: str) -> None:
        self._table.release(digest)
        if self._table.num_references(digest):
            return
        if self._copier is not None:
            self._reads.add(digest, self._copier.mark_steps())
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
        count, copies = len(self._arriving), self._copies
        while copies is not None and copies.is_busy and len(self._arriving) == count:
            copies.wait()
            self.land_copies()

    def pin(self, digest: str) -> None:
        """Pins an adapter: only `remove` drops it from a tier. Raises PinnedMemoryError if too
        little room would be left for others."""
        packed = self._known(digest)
        pinned = {one.digest for one in self._pinned()}
        check_pin(packed, self._host.values(), pinned, self.num_blocks, self._host.limit)
        self._table.pin(digest)

    def unpin(self, digest: str) -> None:
        self._table.unpin(digest)

    def is_pinned(self, digest: str) -> bool:
        return digest in self._table.pinned

    def residents(self) -> tuple[Resident, ...]:
        """Returns all adapters in memory, least recently used first."""
        return tuple(
            Resident(
                digest,
                self._table.is_resident(digest),
                packed.num_bytes,
                packed.num_pages,
                self._table.num_references(digest),
                digest in self._table.pinned,
                digest in self._leaving,
                self._host.used_s[digest],
            )
            for digest, packed in self._host.items()
        )

    def page_list(self, key: str) -> PageList:
        """Returns the pages of adapters on the device, in the order of rank rows, with weights."""
        return self._lists.find(key, self._packed, self.pages)

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

    def invocation(self, key: str) -> tuple[int, ...]:
        """Returns the tokens from which on the key's adapter is active; (): all tokens."""
        return self._host[key_digests(key)[0]].invocation

    def _packed(self, key: str) -> tuple[PackedAdapter, ...]:
        return tuple(self._host[digest] for digest in key_digests(key))

    def _known(self, digest: str) -> PackedAdapter:
        if not self.has(digest):
            raise AdapterNotLoadedError(f"adapter {digest} is not loaded")
        return self._host[digest]

    def _pinned(self) -> list[PackedAdapter]:
        return [self._host[digest] for digest in self._table.pinned]

    def _bring(self, packed: PackedAdapter, blocks: tuple[int, ...]) -> bool:
        """Returns True if the adapter is on the device. Otherwise the pool keeps the new reference
        until the copy has landed."""
        self.num_copied_to_device += 1
        began_s = time.monotonic()
        if self._copies is None:
            self._heap.write(packed, blocks)
            self._note_copy(began_s)
            return True
        self._arriving[packed.digest] = began_s
        write = partial(self._heap.write, packed, blocks)
        self._copies.start(packed, write, self._reads.free_from)
        return False

    def _leave(self, digests: Iterable[str]) -> None:
        """Notes that adapters have left the device: their blocks may be written once the steps that
        read them have ended."""
        for digest in digests:
            self._deltas.pop(digest, None)
            self._reads.leave(digest)

    def _note_copy(self, began_s: float) -> None:
        took_s = time.monotonic() - began_s
        self.copy_s += (took_s - self.copy_s) * (_NEWEST_COPY if self.copy_s else 1.0)

    def _forget(self, digest: str) -> None:
        self._leaving.discard(digest)
        self._table.unpin(digest)
        if self._table.is_resident(digest):
            self._table.drop(digest)
            self._leave((digest,))
        self._host.drop(digest)
