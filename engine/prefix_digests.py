"""Names of prompt prefixes that routers and engines agree on, without a secret and short.

A prompt is cut into chunks of `chunk` tokens; digest i names chunks 0..i together with the adapter
and the cache salt (a chain of 64-bit BLAKE2b). An engine tells which of them its KV blocks hold, a
router counts how many of a prompt's it finds. Only a hint: a collision sends a request to the wrong
replica, where the cache itself, whose hashes are keyed, is asked again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_BYTES = 8


def prefix_digests(
    token_ids: Sequence[int],
    adapter: str | None,
    cache_salt: str,
    chunk: int,
    known: Sequence[int] = (),
) -> tuple[int, ...]:
    """One 64-bit name for each full chunk. `known`: its first digests, which are not made anew."""
    digests = list(known)
    parent = digests[-1].to_bytes(_BYTES, "little") if digests else _seed(adapter, cache_salt)
    for index in range(len(digests), len(token_ids) // chunk):
        tokens = array("q", token_ids[index * chunk : (index + 1) * chunk]).tobytes()
        parent = hashlib.blake2b(parent + tokens, digest_size=_BYTES).digest()
        digests.append(int.from_bytes(parent, "little"))
    return tuple(digests)


def _seed(adapter: str | None, cache_salt: str) -> bytes:
    parts = [part.encode() for part in (adapter or "", cache_salt)]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(text, digest_size=_BYTES).digest()
