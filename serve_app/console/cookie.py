"""The cookie of a login: the key itself, which stands for the header `authorization` in requests
that only the console's own pages can make.

The cookie has the key and no session id: every ingress checks it as it checks a bearer, a revoked
key ends its logins at once, and there is no table of sessions to keep, to share or to lose. No
script reads it (HttpOnly), and no log contains it.

A browser adds cookies also to requests that other pages cause. Therefore the cookie counts only

- with the header `x-loraplex-console`. A page of another origin has to ask by a CORS preflight
  before it may send one, and the server never allows credentials there; forms, images and links
  cannot send one;
- if `sec-fetch-site` is same-origin, or, from browsers that send none, `origin` is this host.
  SameSite=Strict alone is weaker: another port of this host is the same site.

A request with a key of its own is left as it is.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = b"x-loraplex-console"
MAX_KEY_BYTES = 3000  # browsers drop a cookie above 4096 bytes

_NAME = "loraplex-console"
# A name with this prefix cannot be set by another host of the same domain; it needs TLS.
_SECURE_NAME = "__Host-" + _NAME
_KEYS = frozenset({b"authorization", b"x-api-key", b"api-key"})


class ConsoleCookie:
    """Middleware that turns the cookie of the console's requests into a bearer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            if any([name == HEADER for name, _ in headers]):
                # In place: the layers around this one find the route in the same scope.
                scope["headers"] = _with_bearer(scope)
        await self._app(scope, receive, send)


def is_own(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Returns True if a page of the console made this request, False if another page may have."""
    given = dict(headers)
    if HEADER not in given:
        return False
    site = given.get(b"sec-fetch-site")
    if site is not None:
        return site == b"same-origin"
    origin = given.get(b"origin")
    return origin is None or origin.partition(b"://")[2] == given.get(b"host")


def set_cookie(scope: Scope, key: str | None) -> str:
    """Returns the value of the header `set-cookie` for a login, or with None for a logout."""
    is_secure = _is_secure(scope)
    value = "" if key is None else base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    parts = [f"{_name(is_secure)}={value}", "Path=/", "HttpOnly", "SameSite=Strict"]
    if is_secure:
        parts.append("Secure")
    if key is None:
        parts.append("Max-Age=0")
    return "; ".join(parts)


def _with_bearer(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Returns the headers without cookies, and with the bearer of the login if it counts."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    kept = [(name, value) for name, value in headers if name != b"cookie"]
    if any(name in _KEYS for name, _ in kept) or not is_own(kept):
        return kept
    key = _key_in(headers, _name(_is_secure(scope)))
    if key:
        kept.append((b"authorization", b"Bearer " + key))
    return kept


def _key_in(headers: Iterable[tuple[bytes, bytes]], name: str) -> bytes | None:
    """Returns the key in the cookie of this name; None without one, or if it is malformed."""
    cookies = (value for header, value in headers if header == b"cookie")
    parts = (part.strip().partition(b"=") for value in cookies for part in value.split(b";"))
    text = next((text for given, _, text in parts if given == name.encode()), None)
    if text is None:
        return None
    try:
        key = base64.b64decode(text + b"=" * (-len(text) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    # A line break would end the header that the key is put into.
    return None if b"\r" in key or b"\n" in key else key


def _name(is_secure: bool) -> str:
    return _SECURE_NAME if is_secure else _NAME


def _is_secure(scope: Scope) -> bool:
    """Returns True behind TLS, here or at a gateway. A client that invents the header only names
    its own cookie differently."""
    headers: Mapping[bytes, bytes] = dict(scope["headers"])
    forwarded = headers.get(b"x-forwarded-proto", b"").partition(b",")[0].strip()
    return scope.get("scheme") == "https" or forwarded == b"https"
