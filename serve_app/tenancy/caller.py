"""A key's policy, and the caller that a request is charged to. Frozen values that cross processes;
ignorant of HTTP and of the database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Literal, get_args

Scope = Literal["infer", "load", "admin:read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_WILD = re.compile(r"[*?\[]")


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
    lowest_priority: int | None = None  # that a request may ask for; 0 is normal

    def allows(self, names: tuple[str, ...]) -> bool:
        """Returns True if a glob matches one of the names of a model."""
        globs = _split(self.models)
        return any(globs.match(name) for name in names)


@dataclass(frozen=True, slots=True)
class _Globs:
    """Globs by their kind: a key may have a thousand, and a list of models asks 10,000 times."""

    names: frozenset[str]  # without a wildcard
    prefixes: tuple[str, ...]  # of globs whose only wildcard is a star at the end
    others: re.Pattern[str] | None

    def match(self, name: str) -> bool:
        return (
            name in self.names
            or name.startswith(self.prefixes)
            or (self.others is not None and self.others.match(name) is not None)
        )


@lru_cache(maxsize=256)
def _split(globs: tuple[str, ...]) -> _Globs:
    names = frozenset(glob for glob in globs if not _WILD.search(glob))
    stars = {glob for glob in globs if glob[-1:] == "*" and not _WILD.search(glob[:-1])}
    others = [translate(glob) for glob in globs if glob not in names and glob not in stars]
    prefixes = tuple(sorted(glob[:-1] for glob in stars))
    return _Globs(names, prefixes, re.compile("|".join(others)) if others else None)


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated request's account. Set by the authentication layer before the body is read
    and found at `scope["state"]["caller"]`; without tenancy there is none."""

    key_id: str  # public: in rows, logs and metrics; "jwt:<subject>" for a bearer of an issuer
    policy: KeyPolicy
