"""The adapters in host memory, packed, within a limit of bytes. Free of devices and references."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from lora.errors import HostMemoryError
from lora.page_image import PackedAdapter

# After its load an adapter waits so long for its first request, which is on its way: adapters that
# are loaded at once do not drop each other. Only the newest few, so that loads without requests do
# not take the room of adapters in use.
_FRESH_S, _MAX_FRESH = 5.0, 4


class HostTier(Mapping[str, PackedAdapter]):
    """A mapping by digest, least recently used first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes
        self.num_bytes = 0
        self._adapters: OrderedDict[str, PackedAdapter] = OrderedDict()
        self.used_s: dict[str, float] = {}  # Unix time of each adapter's last use
        self._unused: dict[str, float] = {}  # when it was loaded, until its first use

    def __getitem__(self, digest: str) -> PackedAdapter:
        return self._adapters[digest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def add(self, packed: PackedAdapter) -> None:
        self._adapters[packed.digest] = packed
        self.num_bytes += packed.num_bytes
        self.used_s[packed.digest] = time.time()
        self._unused[packed.digest] = time.monotonic()

    def is_fresh(self, digest: str) -> bool:
        """Returns True for an adapter that was just loaded, as one of the newest, and not used
        yet."""
        if digest not in islice(reversed(self._unused), _MAX_FRESH):
            return False
        return time.monotonic() - self._unused[digest] < _FRESH_S

    def note_use(self, digest: str) -> None:
        self._unused.pop(digest, None)
        self._adapters.move_to_end(digest)
        self.used_s[digest] = time.time()

    def drop(self, digest: str) -> None:
        self.num_bytes -= self._adapters.pop(digest).num_bytes
        del self.used_s[digest]
        self._unused.pop(digest, None)

    def victims(
        self,
        num_bytes: int,
        can_drop: Callable[[str], bool],
        order: Callable[[str], tuple[bool, ...]],
    ) -> tuple[str, ...]:
        """Returns the digests to drop before `num_bytes` find room: by `order`, and least recently
        used first within each of its values. Raises HostMemoryError if they are not enough."""
        idle = [digest for digest in self._adapters if can_drop(digest)]
        room = self.limit - self.num_bytes
        found: list[str] = []
        for digest in sorted(idle, key=order):  # stable
            if room >= num_bytes:
                break
            room += self._adapters[digest].num_bytes
            found.append(digest)
        if room < num_bytes:
            raise HostMemoryError(
                f"the adapter needs {num_bytes} bytes of host memory; of {self.limit} only {room} "
                "are free or idle"
            )
        return tuple(found)
