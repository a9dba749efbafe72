"""Access of web pages to the server, by their origin and by the host name in their requests.

A page in a browser may send requests to the loopback address of its machine. It can read the
responses only if its origin is allowed (CORS), or if the name of its own host resolves to the
loopback address (DNS rebinding): then the Host header names that host, and is refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.config import IngressArgs
from serve_app.errors import ApiError, shown
from serve_app.http.asgi import error_response
from serve_app.network import is_loopback

# Probes, scrapers and the command line use a replica's address, whatever name its clients use.
_PROBED = frozenset({"/live", "/ready", "/health"})
_SCRAPED = frozenset({"/metrics"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+?)\.?(?::\d{1,5})?")
_METHODS = ("GET", "HEAD", "POST")
_PREFLIGHT_S = 600
_EXPOSED = (
    "x-request-id",
    "request-id",
    "x-should-retry",
    "retry-after",
    "retry-after-ms",
    *(
        f"x-ratelimit-{part}-{name}"
        for name in ("requests", "tokens")
        for part in ("limit", "remaining", "reset")
    ),
    "x-loraplex-version",
    "x-loraplex-arm",
)


def with_browser_checks(app: ASGIApp, args: IngressArgs, *, has_keys: bool = False) -> ASGIApp:
    """Wraps the application in the CORS and Host checks that the configuration requires. It has to
    answer its own errors: a page of another origin reads them only with CORS headers. `has_keys`:
    requests need a key, which no page has that rebinds its name."""
    if args.cors_origins:
        # Without credentials, in the sense of CORS: an API key in a header is not one.
        app = CORSMiddleware(
            app,
            allow_origins=args.cors_origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
            max_age=_PREFLIGHT_S,
        )
    is_behind_gateway = args.trusted_gateway is not None or has_keys
    if "*" in args.allowed_hosts or (is_behind_gateway and not args.allowed_hosts):
        return app
    # Without a gateway or keys the server listens on this machine only. Scrapers use a local name
    # then, and /metrics, with the names of tenants and models, stays closed to a page that rebinds
    # its name.
    open_paths = _PROBED | _SCRAPED if is_behind_gateway else _PROBED
    return _HostCheck(app, frozenset(args.allowed_hosts), open_paths)


@dataclass(frozen=True, slots=True)
class _HostCheck:
    """Refuses requests whose Host header is neither in `hosts` nor a name of this machine. Browsers
    always send the header; requests without it pass, as do GET and HEAD on `open_paths`."""

    _app: ASGIApp
    _hosts: frozenset[str]
    _open_paths: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_open(scope):
            for name, value in scope["headers"]:
                if name == b"host" and not self._is_allowed(value.decode("latin-1")):
                    refused = ApiError(
                        403,
                        f"The host name {shown(value.decode('latin-1'))} is not allowed; add it to "
                        "args.ingress.allowed_hosts.",
                        code="host_not_allowed",
                    )
                    await error_response(refused, scope)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_allowed(self, value: str) -> bool:
        found = _HOST.fullmatch(value)
        if found is None:
            return False
        name = found[1].lower()
        return name in self._hosts or is_loopback(name.strip("[]"))

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"] in self._open_paths and scope.get("method") in ("GET", "HEAD")
