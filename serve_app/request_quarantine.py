"""Requests that killed two engines, known by a fingerprint, are refused for ten minutes.

The fingerprint holds the prompts, the sampling parameters but for the seed (often drawn anew for
each request) and the adapter. Of one ingress replica; ignorant of engines.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.types import Request
from serve_app.errors import RequestQuarantinedError

logger = logging.getLogger(__name__)

HELD_S = 600.0
MAX_HELD = 1024


class RequestQuarantine:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until_s: dict[bytes, float] = {}  # the oldest first

    def check(self, requests: Sequence[Request]) -> None:
        """Raises RequestQuarantinedError. Costs nothing while nobody is held."""
        if not self._until_s:
            return
        self._drop_old()
        if fingerprint(requests) in self._until_s:
            raise RequestQuarantinedError

    def add(self, requests: Sequence[Request]) -> None:
        self._drop_old()
        digest = fingerprint(requests)
        self._until_s.pop(digest, None)
        while len(self._until_s) >= MAX_HELD:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[digest] = self._now() + HELD_S
        logger.error("request %s is quarantined: its engines died", digest.hex()[:16])

    def _drop_old(self) -> None:
        now_s = self._now()
        while self._until_s:
            oldest = next(iter(self._until_s))
            if self._until_s[oldest] > now_s:
                return
            del self._until_s[oldest]


def fingerprint(requests: Sequence[Request]) -> bytes:
    """Of one submit call."""
    digest = hashlib.sha256()
    for request in requests:
        params = replace(request.params, seed=None)
        digest.update(repr((len(request.prompt_token_ids), request.adapter, params)).encode())
        digest.update(array("q", request.prompt_token_ids).tobytes())
    return digest.digest()
