"""A key's policy, and the caller that a request is charged to. Frozen values that cross processes;
ignorant of HTTP and of the database.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

Scope = Literal["infer", "load", "admin:read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """The rules of a key. None: not limited."""

    tenant: str = ""
    # Globs over "base", "base:adapter", "adapter" and "adapter@version"; empty: none. Matched
    # against the names that the request resolves to, never against the client's string.
    models: tuple[str, ...] = ("*",)
    scopes: frozenset[Scope] = frozenset({"infer"})
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel_requests: int | None = None
    tokens_per_day: int | None = None  # calendar days and months in UTC
    tokens_per_month: int | None = None
    max_tokens: int | None = None  # of one answer
    lowest_priority: int | None = (
        None  # the smallest value that a request may ask for (0 is normal)
    )

    def allows(self, names: tuple[str, ...]) -> bool:
        """Returns True if a glob matches one of the names of a model."""
        return any(fnmatchcase(name, glob) for glob in self.models for name in names)


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated request's account. Set by the authentication layer before the body is read
    and found at `scope["state"]["caller"]`; without tenancy there is none."""

    key_id: str  # public: in rows, logs and metrics; "jwt:<subject>" for a bearer of an issuer
    policy: KeyPolicy
