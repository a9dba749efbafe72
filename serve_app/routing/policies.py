"""The routing policies by name, and the construction of a policy from its settings.

`expected_ttft` is the recommended policy. The others do the same as policies of these names in
other routers, on the same views, for comparison.
"""

from __future__ import annotations

import inspect
import pkgutil
import reprlib
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import cast, get_args, get_type_hints

from engine.types import key_digests
from serve_app.messages import RoutingRequest
from serve_app.routing.expected_ttft import ExpectedTtft
from serve_app.routing.policy import BasePolicy, Policy, Ranked
from serve_app.routing.score import expected_ttft

Option = bool | int | float | str


class PolicyError(ValueError):
    """The policy of the configuration cannot be made."""


class RoundRobin(BasePolicy):
    """Ranks the replicas in turn."""

    _next = 0

    def _order(self, request: RoutingRequest, now_s: float) -> list[Ranked]:
        replicas = self._sampler.all
        first = self._next % len(replicas)
        if not request.dry_run:
            self._next = first + 1
        count = min(len(replicas), 16)
        turn = [replicas[(first + i) % len(replicas)] for i in range(count)]
        return [Ranked(replica, expected_ttft(request, replica, now_s), "turn") for replica in turn]


class PowerOfTwo(BasePolicy):
    """Draws two replicas at random and ranks the replica with fewer sequences first."""

    def _order(self, request: RoutingRequest, now_s: float) -> list[Ranked]:
        drawn = self._sampler.sample(2)
        drawn.sort(key=lambda replica: (replica.num_sequences, replica.queued_tokens))
        return [
            Ranked(replica, expected_ttft(request, replica, now_s), "fewer") for replica in drawn
        ]


class AdapterAffinity(BasePolicy):
    """Prefers replicas that have the adapter in memory, unless they have many more sequences."""

    def __init__(
        self, seed: int | None = None, num_random: int = 6, load_cost: float = 6.0
    ) -> None:
        """`load_cost`: how many sequences a missing adapter counts as."""
        super().__init__(seed, num_random)
        self._load_cost = load_cost

    def _order(self, request: RoutingRequest, now_s: float) -> list[Ranked]:
        scored = []
        for replica in self._sampler.candidates(request):
            cost = float(replica.num_sequences)
            if not (has := replica.has_adapter(request.adapter)):
                cost += self._load_cost
                digests = key_digests(request.adapter)
                cost -= any(map(replica.is_loading, digests)) * self._load_cost / 2
            reason = "affinity" if has and request.adapter is not None else "fewer"
            scored.append((cost, self._draw.random(), replica, reason))
        scored.sort(key=lambda line: line[:2])
        return [
            Ranked(replica, expected_ttft(request, replica, now_s), reason)
            for *_, replica, reason in scored
        ]


class PrefixAffinity(BasePolicy):
    """Prefers the replica that has most of the prompt cached. If no replica has enough of it, or
    the sequences are spread unevenly, prefers the replica with the fewest sequences."""

    def __init__(
        self,
        seed: int | None = None,
        num_random: int = 6,
        min_share: float = 0.5,
        max_gap: int = 32,
        max_ratio: float = 1.5,
    ) -> None:
        """`min_share`: the share of the prompt that must be cached. `max_gap`, `max_ratio`: the
        spread is even if the fullest replica has at most so many sequences more than the emptiest,
        or at most so many times as many."""
        super().__init__(seed, num_random)
        self._min_share, self._max_gap, self._max_ratio = min_share, max_gap, max_ratio

    def _order(self, request: RoutingRequest, now_s: float) -> list[Ranked]:
        candidates = self._sampler.candidates(request)
        counts = [replica.num_sequences for replica in candidates]
        low, high = min(counts), max(counts)
        is_even = high - low <= self._max_gap or high <= self._max_ratio * low
        scored = []
        for replica, count in zip(candidates, counts, strict=True):
            cached = replica.num_cached_tokens(request.prefixes) if is_even else 0
            is_match = cached >= self._min_share * request.num_tokens and cached > 0
            key = (-cached if is_match else 0, count, self._draw.random())
            scored.append((key, replica, "affinity" if is_match else "fewer"))
        scored.sort(key=lambda line: line[0])
        return [
            Ranked(replica, expected_ttft(request, replica, now_s), reason)
            for _, replica, reason in scored
        ]


POLICIES: Mapping[str, type[Policy]] = {
    "expected_ttft": ExpectedTtft,
    "adapter_affinity": AdapterAffinity,
    "prefix_affinity": PrefixAffinity,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
_NAMES = ", ".join(POLICIES)


def check_policy(name: str, options: Mapping[str, Option]) -> None:
    """Checks the policy's name, and the options if it is in `POLICIES`. Imports no module, because
    both may come from an untrusted writer. PolicyError names the field and its value."""
    if name in POLICIES:
        make_policy(name, options)
    else:
        _check_path(name)


def make_policy(name: str, options: Mapping[str, Option]) -> Policy:
    """Makes the policy. PolicyError names the field and its value. Imports the module of a
    `module:Class`, so only a configuration file may name one."""
    kind = POLICIES.get(name) or _load(name)
    _check_options(name, options, kind)
    try:
        policy: Policy = kind(**options)
    except Exception as error:  # a user's class may raise anything, the product's OverflowError
        raise PolicyError(f"options {reprlib.repr(dict(options))}: {error}") from error
    return policy


def _check_path(path: str) -> None:
    if ":" not in path:
        raise PolicyError(f"policy {path[:100]!r} is none of {_NAMES}, nor a 'module:Class'")


def _load(path: str) -> type[Policy]:
    _check_path(path)
    try:
        kind = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        why = f"{type(error).__name__}: {error}"
        raise PolicyError(f"policy {path!r} cannot be imported: {why}") from error
    if not inspect.isclass(kind):
        raise PolicyError(f"policy {path!r} is not a class")
    lacking = [name for name in ("rank", "changed") if not callable(getattr(kind, name, None))]
    if lacking:
        raise PolicyError(f"policy {path!r} has no method {' and no '.join(lacking)}")
    return cast("type[Policy]", kind)


def _check_options(policy: str, options: Mapping[str, Option], kind: type[Policy]) -> None:
    """Checks the options' names and plain types against the constructor's annotations."""
    if kind.__init__ is object.__init__:
        known: Mapping[str, inspect.Parameter] = {}
    else:
        known = dict(list(inspect.signature(kind.__init__).parameters.items())[1:])
    takes_any = any(option.kind is option.VAR_KEYWORD for option in known.values())
    hints = get_type_hints(kind.__init__) if known else {}
    for name, value in options.items():
        if name not in known and not takes_any:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise PolicyError(f"options.{name[:100]}: policy {policy!r} does not have it; {has}")
        hint = hints.get(name)
        wanted: Sequence[type] = get_args(hint) or (hint,) if hint is not None else ()
        if wanted and not _fits(value, wanted):
            names = " or ".join(kind.__name__ for kind in wanted if kind is not NoneType)
            raise PolicyError(f"options.{name} is {reprlib.repr(value)}, but must be {names}")


def _fits(value: Option, wanted: Sequence[type]) -> bool:
    kinds = [kind for kind in wanted if kind is not NoneType]  # a Callable's have a list
    is_plain = all(kind in (bool, int, float, str) for kind in kinds)
    return not is_plain or type(value) in kinds or (float in kinds and type(value) is int)
