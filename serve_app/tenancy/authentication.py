"""The layer that identifies the caller, before the body is read and without I/O.

The caller is then at `scope["state"]["caller"]`. A failure is a response and a count: no row, and
no part of the bearer in a log.
"""

from __future__ import annotations

import hmac
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ApiError, ServiceUnavailableError
from serve_app.http.asgi import error_response
from serve_app.metrics.exposition import as_text, counter
from serve_app.tenancy.access import required
from serve_app.tenancy.caller import SCOPES, Caller, KeyPolicy
from serve_app.tenancy.keys import is_id
from serve_app.tenancy.table import KeyTable, RefusedKeyError

if TYPE_CHECKING:
    from serve_app.tenancy.oidc import TokenVerifier

Note = Callable[[str, str, str], None]  # of the actor, the method and the path

# In the order in which they count: OpenAI's clients, Anthropic's, and Azure's.
_HEADERS = (b"authorization", b"x-api-key", b"api-key")
_BEARER = "bearer"
_MAX_BEARER_BYTES = 16 * 1024  # tokens of an issuer may list many groups
ADMIN = Caller("admin-token", KeyPolicy(scopes=frozenset(SCOPES)))
_WORDS = {
    "missing": "You didn't provide an API key; send the header Authorization: Bearer KEY.",
    "invalid": "Incorrect API key provided.",
    "expired": "This API key has expired.",
}


class Authenticator:
    """Finds the caller of a request by its headers, and counts the failures of an ingress."""

    def __init__(
        self, table: KeyTable, admin_token: str | None, tokens: TokenVerifier | None = None
    ) -> None:
        """`tokens`: verifies the bearers of an issuer; None: there is no issuer."""
        self.table = table
        self._admin_token = None if admin_token is None else admin_token.encode()
        self._tokens = tokens
        self._num_failures: Counter[str] = Counter(dict.fromkeys((*_WORDS, "scope"), 0))

    async def check(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> Caller | None:
        """Returns the caller; None if the route is open. Raises ApiError: 401 without a valid key,
        403 for a key without the scope, 404 for no route; ServiceUnavailableError while the keys
        are unknown."""
        access = required(method, path)
        if access == "open":
            return None
        caller = await self.find(headers)
        if access is None:
            raise ApiError(404, f"No such endpoint: {method} {path[:128]}.", code="not_found")
        if access != "any" and access not in caller.policy.scopes:
            self._num_failures["scope"] += 1
            raise ApiError(403, f"This API key lacks the scope {access}.", code="missing_scope")
        return caller

    async def find(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Returns the owner of the key in a request's headers. Raises ApiError with 401 without a
        valid key; ServiceUnavailableError while the keys are unknown."""
        try:
            return await self._find(bearer_of(headers))
        except RefusedKeyError as error:
            raise self._refusal(error) from None

    def present(self, caller: Caller) -> Caller:
        """Returns an earlier caller with the policy that its key has now. Raises ApiError with 401
        if the key has ended since. The admin token and the bearers of an issuer stay as they were.
        """
        if not is_id(caller.key_id):
            return caller
        try:
            return self.table.present(caller, time.time())
        except RefusedKeyError as error:
            raise self._refusal(error) from None

    def text(self, ingress: str) -> bytes:
        """Returns the counts in Prometheus' text format."""
        own = {"ingress": ingress}
        name = "loraplex_authentication_failures"
        return as_text(counter(name, self._num_failures, own, "reason"))

    def _refusal(self, error: RefusedKeyError) -> ApiError:
        self._num_failures[error.reason] += 1
        return ApiError(401, _WORDS[error.reason], code="invalid_api_key")

    async def _find(self, bearer: bytes | None) -> Caller:
        if not bearer:
            raise RefusedKeyError("missing")
        if self._admin_token is not None and hmac.compare_digest(bearer, self._admin_token):
            return ADMIN
        try:
            text = bearer.decode("ascii")
        except UnicodeDecodeError:
            raise RefusedKeyError("invalid") from None
        now_s = time.time()
        if self._tokens is not None and is_token(text):
            return await self._tokens.verify(text, now_s)
        if not self.table.is_known:
            raise ServiceUnavailableError(
                "The keys are not known yet: the server is starting, or their database is away.", 2
            )
        return self.table.find(text, now_s)


class AuthenticationMiddleware:
    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, note: Note | None = None
    ) -> None:
        """`note` receives each administrative act that succeeded, except acts on keys, which the
        manager notes itself."""
        self._app = app
        self._authenticator = authenticator
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                caller = await self._authenticator.check(
                    scope["method"], scope["path"], scope["headers"]
                )
            except (ApiError, ServiceUnavailableError) as error:
                response = error_response(error, scope)
                if response.status_code == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            # A state of its own: the server's is shared by its requests.
            scope["state"] = {**(scope.get("state") or {}), "caller": caller}
            if caller is not None and self._note is not None and _is_act(scope):
                send = self._noting(scope, caller, send, self._note)
        await self._app(scope, receive, send)

    @staticmethod
    def _noting(scope: Scope, caller: Caller, send: Send, note: Note) -> Send:
        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                note(caller.key_id, scope["method"], scope["path"])
            await send(message)

        return noting_send


def _is_act(scope: Scope) -> bool:
    method, path = scope["method"], scope["path"]
    changes = method not in ("GET", "HEAD") and required(method, path) in ("admin", "load")
    return changes and not path.startswith("/key/")


def bearer_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the key in a request's headers, or None. It is empty where a header is of another
    form, such as basic authorization."""
    found = {name: value for name, value in headers if name in _HEADERS}
    for name in _HEADERS:
        value = found.get(name)
        if value is None:
            continue
        if len(value) > _MAX_BEARER_BYTES:
            raise RefusedKeyError("invalid")
        if name == b"authorization":
            scheme, _, value = value.partition(b" ")
            if scheme.lower() != _BEARER.encode():
                continue
        return value.strip()
    return None


def is_token(text: str) -> bool:
    """Returns True if a bearer has the form of a signed token."""
    return text.startswith("ey") and text.count(".") == 2
