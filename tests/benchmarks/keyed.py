"""API keys for benchmarks, made over HTTP and handed to clients' processes by environment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

import httpx

from serve_app.config import ADMIN_TOKEN

TENANCY: dict[str, object] = {"enabled": True}  # args.tenancy, with the keys in the home
_KEYS = "LORAPLEX_BENCHMARK_KEYS"  # a JSON object: a key for each name
_KNOWN = 24  # answers in a row on connections of their own: every ingress has the key
_LIMIT_S = 60.0


def admin_headers() -> dict[str, str]:
    """Returns the header with the admin token; {} without one."""
    token = os.environ.get(ADMIN_TOKEN)
    return {"authorization": f"Bearer {token}"} if token else {}


def make_key(url: str, **fields: object) -> tuple[str, str]:
    """Returns the id and the text of a new key that every ingress has. `fields`: of /key/generate.
    Raises TimeoutError."""
    deadline_s = time.monotonic() + _LIMIT_S
    while True:
        answer = httpx.post(f"{url}/key/generate", json=fields, headers=admin_headers(), timeout=30)
        if answer.status_code != 503:  # the manager is away, or opens its database
            break
        _check(deadline_s, answer.text)
    answer.raise_for_status()
    made, num_known = answer.json(), 0
    headers = {"authorization": f"Bearer {made['key']}"}
    while num_known < _KNOWN:
        found = httpx.get(f"{url}/v1/models", headers=headers, timeout=30)
        num_known = num_known + 1 if found.status_code == 200 else 0
        if not num_known:
            _check(deadline_s, found.text)
    return made["token_id"], made["key"]


def give_keys(url: str, names: Iterable[str], **fields: object) -> None:
    """Makes a key for each name, of a tenant of this name, for this process and its children."""
    keys = {name: make_key(url, team_id=name, **fields)[1] for name in names}
    os.environ[_KEYS] = json.dumps(keys)


def key_of(name: str) -> str | None:
    """Returns the key that `give_keys` made for a name; None: requests need no key."""
    given = os.environ.get(_KEYS)
    return None if given is None else json.loads(given)[name]


def recorded(url: str, key_id: str) -> dict[str, Any]:
    """Returns the sums of a key's use as the manager has recorded them; {}: none."""
    answer = httpx.get(f"{url}/admin/usage", params={"by": "key"}, headers=admin_headers())
    if answer.status_code == 503:  # the manager is coming back
        return {}
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["usage"]
    return next((line for line in found if line["key"] == key_id), {})


def _check(deadline_s: float, why: str) -> None:
    if time.monotonic() > deadline_s:
        raise TimeoutError(why)
    time.sleep(0.2)
