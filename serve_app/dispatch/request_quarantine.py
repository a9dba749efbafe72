"""Requests that killed two engines, known by a fingerprint, are refused for ten minutes.

The fingerprint holds the prompts, the sampling parameters but for the seed (often drawn anew for
each request) and the adapter. Of one ingress replica, which tells the others through the manager:
a client that asks again may meet another one. Ignorant of engines.
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
_MAX_TOLD = 64  # the newest, to the others


class RequestQuarantine:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until_s: dict[bytes, float] = {}  # those that end first come first
        self._own: set[bytes] = set()  # that killed engines of requests that came here

    def check(self, requests: Sequence[Request]) -> None:
        """Raises RequestQuarantinedError. Costs nothing while nobody is held."""
        if not self._until_s:
            return
        self._drop_old()
        if fingerprint(requests) in self._until_s:
            raise RequestQuarantinedError

    def add(self, requests: Sequence[Request]) -> None:
        digest = fingerprint(requests)
        self._own.add(digest)
        self._hold(digest, self._now() + HELD_S)
        logger.error("request %s is quarantined: its engines died", digest.hex()[:16])

    def told(self) -> tuple[QuarantinedRequest, ...]:
        """What the others are to know; the same as long as it holds, so that a lost report does no
        harm."""
        self._drop_old()
        now_s = self._now()
        own = [(digest, s - now_s) for digest, s in self._until_s.items() if digest in self._own]
        return tuple(own[-_MAX_TOLD:])

    def learn(self, held: Iterable[QuarantinedRequest]) -> None:
        """Of the others."""
        now_s = self._now()
        for digest, left_s in held:
            if digest not in self._until_s:
                self._hold(digest, now_s + min(left_s, HELD_S))
                logger.error(
                    "request %s is quarantined: told by another ingress", digest.hex()[:16]
                )

    def _hold(self, digest: bytes, until_s: float) -> None:
        self._drop_old()
        self._until_s[digest] = until_s
        self._until_s = dict(sorted(self._until_s.items(), key=lambda item: item[1])[-MAX_HELD:])
        self._own &= self._until_s.keys()

    def _drop_old(self) -> None:
        now_s = self._now()
        while self._until_s:
            oldest = next(iter(self._until_s))
            if self._until_s[oldest] > now_s:
                return
            del self._until_s[oldest]
            self._own.discard(oldest)


def fingerprint(requests: Sequence[Request]) -> bytes:
    """Of one submit call."""
    digest = hashlib.sha256()
    for request in requests:
        params = replace(request.params, seed=None)
        digest.update(repr((len(request.prompt_token_ids), request.adapter, params)).encode())
        digest.update(array("q", request.prompt_token_ids).tobytes())
    return digest.digest()
