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
        self._until_s: dict[bytes, float] = {}  # by fingerprint, the first to expire comes first
        self._own: set[bytes] = set()  # fingerprints of requests that killed engines from here

    def check(self, requests: Sequence[Request]) -> None:
        """Raises RequestQuarantinedError. Computes no fingerprint while the quarantine is empty."""
        if not self._until_s:
            return
        self._drop_expired()
        if fingerprint(requests) in self._until_s:
            raise RequestQuarantinedError

    def add(self, requests: Sequence[Request]) -> None:
        digest = fingerprint(requests)
        self._own.add(digest)
        self._hold(digest, self._now() + HELD_S)
        logger.error("request %s is quarantined: its engines died", digest.hex()[:16])

    def export(self) -> tuple[QuarantinedRequest, ...]:
        """Returns this replica's own entries for the others. Every report has all of them, so that
        a lost report does no harm."""
        self._drop_expired()
        now_s = self._now()
        own = [(digest, s - now_s) for digest, s in self._until_s.items() if digest in self._own]
        return tuple(own[-_MAX_EXPORTED:])

    def merge(self, entries: Iterable[QuarantinedRequest]) -> None:
        """Adds the entries of the other ingress replicas."""
        now_s = self._now()
        for digest, left_s in entries:
            if digest not in self._until_s:
                self._hold(digest, now_s + min(left_s, HELD_S))
                logger.error(
                    "request %s is quarantined: reported by another ingress", digest.hex()[:16]
                )

    def _hold(self, digest: bytes, until_s: float) -> None:
        self._drop_expired()
        self._until_s[digest] = until_s
        self._until_s = dict(sorted(self._until_s.items(), key=lambda item: item[1])[-MAX_HELD:])
        self._own &= self._until_s.keys()

    def _drop_expired(self) -> None:
        now_s = self._now()
        while self._until_s:
            oldest = next(iter(self._until_s))
            if self._until_s[oldest] > now_s:
                return
            del self._until_s[oldest]
            self._own.discard(oldest)


def fingerprint(requests: Sequence[Request]) -> bytes:
    """Returns the fingerprint of a submit call's requests."""
    digest = hashlib.sha256()
    for request in requests:
        params = replace(request.params, seed=None)
        digest.update(repr((len(request.prompt_token_ids), request.adapter, params)).encode())
        digest.update(array("q", request.prompt_token_ids).tobytes())
    return digest.digest()
