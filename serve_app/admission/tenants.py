"""The account that a request is charged to, and which prompts' KV blocks it may share. Pure.

A tenant is a name in a header, which only a gateway in front can prove. Where none is trusted
(`ingress.trusted_gateway`), the tenants that `fairness.weights` names keep an account each; all
other names are one account of weight 1, in which no class counts: its requests come from clients
that nothing tells apart, so a thousand made-up names get what one gets. A request without the
header belongs to the default account "".
"""

from __future__ import annotations

from serve_app.admission.waiting_room import Applicant
from serve_app.cache_salt import cache_salt
from serve_app.config import FairnessArgs

SHARED_ACCOUNT = "\0shared"  # not printable, so that no header names it


class Tenants:
    def __init__(self, settings: FairnessArgs, *, is_proven: bool) -> None:
        """`is_proven`: a trusted gateway sets the header."""
        self._named = frozenset(("", *settings.weights))
        self._isolates = settings.isolate_prefix_cache == "tenant"
        self._is_proven = is_proven

    def applicant(
        self, tenant: str, adapter: str = "", rank: int = 0, priority: int = 0
    ) -> Applicant:
        """`tenant`: as the header names it, "" without one; `adapter`, by name, "" for none."""
        if self._is_proven or tenant in self._named:
            return Applicant(tenant, adapter, rank, priority)
        return Applicant(SHARED_ACCOUNT, adapter, rank)

    def cache_salt(self, key: bytes, tenant: str, client_salt: str) -> str:
        """The salt of a request's prefix cache. A made-up name counts as it comes: it separates
        its requests from all others."""
        return cache_salt(key, tenant, client_salt) if self._isolates else client_salt
