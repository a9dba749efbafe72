"""The places of a replica's adapters (device, host, the node's disk, registry) and their moves.

The device is counted in pages of 16 ranks, the host in bytes of the same pages, the disk is shared
by the replicas of a node. A load from disk or registry takes its seconds beside all others; copies
to the device go one after the other, beside the steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.benchmarks.simulator.events import Loop

PAGE_ROWS = 16


@dataclass(frozen=True, slots=True)
class TierSpeeds:
    """Seconds of an adapter of one page, but `registry_wait_s`: of any, before its bytes come."""

    copy_s: float
    disk_s: float
    registry_s: float
    registry_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierRoom:
    device_pages: int
    host_pages: int
    disk_pages: int


@dataclass(slots=True, eq=False)
class Disk:
    """The disk of one node."""

    max_pages: int
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)  # digest -> pages
    num_pages: int = 0
    _names: frozenset[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """The same object as long as nothing changes."""
        if self._names is None:
            self._names = frozenset(self.held)
        return self._names

    def put(self, digest: str, pages: int) -> None:
        if digest in self.held:
            self.held.move_to_end(digest)
            return
        while self.held and self.num_pages + pages > self.max_pages:
            self.num_pages -= self.held.popitem(last=False)[1]
        self.held[digest] = pages
        self.num_pages += pages
        self._names = None


def _nobody() -> None:
    """Waits for copies."""


@dataclass(slots=True)
class _Loading:
    pages: int
    then: list[Callable[[], None]]


class Tiers:
    """The tiers of one replica. `woken` is called when a copy has come to the device."""

    def __init__(
        self,
        loop: Loop,
        speeds: TierSpeeds,
        room: TierRoom,
        disk: Disk,
    ) -> None:
        self._loop = loop
        self._speeds = speeds
        self._room = room
        self.woken: Callable[[], None] = _nobody
        self.disk = disk
        self._device: OrderedDict[str, int] = OrderedDict()  # digest -> pages, oldest use first
        self._host: OrderedDict[str, int] = OrderedDict()
        self._device_free = room.device_pages
        self._host_free = room.host_pages
        self._references: dict[str, int] = {}  # of running sequences
        self._users: dict[str, int] = {}  # of calls that loaded it and have not ended
        self._copying: set[str] = set()
        self._loading: dict[str, _Loading] = {}
        self._copies_end_s = 0.0
        self._on_device: tuple[str, ...] | None = ()
        self._on_host: tuple[str, ...] | None = ()
        # The tuples that the sets were made of, and the sets.
        self._named: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())
        self._named_host: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())
        self.num_copies = 0

    @property
    def on_device(self) -> tuple[str, ...]:
        if self._on_device is None:
            self._on_device = tuple(d for d in self._device if d not in self._copying)
        return self._on_device

    @property
    def on_host(self) -> tuple[str, ...]:
        if self._on_host is None:
            self._on_host = tuple(self._host)
        return self._on_host

    @property
    def names_on_device(self) -> frozenset[str]:
        tuple_now = self.on_device
        if tuple_now is not self._named[0]:
            self._named = tuple_now, frozenset(tuple_now)
        return self._named[1]

    @property
    def names_on_host(self) -> frozenset[str]:
        tuple_now = self.on_host
        if tuple_now is not self._named_host[0]:
            self._named_host = tuple_now, frozenset(tuple_now)
        return self._named_host[1]

    def tier_of(self, digest: str) -> str:
        if digest in self._device and digest not in self._copying:
            return "device"
        if digest in self._host:
            return "host"
        return "disk" if digest in self.disk.held else "registry"

    def is_loading(self, digest: str) -> bool:
        return digest in self._loading

    def bring(self, digest: str, rank: int, then: Callable[[], None]) -> None:
        """Brings an adapter to the host and calls `then`, now if it is there. The call counts as
        its user until `leave`."""
        self._users[digest] = self._users.get(digest, 0) + 1
        if digest in self._host:
            self._host.move_to_end(digest)
            then()
            return
        loading = self._loading.get(digest)
        if loading is not None:
            loading.then.append(then)
            return
        pages = -(-rank // PAGE_ROWS)
        self._loading[digest] = _Loading(pages, [then])
        seconds = self._speeds.disk_s * pages
        if digest not in self.disk.held:
            seconds += self._speeds.registry_wait_s + self._speeds.registry_s * pages
        self._loop.at(self._loop.now_s + seconds, self._loaded, digest)

    def leave(self, digest: str) -> None:
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]

    def obstacle(self, key: str) -> str | None:
        return None

    def invocation(self, key: str) -> tuple[int, ...]:
        return ()

    def acquire(self, digest: str) -> bool:
        """A reference, if it is on the device; else its copy begins if there is room."""
        if digest in self._device and digest not in self._copying:
            self._device.move_to_end(digest)
            self._references[digest] = self._references.get(digest, 0) + 1
            return True
        self.prefetch(digest)
        return False

    def release(self, digest: str) -> None:
        self._references[digest] -= 1
        if not self._references[digest]:
            del self._references[digest]

    def prefetch(self, digest: str) -> None:
        if digest in self._device or digest not in self._host:
            return
        pages = self._host[digest]
        if not self._make_device_room(pages):
            return
        self._device[digest] = pages
        self._device_free -= pages
        self._copying.add(digest)
        begin_s = max(self._loop.now_s, self._copies_end_s)
        self._copies_end_s = begin_s + self._speeds.copy_s * pages
        self._loop.at(self._copies_end_s, self._copied, digest)

    def _copied(self, digest: str) -> None:
        self._copying.discard(digest)
        self._on_device = None
        self.num_copies += 1
        self.woken()

    def _loaded(self, digest: str) -> None:
        loading = self._loading.pop(digest)
        self.disk.put(digest, loading.pages)
        self._make_host_room(loading.pages)
        self._host[digest] = loading.pages
        self._host_free -= loading.pages
        self._on_host = None
        for then in loading.then:
            then()

    def _make_device_room(self, pages: int) -> bool:
        """Idle ones go, least recently used first; none if that would not suffice."""
        if self._device_free >= pages:
            return True
        free, victims = self._device_free, []
        for digest, held in self._device.items():
            if digest in self._references or digest in self._copying:
                continue
            victims.append(digest)
            free += held
            if free >= pages:
                break
        if free < pages:
            return False
        for digest in victims:
            del self._device[digest]
        self._device_free = free
        self._on_device = None
        return True

    def _make_host_room(self, pages: int) -> None:
        """Drops adapters without users: the others may overflow the tier."""
        if self._host_free >= pages:
            return
        for digest in list(self._host):
            if digest in self._users:
                continue
            self._host_free += self._host.pop(digest)
            if digest in self._device and digest not in self._copying:
                self._device_free += self._device.pop(digest)  # dropped from memory altogether
                self._on_device = None
            if self._host_free >= pages:
                break
        self._on_host = None
