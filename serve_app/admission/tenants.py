"""The account that a request is charged to, and the prompts whose KV blocks it may share. Pure.

A tenant is a name in a header, which only a gateway in front can prove. Without a trusted gateway
(`ingress.trusted_gateway`) each tenant that `fairness.weights` names keeps its own account. All
other names share one account of weight 1, in which priorities have no effect: its clients cannot
be told apart, so a thousand made-up names get as much as one. A request without the header belongs
to the default account "".
"""

from __future__ import annotations

from serve_app.cache_salt import cache_salt
from serve_app.config import FairnessArgs

SHARED_ACCOUNT = "\0shared"  # not printable, so that no header can name it


class Tenants:
    def __init__(self, settings: FairnessArgs, *, is_proven: bool) -> None:
        """`is_proven`: a trusted gateway sets the header."""
        self._named = frozenset(("", *settings.weights))
        self._isolates = settings.isolate_prefix_cache == "tenant"
        self._is_proven = is_proven

    def account(self, tenant: str, priority: int = 0) -> tuple[str, int]:
        """Returns the tenant and the priority that a request is queued with. `tenant`: as the
        header names it, "" without the header."""
        if self._is_proven or tenant in self._named:
            return tenant, priority
        return SHARED_ACCOUNT, 0

    def cache_salt(self, key: bytes, tenant: str, client_salt: str) -> str:
        """Returns the prefix-cache salt of a request. A made-up tenant counts here as it is sent:
        it separates its requests from all others."""
        return cache_salt(key, tenant, client_salt) if self._isolates else client_salt
