"""The KV blocks of one engine: their references, and lookup of cached blocks by content.

A block is free, held (one reference per sequence), or both findable and free. The content of a full
block is named by a hash chain: keyed BLAKE2b over the parent's hash and the block's token ids. The
chain begins with base digest, adapter key and cache salt, and its key is a secret of this process:
two adapters or two tenants never share a block, and clients cannot construct a hash collision. An
adapter that becomes active at some token enters the chain with the block of that token, so that the
blocks before it are the base's. Integers and bytes only; the runner owns the tensors behind the
ids.

    empty --allocate--> held --release--> empty               (content without a name)
                         |  ^
                  publish|  |hold
                         v  |
                        held, findable --release--> findable --allocate (LRU)--> held
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

_HASH_BYTES = 16


def activation_name(adapter: str | None, offset: int) -> bytes:
    """Returns the bytes by which a chain of hashes names an adapter that is active from the token
    at `offset` of a block on."""
    return b"active" + offset.to_bytes(8, "little") + (adapter or "").encode()


class BlockPool:
    """The pool of KV blocks. Callers check `num_free` before they allocate: the pool itself never
    refuses."""

    def __init__(
        self, num_blocks: int, block_size: int, base_digest: str, *, can_share: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.can_share = can_share  # False: cached blocks are never found
        self._base_digest = base_digest
        self._secret = secrets.token_bytes(32)
        self._empty = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # findable, least recently used first
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._prefix_of: dict[int, int] = {}  # findable block -> public name of its chain so far
        self._prefix_changes: dict[int, bool] = {}  # since the last take; True: added, False: gone

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def extend_chain(
        self,
        chain: list[bytes],
        token_ids: Sequence[int],
        num_tokens: int,
        adapter: str | None,
        cache_salt: str,
        active_from: int | None = None,
    ) -> None:
        """Appends the hashes of full blocks within the first `num_tokens` that `chain` lacks.
        `active_from`: the first token that the adapter processes; None: all."""
        size = self.block_size
        for index in range(len(chain), num_tokens // size):
            at_start = adapter if active_from is None else None
            parent = chain[-1] if chain else self._chain_seed(at_start, cache_salt)
            if active_from is not None and index == active_from // size:
                parent = self._digest(parent + activation_name(adapter, active_from % size))
            tokens = array("q", token_ids[index * size : (index + 1) * size]).tobytes()
            chain.append(self._digest(parent + tokens))

    def find_one(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def find(self, chain: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest known prefix, without adding references."""
        found: list[int] = []
        for block_hash in chain:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds one reference to each of some found blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Returns empty blocks first, oldest first, then evicts findable blocks."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Makes a held block, full and computed, findable. Of blocks with equal content only the
        first is findable. Returns True if the block is findable from now on."""
        assert self._references[block] > 0, f"published block {block} is not held"
        if not self.can_share or block_hash in self._block_of or self._hash_of[block] is not None:
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        return True

    def name_prefix(self, block: int, digest: int) -> None:
        """Sets the `engine.prefix_digests` name of the chain that ends with this findable block."""
        assert self._hash_of[block] is not None
        self._prefix_of[block] = digest
        self._prefix_changes[digest] = True

    def prefix_of(self, block: int) -> int | None:
        return self._prefix_of.get(block)

    def take_prefix_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the names that were added and those that were removed since the last call."""
        changes, self._prefix_changes = self._prefix_changes, {}
        came = tuple(digest for digest, is_here in changes.items() if is_here)
        return came, tuple(digest for digest, is_here in changes.items() if not is_here)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each of a sequence's blocks. The tail becomes evictable before the
        head, because a chain is found from its head on."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                self._empty.append(block)
            else:
                self._idle[block] = None

    def _take(self) -> int:
        if self._empty:
            return self._empty.popleft()
        block, _ = self._idle.popitem(last=False)
        block_hash = self._hash_of[block]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hash_of[block] = None
        digest = self._prefix_of.pop(block, None)
        if digest is not None:
            self._lose_prefix(block_hash, digest)
        return block

    def _lose_prefix(self, block_hash: bytes, digest: int) -> None:
        """Notes that the device has evicted the block with which a named chain ends."""
        self._prefix_changes[digest] = False

    def _chain_seed(self, adapter: str | None, cache_salt: str) -> bytes:
        # Each part with its length: ("ab", "c") and ("a", "bc") are different chains.
        parts = [part.encode() for part in (self._base_digest, adapter or "", cache_salt)]
        return self._digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_HASH_BYTES, key=self._secret).digest()
