"""Names of prompt prefixes that routers and engines share: short, and without a secret.

A prompt is cut into chunks of `chunk` tokens; digest i names chunks 0..i together with the adapter
and the cache salt (a chain of 64-bit BLAKE2b). An engine reports the digests that its KV blocks
hold, and a router counts how many of a prompt's digests are among them. Only a hint: a collision
sends a request to the wrong replica, whose cache, with keyed hashes, is looked up again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_BYTES = 8
_CHUNK_TOKENS = 32  # unless blocks are larger


def chunk_size(block_size: int) -> int:
    """Returns the tokens of a chunk, whole blocks."""
    return block_size * max(1, _CHUNK_TOKENS // block_size)


def prefix_digests(
    token_ids: Sequence[int],
    adapter: str | None,
    cache_salt: str,
    chunk: int,
    known: Sequence[int] = (),
) -> tuple[int, ...]:
    """Returns one 64-bit name for each full chunk. `known` are its first digests, which are not
    computed again."""
    digests = list(known)
    extend_digests(digests, token_ids, len(token_ids), adapter, cache_salt, chunk)
    return tuple(digests)


def extend_digests(
    digests: list[int],
    token_ids: Sequence[int],
    num_tokens: int,
    adapter: str | None,
    cache_salt: str,
    chunk: int,
) -> None:
    """Appends the missing digests of full chunks within the first `num_tokens`."""
    if len(digests) >= num_tokens // chunk:
        return
    parent = digests[-1].to_bytes(_BYTES, "little") if digests else _seed(adapter, cache_salt)
    for index in range(len(digests), num_tokens // chunk):
        tokens = array("q", token_ids[index * chunk : (index + 1) * chunk]).tobytes()
        parent = hashlib.blake2b(parent + tokens, digest_size=_BYTES).digest()
        digests.append(int.from_bytes(parent, "little"))


def _seed(adapter: str | None, cache_salt: str) -> bytes:
    parts = [part.encode() for part in (adapter or "", cache_salt)]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(text, digest_size=_BYTES).digest()
