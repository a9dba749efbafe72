"""The account that a request is charged to, and the prompts whose KV blocks it may share. Pure.

With keys the tenant is the key's; a trusted gateway's header goes before it. Without keys a tenant
is a name in a header, which only a gateway in front can prove. Without a trusted gateway
(`ingress.trusted_gateway`) each tenant that `fairness.weights` names keeps its own account. All
other names share one account of weight 1, in which priorities have no effect: its clients cannot
be told apart, so a thousand made-up names get as much as one. A request without the header belongs
to the default account "".
"""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.cache_salt import cache_salt
from serve_app.config import FairnessArgs
from serve_app.errors import ApiError, shown
from serve_app.tenancy.caller import Caller

_MAX_CHARS = 128
SHARED_ACCOUNT = "\0shared"  # not printable, so that no header can name it


class Tenants:
    def __init__(self, settings: FairnessArgs, *, is_proven: bool, has_keys: bool = False) -> None:
        """`is_proven`: a trusted gateway sets the header; `has_keys`: requests need keys."""
        self._header = settings.tenant_header
        self._named = frozenset(("", *settings.weights))
        self._isolates = settings.isolate_prefix_cache == "tenant"
        self._is_proven = is_proven
        self._has_keys = has_keys

    def read(self, headers: Mapping[str, str], caller: Caller | None = None) -> str:
        """Returns the tenant of a request; "" without a header and a caller. Raises ApiError."""
        field = self._header
        if caller is not None and not (self._is_proven and field in headers):
            return caller.policy.tenant
        name = headers.get(field, "").strip()
        if len(name) > _MAX_CHARS or not name.isprintable():
            raise ApiError(
                400,
                f"{field}: at most {_MAX_CHARS} printable characters, got {shown(name)}.",
                param=field,
                code="invalid_value",
            )
        return name

    def account(self, tenant: str, priority: int = 0) -> tuple[str, int]:
        """Returns the tenant and the priority that a request is queued with. `tenant`: as `read`
        returns it."""
        if self._is_proven or self._has_keys or tenant in self._named:
            return tenant, priority
        return SHARED_ACCOUNT, 0

    def cache_salt(self, key: bytes, tenant: str, client_salt: str) -> str:
        """Returns the prefix-cache salt of a request. A made-up tenant counts here as it is sent:
        it separates its requests from all others."""
        return cache_salt(key, tenant, client_salt) if self._isolates else client_salt
