"""Names of prompt prefixes that routers and engines share: short, and without a secret.

A prompt is cut into chunks of `chunk` tokens; digest i names chunks 0..i together with the adapter
and the cache salt (a chain of 64-bit BLAKE2b); an adapter that becomes active at some token is part
of the names from that token's chunk on. An engine reports the digests that its KV blocks
hold, and a router counts how many of a prompt's digests are among them. Only a hint: a collision
sends a request to the wrong replica, whose cache, with keyed hashes, is looked up again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from engine.blocks import activation_name

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
    active_from: int | None = None,
) -> tuple[int, ...]:
    """Returns one 64-bit name for each full chunk. `active_from`: the first token that the adapter
    processes; None: all."""
    digests: list[int] = []
    extend_digests(digests, token_ids, len(token_ids), adapter, cache_salt, chunk, active_from)
    return tuple(digests)


def extend_digests(
    digests: list[int],
    token_ids: Sequence[int],
    num_tokens: int,
    adapter: str | None,
    cache_salt: str,
    chunk: int,
    active_from: int | None = None,
) -> None:
    """Appends the missing digests of full chunks within the first `num_tokens`."""
    if len(digests) >= num_tokens // chunk:
        return
    at_start = adapter if active_from is None else None
    parent = digests[-1].to_bytes(_BYTES, "little") if digests else _seed(at_start, cache_salt)
    for index in range(len(digests), num_tokens // chunk):
        if active_from is not None and index == active_from // chunk:
            parent += activation_name(adapter, active_from % chunk)
        tokens = array("q", token_ids[index * chunk : (index + 1) * chunk]).tobytes()
        parent = hashlib.blake2b(parent + tokens, digest_size=_BYTES).digest()
        digests.append(int.from_bytes(parent, "little"))


def _seed(adapter: str | None, cache_salt: str) -> bytes:
    parts = [part.encode() for part in (adapter or "", cache_salt)]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(text, digest_size=_BYTES).digest()
