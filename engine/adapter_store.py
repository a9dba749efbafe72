"""The adapters that an engine has, as its scheduler and its front see them. Free of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lora.blocks import Resident


class AdapterStore(Protocol):
    """The adapters in memory and on the device. `lora.pool.AdapterPool` implements it."""

    def has(self, key: str) -> bool:
        """Returns False if an adapter of the key was never loaded, was removed, or was dropped from
        a full host tier."""
        ...

    def obstacle(self, key: str) -> str | None:
        """Returns why the loaded adapters of a key can never be acquired together; None: they
        can."""
        ...

    def land_copies(self) -> None:
        """Makes adapters whose copies have ended acquirable from now on; later copies follow with
        the next call."""
        ...

    def invocation(self, key: str) -> tuple[int, ...]:
        """Returns the tokens from which on the adapter of the key is active; (): all tokens."""
        ...

    def acquire(self, key: str) -> bool:
        """Makes the adapters of a key resident if there is room, and adds a reference. Returns
        False, with none added, if all pages are in use or a copy to the device is in flight."""
        ...

    def prefetch(self, digests: Iterable[str]) -> None:
        """Starts copies of the adapters needed next, most urgent first, where there is room."""
        ...

    def has_pending_copies(self) -> bool:
        """Returns True if a copy has not landed: a refused adapter may be available after the next
        `land_copies`."""
        ...

    def wait_pending(self) -> None:
        """Blocks until one more adapter can be acquired, some milliseconds at most."""
        ...

    def release(self, key: str) -> None:
        """Drops the reference of one `acquire`."""
        ...

    def on_device(self) -> tuple[str, ...]: ...
    def on_host(self) -> tuple[str, ...]: ...
    @property
    def reserved_bytes(self) -> int:
        """The bytes of device memory that are set aside for adapters."""
        ...

    @property
    def page_bytes(self) -> int:
        """The bytes on the device of an adapter of rank 16 at all sites but the optional."""
        ...

    @property
    def device_bytes_used(self) -> int: ...
    @property
    def host_bytes_used(self) -> int: ...
    @property
    def num_pinned(self) -> int: ...
    @property
    def num_copied_to_device(self) -> int: ...
    @property
    def copy_s(self) -> float: ...
    def residents(self) -> tuple[Resident, ...]: ...
    def is_pinned(self, digest: str) -> bool: ...
    def protect(self, digests: Iterable[str]) -> None: ...
    def pin(self, digest: str) -> None: ...
    def unpin(self, digest: str) -> None: ...
    def remove(self, digest: str) -> bool:
        """Returns False if the adapter is still referenced."""
        ...
