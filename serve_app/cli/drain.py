"""The end of a server without cut streams: it takes nothing new, and what is open ends by itself.

Asked over HTTP with the admin token, as an operator would. Ignorant of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import msgspec

_ASK_S = 0.25
_LAST_BYTES_S = 0.2  # for what has left the ingress and not yet Serve's proxy


class _Answer(msgspec.Struct):
    open_requests: int | None


def drain(
    client: httpx.Client,
    url: str,
    token: str,
    limit_s: float,
    is_impatient: Callable[[], bool],
) -> bool:
    """Returns True when no request is open any more, False after `limit_s` seconds, when
    `is_impatient`, and where the server does not answer or does not know its admin token."""
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
