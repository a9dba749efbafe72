"""The state of an adapter in memory: a value that pickles, free of tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    digest: str
    is_on_device: bool  # a copy on the host is kept as well
    num_bytes: int  # on the host; about as many on the device
    num_pages: int  # of 16 rank rows
    num_references: int  # running sequences with it, and its own copy to the device
    is_pinned: bool
    is_leaving: bool  # removed: it leaves with its last reference
    used_s: float  # Unix time of its load or of the last acquire by a sequence
