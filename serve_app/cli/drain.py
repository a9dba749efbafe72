"""Drains a server: it refuses new requests, and its open requests end by themselves.

Calls the admin API, as an operator does. Ignorant of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import msgspec

_ASK_S = 0.25
_LAST_BYTES_S = 0.2  # for bytes that left the ingress but not yet Serve's proxy


class _Answer(msgspec.Struct):
    open_requests: int | None


def drain(
    client: httpx.Client,
    url: str,
    token: str,
    limit_s: float,
    is_impatient: Callable[[], bool],
) -> bool:
    """Returns True once no request is open, False after `limit_s` seconds, if `is_impatient`, or if
    the server does not answer or rejects the admin token."""
    deadline_s = time.monotonic() + limit_s
    headers = {"authorization": f"Bearer {token}"}
    while time.monotonic() < deadline_s and not is_impatient():
        try:
            answer = client.post(f"{url}/admin/drain", headers=headers)
        except httpx.TransportError:
            return False
        if answer.status_code == 200:
            if msgspec.json.decode(answer.content, type=_Answer).open_requests == 0:
                time.sleep(_LAST_BYTES_S)
                return True
        elif answer.status_code != 503:  # 503: the manager is away for a moment
            return False
        time.sleep(_ASK_S)
    return False
