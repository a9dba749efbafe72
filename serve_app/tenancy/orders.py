"""The messages of ingresses to the manager about keys and their use. Apart from the classes that
carry them out, which import the database's libraries: two seconds of every start without keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from serve_app.tenancy.usage import Usage

HOUR_S, DAY_S = 3600, 86_400
Group = Literal["key", "tenant", "base", "model", "arm", "hour", "day"]
GROUPS: tuple[Group, ...] = get_args(Group)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """An operator's order about a key."""

    kind: Literal["generate", "update", "rotate"]
    actor: str  # see `Act`
    key: str = ""  # an id or an alias
    # generate, update, rotate: fields of KeyPolicy, and alias, metadata, expires_s.
    changes: Mapping[str, Any] = field(default_factory=dict)
    grace_s: float = 0.0  # rotate: the former secret counts for so long


@dataclass(frozen=True, slots=True)
class Act:
    """An administrative act, for the audit log. Never contains a secret."""

    actor: str
    action: str
    subject: str
    before: Json | None = None
    after: Json | None = None


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """The use of the hours that begin in [from_s, to_s), summed `by` these."""

    by: tuple[Group, ...]
    from_s: float
    to_s: float
    key_id: str | None = None  # of this key alone


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """The sums of a group. `values`: in the order of the query's `by`."""

    values: tuple[str | int, ...]
    usage: Usage
    cost: float


def check_groups(names: Sequence[str]) -> tuple[Group, ...]:
    """Raises ValueError for a name that is not in GROUPS, or twice there."""
    for name in names:
        if name not in GROUPS:
            raise ValueError(f"{name!r} is none of {', '.join(GROUPS)}")
    if len(set(names)) < len(names):
        raise ValueError("a name is there twice")
    return tuple(name for name in GROUPS if name in names)
