"""The policies by name, and one made from its settings.

`expected_ttft` is the one to use. The others are what routers elsewhere do under these names, with
the same views and manners: to compare with.
"""

from __future__ import annotations

import inspect
import pkgutil
import reprlib
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Protocol, cast, get_args, get_type_hints

from serve_app.messages import RoutingRequest
from serve_app.routing.expected_ttft import ExpectedTtft
from serve_app.routing.policy import BasePolicy, Policy, Ranked
from serve_app.routing.score import expected_ttft

Option = bool | int | float | str


class PolicyError(ValueError):
    """A policy cannot be made as the configuration has it."""


class PolicyArgs(Protocol):
    """`config.RouterArgs`."""

    @property
    def policy(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Option]: ...


class RoundRobin(BasePolicy):
    """One after the other."""

    _next = 0

    def _order(self, ask: RoutingRequest, now_s: float) -> list[Ranked]:
        every = self._lookout.every
        first = self._next % len(every)
        if not ask.dry_run:
            self._next = first + 1
        count = min(len(every), 16)
        turn = [every[(first + i) % len(every)] for i in range(count)]
        return [Ranked(one, expected_ttft(ask, one), "turn") for one in turn]


class PowerOfTwo(BasePolicy):
    """The one with fewer sequences of two drawn at random."""

    def _order(self, ask: RoutingRequest, now_s: float) -> list[Ranked]:
        drawn = self._lookout.some(2)
        drawn.sort(key=lambda one: (one.num_sequences, one.queued_tokens))
        return [Ranked(one, expected_ttft(ask, one), "fewer") for one in drawn]


class AdapterAffinity(BasePolicy):
    """Where the adapter is in memory, unless that replica has so many sequences more."""

    def __init__(
        self, seed: int | None = None, num_random: int = 6, load_cost: float = 6.0
    ) -> None:
        """`load_cost`: of an adapter that is not there, in sequences."""
        super().__init__(seed, num_random)
        self._load_cost = load_cost

    def _order(self, ask: RoutingRequest, now_s: float) -> list[Ranked]:
        scored = []
        for one in self._lookout.look(ask):
            cost = float(one.num_sequences)
            if not (has := one.has_adapter(ask.adapter)):
                cost += self._load_cost
                cost -= one.is_loading(ask.adapter or "") * self._load_cost / 2
            reason = "affinity" if has and ask.adapter is not None else "fewer"
            scored.append((cost, self._draw.random(), one, reason))
        scored.sort(key=lambda line: line[:2])
        return [Ranked(one, expected_ttft(ask, one), reason) for *_, one, reason in scored]


class PrefixAffinity(BasePolicy):
    """Where most of the prompt is cached; where it is hardly anywhere, or sequences are spread
    unevenly, the one with the fewest."""

    def __init__(
        self,
        seed: int | None = None,
        num_random: int = 6,
        min_share: float = 0.5,
        max_gap: int = 32,
        max_ratio: float = 1.5,
    ) -> None:
        """`min_share` of the prompt makes a match; `max_gap` and `max_ratio`: what the fullest may
        have beyond the emptiest."""
        super().__init__(seed, num_random)
        self._min_share, self._max_gap, self._max_ratio = min_share, max_gap, max_ratio

    def _order(self, ask: RoutingRequest, now_s: float) -> list[Ranked]:
        few = self._lookout.look(ask)
        counts = [one.num_sequences for one in few]
        low, high = min(counts), max(counts)
        is_even = high - low <= self._max_gap or high <= self._max_ratio * low
        scored = []
        for one, count in zip(few, counts, strict=True):
            cached = one.num_cached_tokens(ask.prefixes) if is_even else 0
            is_match = cached >= self._min_share * ask.num_tokens and cached > 0
            key = (-cached if is_match else 0, count, self._draw.random())
            scored.append((key, one, "affinity" if is_match else "fewer"))
        scored.sort(key=lambda line: line[0])
        return [Ranked(one, expected_ttft(ask, one), reason) for _, one, reason in scored]


POLICIES: Mapping[str, type[Policy]] = {
    "expected_ttft": ExpectedTtft,
    "adapter_affinity": AdapterAffinity,
    "prefix_affinity": PrefixAffinity,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
_NAMES = ", ".join(POLICIES)


def check_policy(args: PolicyArgs) -> None:
    """Checks the policy's name, and the options of one of ours. Imports nothing: anybody may have
    written `args`. PolicyError names the field and its value."""
    if args.policy in POLICIES:
        make_policy(args)
    elif ":" not in args.policy:
        raise PolicyError(
            f"policy {args.policy[:100]!r} is none of {_NAMES}, and no 'module:Class'"
        )


def make_policy(args: PolicyArgs) -> Policy:
    """PolicyError names the field and its value. Imports the module of a `module:Class`: only a
    configuration file may name one."""
    kind = POLICIES.get(args.policy) or _load(args.policy)
    _check_options(args, kind)
    try:
        policy: Policy = kind(**args.options)
    except Exception as error:  # a user's class may raise anything; ours OverflowError, too
        raise PolicyError(f"options {_shown_options(args)}: {error}") from error
    return policy


def _shown_options(args: PolicyArgs) -> str:
    return reprlib.repr(dict(args.options))


def _load(path: str) -> type[Policy]:
    if ":" not in path:
        raise PolicyError(f"policy {path[:100]!r} is none of {_NAMES}, and no 'module:Class'")
    try:
        kind = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:  # a user's module may do anything when it is imported
        why = f"{type(error).__name__}: {error}"
        raise PolicyError(f"policy {path!r} cannot be imported: {why}") from error
    if not inspect.isclass(kind):
        raise PolicyError(f"policy {path!r} is no class")
    lacking = [name for name in ("rank", "changed") if not callable(getattr(kind, name, None))]
    if lacking:
        raise PolicyError(f"policy {path!r} has no method {' and no '.join(lacking)}")
    return cast("type[Policy]", kind)


def _check_options(args: PolicyArgs, kind: type[Policy]) -> None:
    """Names and plain types, by the constructor's annotations."""
    if kind.__init__ is object.__init__:
        known: Mapping[str, inspect.Parameter] = {}
    else:
        known = dict(list(inspect.signature(kind.__init__).parameters.items())[1:])
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    hints = get_type_hints(kind.__init__) if known else {}
    for name, value in args.options.items():
        if name not in known and not takes_any:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise PolicyError(
                f"options.{name[:100]}: policy {args.policy!r} does not have it; {has}"
            )
        hint = hints.get(name)
        wanted: Sequence[type] = get_args(hint) or (hint,) if hint is not None else ()
        if wanted and not _fits(value, wanted):
            names = " or ".join(one.__name__ for one in wanted if one is not NoneType)
            raise PolicyError(f"options.{name} is {reprlib.repr(value)}, but must be {names}")


def _fits(value: Option, wanted: Sequence[type]) -> bool:
    if float in wanted and type(value) is int:
        return True
    plain = [one for one in wanted if one in (bool, int, float, str)]
    return type(value) in plain or len(plain) < len([w for w in wanted if w is not NoneType])
