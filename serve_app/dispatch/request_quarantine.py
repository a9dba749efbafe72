"""The quarantine: requests that killed two engines are refused for ten minutes by fingerprint.

The fingerprint covers the prompts, the adapter and the sampling parameters without the seed, which
clients often draw for each request. Each ingress replica has its own quarantine and sends its
entries to the others through the manager, because a retry may reach another replica. Ignorant of
engines.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from engine.types import Request
from serve_app.errors import RequestQuarantinedError
from serve_app.messages import QuarantinedRequest

logger = logging.getLogger(__name__)

HELD_S = 600.0
MAX_HELD = 1024
_MAX_EXPORTED = 64  # the newest entries


class RequestQuarantine:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # By fingerprint, the first to expire comes first; True: it killed engines from here.
        self._entries: dict[bytes, tuple[float, bool]] = {}

    def check(self, requests: Sequence[Request]) -> None:
        """Raises RequestQuarantinedError. Computes no fingerprint while the quarantine is empty."""
        if not self._entries:
            return
        self._drop_expired()
        if fingerprint(requests) in self._entries:
            raise RequestQuarantinedError

    def add(self, requests: Sequence[Request]) -> None:
        digest = fingerprint(requests)
        self._hold(digest, self._now() + HELD_S, is_own=True)
        logger.error("request %s is quarantined: its engines died", digest.hex()[:16])

    def export(self) -> tuple[QuarantinedRequest, ...]:
        """Returns this replica's own entries for the others. Every report has all of them, so that
        a lost report does no harm."""
        self._drop_expired()
        now_s = self._now()
        own = [(digest, s - now_s) for digest, (s, is_own) in self._entries.items() if is_own]
        return tuple(own[-_MAX_EXPORTED:])

    def merge(self, entries: Iterable[QuarantinedRequest]) -> None:
        """Adds the entries of the other ingress replicas."""
        now_s = self._now()
        for digest, left_s in entries:
            if digest not in self._entries:
                self._hold(digest, now_s + min(left_s, HELD_S), is_own=False)
                logger.error(
                    "request %s is quarantined: reported by another ingress", digest.hex()[:16]
                )

    def _hold(self, digest: bytes, until_s: float, *, is_own: bool) -> None:
        self._drop_expired()
        self._entries[digest] = until_s, is_own
        self._entries = dict(sorted(self._entries.items(), key=lambda item: item[1])[-MAX_HELD:])

    def _drop_expired(self) -> None:
        now_s = self._now()
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][0] > now_s:
                return
            del self._entries[oldest]


def fingerprint(requests: Sequence[Request]) -> bytes:
    """Returns the fingerprint of a submit call's requests."""
    digest = hashlib.sha256()
    for request in requests:
        params = replace(request.params, seed=None)
        digest.update(repr((len(request.prompt_token_ids), request.adapter, params)).encode())
        digest.update(array("q", request.prompt_token_ids).tobytes())
    return digest.digest()
