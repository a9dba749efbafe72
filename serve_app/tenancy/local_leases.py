"""The lease of one key at an ingress: the amounts that its requests are admitted against.

Without a lock and without I/O; the time is an argument, of the ingress's clock. While the manager
is away the lease refills by the rate of the last grant; see `leases` for the manager's side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from serve_app.tenancy.caller import KeyPolicy
from serve_app.tenancy.leases import LEASE_S, Claim, Claims, Grant, Grants, LimitName, limits_of

_DRY_S = 0.25  # after an answer that did not cover the need, until the next claim
_MAX_DRY_S = 2.0  # a debt of tokens may last longer, but other ingresses may return some
_DEMAND_S = 1.0  # time constant of the mean demand
_NEWEST = 0.1  # share of a new request in the mean of tokens
_ROUNDING = 1e-6
_LEAST_ALONE = 2  # requests that a small share saves up


@dataclass(slots=True, kw_only=True)
class _Limit:
    limit: int
    alone: float  # while the manager is away: per second of a rate; of a total: in addition
    offered: float = 0.0  # since the last claim
    demand: float = 0.0  # mean per second
    is_first: bool = True
    dry_until_s: float = -math.inf  # a claim before is useless
    refused_until_s: float = -math.inf  # when the last request that it refused may come again

    def measure(self, elapsed_s: float) -> None:
        """Adds the offers since the last claim to the mean demand."""
        if elapsed_s > 0:
            weight = 1 - math.exp(-elapsed_s / _DEMAND_S)
            self.demand += weight * (self.offered / elapsed_s - self.demand)
            self.offered = 0.0

    def pause(self, wait_s: float, now_s: float) -> None:
        """Claims no more for so long, or until the requests that it refused come back."""
        until_s = now_s + min(max(wait_s, _DRY_S), _MAX_DRY_S)
        if self.refused_until_s > max(now_s, self.dry_until_s):
            until_s = min(until_s, self.refused_until_s)
        self.dry_until_s = until_s


@dataclass(slots=True, kw_only=True)
class _Rate(_Limit):
    """A limit per minute."""

    credited_s: float  # when an answer, or a refill without the manager, came last
    least: float  # a request without the manager needs so much; 0: any positive amount
    balance: float = 0.0  # negative: requests used more than was expected
    wanted: float = 0.0  # by the last claim
    remaining: float = 0.0  # at the manager, below 0: a debt
    room: float = 0.0  # at the manager, until its bucket is full
    was_alone: bool = False

    def lacks(self, amount: float, now_s: float, is_away: bool) -> bool:
        if is_away:
            refill = self.alone * (now_s - self.credited_s)
            self.credited_s = now_s
            most = max(self.balance, _LEAST_ALONE * self.least, self.alone * LEASE_S)
            self.balance = min(most, self.balance + refill)
            is_dry = self.balance <= 0 or self.balance + _ROUNDING < self.least
            self.was_alone |= not is_dry
            return is_dry
        return self.balance + _ROUNDING < amount

    def ready_s(self, is_away: bool) -> float:
        """Returns when it admits a request of any number of tokens, if no other comes first.
        Without the manager that is within a minute, in which another manager starts."""
        if is_away:
            lacking_s = (self.least - self.balance) / self.alone if self.alone else math.inf
            return self.credited_s + min(lacking_s, 60.0)
        lacking = self.least - self.remaining
        if self.remaining < 0:  # the claim for the request pays a part of the debt
            lacking -= max(0.0, self.balance - self.least)
        return self.credited_s + (lacking * 60 / self.limit if self.limit else 60.0)

    def claim(self, elapsed_s: float, waiting: Sequence[float]) -> Claim:
        """`waiting`: the amounts that requests wait for, the first first."""
        self.measure(elapsed_s)
        wanted = self.demand * LEASE_S
        # The manager grants nothing while the key is in debt: a request that used less than was
        # expected has left an amount here that pays it.
        first = next(iter(waiting), 0.0)
        is_owed = self.remaining < 0 and first > self.balance
        kept = 0.0 if is_owed else math.inf if waiting else wanted
        returned = 0.0
        if not self.was_alone and self.balance > kept + self.least:
            returned = self.balance - kept
            if self.least:  # a part of a request is of no use
                returned = math.floor(returned)
            self.balance -= returned
        want = max(0.0, wanted - self.balance)
        need = max(0.0, sum(waiting) - self.balance) if waiting else 0.0
        least = max(0.0, first - self.balance)
        self.wanted = max(want, need)
        return Claim(
            *(self.limit, need, least, self.wanted, self.demand, returned, 0.0),
            *(self.is_first, self.alone if self.was_alone else 0.0),
        )

    def apply(self, grant: Grant, now_s: float) -> bool:
        """Returns True if the next claims would be in vain: the demand is above its share."""
        self.balance += grant.amount
        self.alone, self.remaining, self.room = grant.alone, grant.remaining, grant.room
        self.credited_s, self.was_alone = now_s, False
        # A part of a request is granted only to one that waits for that part.
        wanted = math.floor(self.wanted + _ROUNDING) if self.least else self.wanted
        return grant.amount < wanted and self.demand > self.alone


@dataclass(slots=True, kw_only=True)
class _Total(_Limit):
    """A limit of a sum: slots of parallel requests, or tokens of a day or month."""

    in_use: float
    is_whole: bool  # slots
    granted: float = 0.0  # may be in use here
    recorded: float = 0.0  # since the last claim, which names it as in use
    # Beside `alone`: slots that a claim without an answer named as free.
    offered_back: float = 0.0
    more_s: float = -math.inf  # when there is more, by the last answer

    def lacks(self, amount: float, is_away: bool) -> bool:
        free = self.granted + (self.alone + self.offered_back if is_away else 0.0) - self.in_use
        return free + _ROUNDING < amount

    def ready_s(self, is_away: bool) -> float:
        return self.more_s

    def claim(self, elapsed_s: float, waiting: Sequence[float]) -> Claim:
        self.measure(elapsed_s)
        self.recorded = 0.0
        if self.is_whole:  # the manager may lend free slots to others before its answer is here
            self.offered_back += self.granted - self.in_use
            self.granted = self.in_use
        need, least = sum(waiting), next(iter(waiting), 0.0)
        want = max(need, self.demand * LEASE_S)
        return Claim(
            *(self.limit, need, least, want, self.demand, 0.0, self.in_use, self.is_first),
            held=self.granted + self.offered_back + self.alone,
        )

    def apply(self, grant: Grant, now_s: float) -> bool:
        # An answer may come after the receipt of use that its grant includes.
        self.granted = grant.amount - self.recorded
        self.alone, self.offered_back = grant.alone, 0.0
        self.more_s = now_s + grant.wait_s
        return False


Rates = tuple[tuple[LimitName, _Rate], ...]


def _amount(name: LimitName, tokens: float) -> float:
    """Returns how much of a limit a request of so many tokens takes."""
    return 1.0 if name in ("requests", "parallel") else tokens


class KeyLease:
    """The leases of all limits of a key, from its first request at this ingress on."""

    __slots__ = (
        *("_claimed_s", "_num_open", "_open_tokens", "_rates", "_totals", "_unrecorded"),
        *("_waiting", "mean_tokens", "policy", "used_s"),
    )

    def __init__(self, policy: KeyPolicy, now_s: float, num_ingresses: int) -> None:
        """`num_ingresses` share the limits if the manager is away from the start."""
        self.mean_tokens = 0.0  # of a request
        self.used_s = now_s
        self._claimed_s = now_s
        self._num_open = 0
        self._open_tokens = 0.0  # that open requests have taken
        self._unrecorded = 0.0  # tokens of ended requests that the manager does not count yet
        self._waiting: dict[object, float] = {}  # tokens of requests that wait for a grant, by age
        self._rates: dict[LimitName, _Rate] = {}
        self._totals: dict[LimitName, _Total] = {}
        self.policy = KeyPolicy()
        self.change(policy, num_ingresses)

    def change(self, policy: KeyPolicy, num_ingresses: int) -> None:
        """Applies a changed policy. Limits that it has had keep their leases; in the total of a
        new limit, open requests count."""
        self.policy = policy
        rates, totals = self._rates, self._totals
        self._rates, self._totals = {}, {}
        for name, limit in limits_of(policy).items():
            if name in ("requests", "tokens"):
                rate = rates.get(name)
                if rate is None:
                    rate = _Rate(
                        limit=limit,
                        alone=limit / 60 / num_ingresses,
                        credited_s=self.used_s - LEASE_S,
                        least=_amount(name, 0.0),
                    )
                else:
                    rate.alone *= limit / rate.limit if rate.limit else 1.0
                    rate.limit = limit
                self._rates[name] = rate
                continue
            total = totals.get(name)
            if total is None:
                is_whole = name == "parallel"
                in_use = self._num_open if is_whole else self._open_tokens + self._unrecorded
                alone = limit / num_ingresses
                total = _Total(limit=limit, alone=alone, in_use=in_use, is_whole=is_whole)
            total.limit = limit
            self._totals[name] = total
        for _, one in self._limits():
            one.dry_until_s = one.refused_until_s = -math.inf  # by the limit before

    @property
    def offers_slots(self) -> bool:
        """A claim without an answer named slots as free, which may be used again after it."""
        return any(total.offered_back > 0 for total in self._totals.values())

    @property
    def is_idle(self) -> bool:
        """No request is open, and all use is recorded."""
        return not self._num_open and all(one.in_use <= 0 for one in self._totals.values())

    def note_offer(self, tokens: float) -> None:
        """Counts a request, admitted or not, in the demand."""
        self.mean_tokens += _NEWEST * (tokens - self.mean_tokens)
        for name, limit in self._limits():
            limit.offered += _amount(name, tokens)

    def lacking(self, tokens: float, now_s: float, *, is_away: bool) -> LimitName | None:
        """Returns the limit that a request waits for longest of those whose lease does not cover it
        now; None: it may be taken."""
        self.used_s = now_s
        names: list[LimitName] = [
            *(n for n, one in self._totals.items() if one.lacks(_amount(n, tokens), is_away)),
            *(n for n, one in self._rates.items() if one.lacks(_amount(n, tokens), now_s, is_away)),
        ]
        return max(names, key=lambda name: self._ready_s(name, is_away), default=None)

    def is_dry(self, name: LimitName, now_s: float) -> bool:
        """Returns whether a claim on this limit is useless yet."""
        return now_s < self._limit(name).dry_until_s

    def take(self, tokens: float) -> Rates:
        """Returns the rates that it is taken from, for `settle`: others may hold at the end."""
        self._num_open += 1
        self._open_tokens += tokens
        for name, rate in self._rates.items():
            rate.balance -= _amount(name, tokens)
        for name, total in self._totals.items():
            total.in_use += _amount(name, tokens)
        return tuple(self._rates.items())

    def settle(self, rates: Rates, tokens: float, num_used: int) -> None:
        """Ends a request that took `tokens` and used so many; 0: it is refunded whole."""
        self._num_open -= 1
        self._open_tokens -= tokens
        self._unrecorded += num_used
        for name, rate in rates:
            if name == "tokens" or not num_used:
                rate.balance += _amount(name, tokens - num_used)
        for name, total in self._totals.items():
            total.in_use -= _amount(name, tokens - num_used)

    def recorded(self, num_tokens: int) -> None:
        """The manager counts this use from now on; a part of it may be older than the lease."""
        num_own = min(num_tokens, self._unrecorded)
        self._unrecorded -= num_own
        for total in self._totals.values():
            if not total.is_whole:
                total.in_use -= num_own
                total.recorded += num_own
                total.granted -= num_own  # below 0: taken from `alone`

    @contextmanager
    def waiting(self, tokens: float) -> Iterator[None]:
        """While a request of so many tokens waits for a grant."""
        request = object()
        self._waiting[request] = tokens
        try:
            yield
        finally:
            del self._waiting[request]

    def claims(self, now_s: float) -> Claims:
        """Returns the claims for the manager, which `apply` follows. Surplus goes back with it."""
        elapsed_s, self._claimed_s = now_s - self._claimed_s, now_s
        return {
            name: limit.claim(elapsed_s, [_amount(name, one) for one in self._waiting.values()])
            for name, limit in self._limits()
        }

    def apply(self, grants: Grants, now_s: float) -> None:
        for name, limit in self._limits():
            if (grant := grants.get(name)) is not None:
                is_scarce = limit.apply(grant, now_s)
                limit.is_first = False
                if is_scarce or grant.wait_s:
                    limit.pause(grant.wait_s, now_s)
                else:
                    limit.dry_until_s = -math.inf

    def refuse(self, name: LimitName, now_s: float, *, is_away: bool) -> tuple[int, float]:
        """Returns the limit and the expected seconds until it admits this request. The headers of a
        rate name no earlier time from now on."""
        limit = self._limit(name)
        limit.refused_until_s = max(now_s, self._ready_s(name, is_away))
        return limit.limit, limit.refused_until_s - now_s

    def headers(self, now_s: float) -> dict[str, str]:
        """Returns the rates per minute in OpenAI's headers."""
        headers = {}
        for name, limit, remaining, reset_s in self._states(now_s):
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = as_duration(reset_s)
        return headers

    def anthropic_headers(self, now_s: float, wall_s: float) -> dict[str, str]:
        """Returns the rates per minute in Anthropic's headers. `wall_s`: seconds since 1970."""
        headers = {}
        for name, limit, remaining, reset_s in self._states(now_s):
            at = datetime.fromtimestamp(math.ceil(wall_s + reset_s), UTC)
            headers[f"anthropic-ratelimit-{name}-limit"] = str(limit)
            headers[f"anthropic-ratelimit-{name}-remaining"] = str(remaining)
            headers[f"anthropic-ratelimit-{name}-reset"] = f"{at:%Y-%m-%dT%H:%M:%SZ}"
        return headers

    def _limits(self) -> tuple[tuple[LimitName, _Rate | _Total], ...]:
        return *self._rates.items(), *self._totals.items()

    def _limit(self, name: LimitName) -> _Rate | _Total:
        return self._rates.get(name) or self._totals[name]

    def _ready_s(self, name: LimitName, is_away: bool) -> float:
        """Returns when this limit admits a request that it does not cover now."""
        limit = self._limit(name)
        return max(limit.ready_s(is_away), -math.inf if is_away else limit.dry_until_s)

    def _states(self, now_s: float) -> Iterator[tuple[LimitName, int, int, float]]:
        """Yields each rate: its limit, the rest of it, and the seconds until the rest is whole
        again, at least until a refused request may come again."""
        for name, rate in self._rates.items():
            remaining = max(0.0, min(rate.limit, rate.balance + max(0.0, rate.remaining)))
            per_s = rate.limit / 60
            refilled = per_s * (now_s - rate.credited_s)
            lacking = max(0.0, rate.room - refilled) - rate.balance
            reset_s = max(0.0, lacking / per_s if per_s else 60.0, rate.refused_until_s - now_s)
            yield name, rate.limit, int(remaining + _ROUNDING), reset_s


def as_duration(seconds: float) -> str:
    """Returns a duration as OpenAI's headers write it: 20ms, 1s, 6m0s, 1h0m3s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
