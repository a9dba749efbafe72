"""The pages that a step lists for an adapter key, and the limit of all lists in use.

The pages of a key's adapters form one list, with a weight for each page: kernels add the deltas of
all pages of a row's list. They take the first page's word for the matrices that the list has, so
the first adapter has the matrices of all others, or else a blank page, which has every matrix
without rows, comes first. Pages of one adapter are in as many lists as keys name it: the limit
keeps the lists of a step within the room of its plan, which without combinations is the number of
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lora.adapter_key import key_adapters
from lora.page_image import PackedAdapter


@dataclass(frozen=True, slots=True)
class PageList:
    pages: tuple[int, ...]
    weights: tuple[float, ...]  # of each page
    # The last parts of the names of the adapters' sites, e.g. qkv, and AFFINE if one has affine
    # rows.
    site_kinds: frozenset[str] = frozenset()
    is_weighted: bool = False  # a weight is not 1


@dataclass(slots=True)
class _Held:
    num_pages: int
    references: int = 0
    found: PageList | None = None  # made when first used


class PageLists:
    def __init__(self, limit: int, blank: int) -> None:
        """`limit`: pages in all lists in use. `blank`: the number of the blank page."""
        self._limit = limit
        self._blank = blank
        self._held: dict[str, _Held] = {}
        self._num_pages = 0  # in the lists of keys in use

    def hold(self, key: str, adapters: Sequence[PackedAdapter]) -> bool:
        """Adds a reference to a key. Returns False, with nothing changed, if the lists of other
        keys leave too little room."""
        held = self._held.get(key)
        if held is None:
            held = _Held(count_pages(adapters))
            if self._num_pages + held.num_pages > self._limit:
                return False
            self._held[key] = held
            self._num_pages += held.num_pages
        held.references += 1
        return True

    def release(self, key: str) -> None:
        held = self._held[key]
        held.references -= 1
        if not held.references:
            self._num_pages -= held.num_pages
            del self._held[key]

    def find(
        self,
        key: str,
        packed: Callable[[str], Sequence[PackedAdapter]],
        pages: Callable[[str], tuple[int, ...]],
    ) -> PageList:
        """Returns the list of a key, made once while the key is in use. `packed`: returns the
        key's adapters. `pages`: returns the pages of a digest on the device."""
        held = self._held.get(key)
        if held is not None and held.found is not None:
            return held.found
        adapters, parts = packed(key), list(key_adapters(key))
        listed, weights = list[int](), list[float]()
        first = _first(adapters)
        if first is None:
            listed.append(self._blank)
            weights.append(1.0)
        else:
            parts.insert(0, parts.pop(first))
        for part in parts:
            own = pages(part.digest)
            listed += own
            weights += [part.weight] * len(own)
        kinds = frozenset[str]().union(*(one.site_kinds for one in adapters))
        is_weighted = any(weight != 1.0 for weight in weights)
        found = PageList(tuple(listed), tuple(weights), kinds, is_weighted)
        if held is not None:
            held.found = found
        return found


def count_pages(adapters: Sequence[PackedAdapter]) -> int:
    """Returns the length of the list of some adapters, the blank page included."""
    return sum(one.num_pages for one in adapters) + (_first(adapters) is None)


def _first(adapters: Sequence[PackedAdapter]) -> int | None:
    """Returns the place of an adapter that has each matrix that another has; None: none has."""
    if len(adapters) == 1:
        return 0
    have = torch.stack([one.entries[0] for one in adapters]) != 0
    has_all = (have == have.any(0)).all(1)
    return has_all.tolist().index(True) if bool(has_all.any()) else None
