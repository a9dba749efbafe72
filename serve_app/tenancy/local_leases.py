"""The lease of one key at an ingress: the amounts that its requests are admitted against.

Without a lock and without I/O; the time is an argument, of the ingress's clock. While the manager
is away the lease refills by the rate of the last grant; see `leases` for the manager's side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from serve_app.tenancy.caller import KeyPolicy
from serve_app.tenancy.leases import LEASE_S, Claim, Claims, Grants, LimitName

_DRY_S = 0.25  # after an answer that did not cover the need, until the next claim
_MAX_DRY_S = 2.0  # a debt of tokens may last longer, but other ingresses may return some
_DEMAND_S = 1.0  # time constant of the mean demand
_NEWEST = 0.1  # share of a new request in the mean of tokens
_ROUNDING = 1e-6
_LEAST_ALONE = 2  # requests that a small share saves up


@dataclass(slots=True)
class _Rate:
    """A limit per minute."""

    limit: int
    alone: float  # per second, while the manager is away
    credited_s: float  # when an answer, or a refill without the manager, came last
    least: float = 0.0  # a request without the manager needs so much; 0: any positive amount
    balance: float = 0.0  # negative: requests used more than was expected
    offered: float = 0.0  # since the last claim
    demand: float = 0.0  # mean per second
    wanted: float = 0.0  # by the last claim
    remaining: float = 0.0  # at the manager
    is_first: bool = True
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

    def claim(self, elapsed_s: float, waiting: Collection[float]) -> Claim:
        """`waiting`: the amounts that requests wait for, the first first."""
        if elapsed_s > 0:
            weight = 1 - math.exp(-elapsed_s / _DEMAND_S)
            self.demand += weight * (self.offered / elapsed_s - self.demand)
            self.offered = 0.0
        wanted = self.demand * LEASE_S
        returned = 0.0
        if not waiting and not self.was_alone and self.balance > wanted + self.least:
            returned = self.balance - wanted
            self.balance = wanted
        want = max(0.0, wanted - self.balance)
        need = max(0.0, sum(waiting) - self.balance)
        least = max(0.0, next(iter(waiting), 0.0) - self.balance)
        self.wanted = max(want, need)
        return Claim(
            *(self.limit, need, least, self.wanted, self.demand, returned, 0.0),
            *(self.is_first, self.alone if self.was_alone else 0.0),
        )


@dataclass(slots=True)
class _Total:
    """A limit of a sum: slots of parallel requests, or tokens of a day or month."""

    limit: int
    granted: float = 0.0  # may be in use here
    in_use: float = 0.0
    alone: float = 0.0  # in addition, while the manager is away
    offered_back: float = 0.0  # likewise: slots that a claim without an answer named as free
    is_first: bool = True
    offered: float = 0.0
    demand: float = 0.0

    def lacks(self, amount: float, is_away: bool) -> bool:
        free = self.granted + (self.alone + self.offered_back if is_away else 0.0) - self.in_use
        return free + _ROUNDING < amount

    def claim(self, elapsed_s: float, waiting: Collection[float], *, is_whole: bool) -> Claim:
        if elapsed_s > 0:
            weight = 1 - math.exp(-elapsed_s / _DEMAND_S)
            self.demand += weight * (self.offered / elapsed_s - self.demand)
            self.offered = 0.0
        if is_whole:  # the manager may lend free slots to others before its answer arrives here
            self.offered_back += self.granted - self.in_use
            self.granted = self.in_use
        need, least = sum(waiting), next(iter(waiting), 0.0)
        want = max(need, self.demand * LEASE_S)
        return Claim(
            *(self.limit, need, least, want, self.demand, 0.0, self.in_use, self.is_first),
            held=self.granted + self.offered_back + self.alone,
        )


Rates = tuple[_Rate | None, _Rate | None]  # of requests and of tokens


class KeyLease:
    """The leases of all limits of a key, from its first request at this ingress on."""

    __slots__ = (
        *("_claimed_s", "_num_open", "_open_tokens", "_rates", "_requests", "_tokens", "_totals"),
        *("_unrecorded", "_waiting", "_waits_s", "dry_until_s", "mean_tokens", "policy", "used_s"),
    )

    def __init__(self, policy: KeyPolicy, now_s: float, num_ingresses: int) -> None:
        """`num_ingresses` share the limits if the manager is away from the start."""
        self.dry_until_s = -math.inf  # a claim before is useless
        self.mean_tokens = 0.0  # of a request
        self.used_s = now_s
        self._claimed_s = now_s
        self._num_open = 0
        self._open_tokens = 0.0  # that open requests have taken
        self._unrecorded = 0.0  # tokens of ended requests that the manager does not count yet
        self._waiting: dict[object, float] = {}  # tokens of requests that wait for a grant, by age
        self._waits_s: dict[LimitName, float] = {}  # until when each limit is dry
        self._requests: _Rate | None = None
        self._tokens: _Rate | None = None
        self._totals: list[tuple[LimitName, _Total]] = []
        self._rates: list[tuple[LimitName, _Rate]] = []
        self.policy = KeyPolicy()
        self.change(policy, num_ingresses)

    def change(self, policy: KeyPolicy, num_ingresses: int) -> None:
        """Applies a changed policy. Limits that it has had keep their leases; in the total of a
        new limit, open requests count."""
        self.policy = policy
        self.dry_until_s = -math.inf  # by limits that may be gone
        now_s = self.used_s

        def rate(old: _Rate | None, limit: int | None, least: float) -> _Rate | None:
            if limit is None:
                return None
            if old is None:
                return _Rate(limit, limit / 60 / num_ingresses, now_s - LEASE_S, least)
            old.alone *= limit / old.limit if old.limit else 1.0
            old.limit = limit
            return old

        self._requests = rate(self._requests, policy.requests_per_minute, 1.0)
        self._tokens = rate(self._tokens, policy.tokens_per_minute, 0.0)
        self._rates = []
        if self._requests is not None:
            self._rates.append(("requests", self._requests))
        if self._tokens is not None:
            self._rates.append(("tokens", self._tokens))
        old_totals = dict(self._totals)
        limits: tuple[tuple[LimitName, int | None], ...] = (
            ("parallel", policy.max_parallel_requests),
            ("day", policy.tokens_per_day),
            ("month", policy.tokens_per_month),
        )
        self._totals = []
        for name, limit in limits:
            if limit is not None:
                total = old_totals.get(name)
                if total is None:
                    total = _Total(limit, alone=limit / num_ingresses)
                    tokens = self._open_tokens + self._unrecorded
                    total.in_use = self._num_open if name == "parallel" else tokens
                total.limit = limit
                self._totals.append((name, total))

    @property
    def offers_slots(self) -> bool:
        """A claim without an answer named slots as free, which may be used again after it."""
        return any(total.offered_back > 0 for _, total in self._totals)

    @property
    def is_idle(self) -> bool:
        """No request is open, and all use is recorded."""
        return not self._num_open and all(total.in_use <= 0 for _, total in self._totals)

    def note_offer(self, tokens: float) -> None:
        """Counts a request, admitted or not, in the demand."""
        self.mean_tokens += _NEWEST * (tokens - self.mean_tokens)
        if self._requests is not None:
            self._requests.offered += 1.0
        if self._tokens is not None:
            self._tokens.offered += tokens
        for name, total in self._totals:
            total.offered += 1.0 if name == "parallel" else tokens

    def lacking(self, tokens: float, now_s: float, *, is_away: bool) -> LimitName | None:
        """Returns a limit whose lease does not cover a request now; None: it may be taken."""
        self.used_s = now_s
        for name, total in self._totals:
            if total.lacks(1.0 if name == "parallel" else tokens, is_away):
                return name
        if self._requests is not None and self._requests.lacks(1.0, now_s, is_away):
            return "requests"
        if self._tokens is not None and self._tokens.lacks(tokens, now_s, is_away):
            return "tokens"
        return None

    def take(self, tokens: float) -> Rates:
        """Returns the rates that it is taken from, for `settle`: others may hold at the end."""
        self._num_open += 1
        self._open_tokens += tokens
        if self._requests is not None:
            self._requests.balance -= 1.0
        if self._tokens is not None:
            self._tokens.balance -= tokens
        for name, total in self._totals:
            total.in_use += 1.0 if name == "parallel" else tokens
        return self._requests, self._tokens

    def settle(self, rates: Rates, tokens: float, num_used: int) -> None:
        """Ends a request that took `tokens` and used so many; 0: it is refunded whole."""
        self._num_open -= 1
        self._open_tokens -= tokens
        self._unrecorded += num_used
        by_request, by_token = rates
        if by_request is not None and not num_used:
            by_request.balance += 1.0
        if by_token is not None:
            by_token.balance += tokens - num_used
        for name, total in self._totals:
            total.in_use -= 1.0 if name == "parallel" else tokens - num_used

    def recorded(self, num_tokens: int) -> None:
        """The manager counts this use from now on; a part of it may be older than the lease."""
        num_own = min(num_tokens, self._unrecorded)
        self._unrecorded -= num_own
        for name, total in self._totals:
            if name != "parallel":
                total.in_use -= num_own
                total.granted = max(total.in_use, total.granted - num_own)

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
        claims: dict[LimitName, Claim] = {}
        for name, rate in self._rates:
            claims[name] = rate.claim(elapsed_s, self._needs(name))
        for name, total in self._totals:
            is_whole = name == "parallel"
            claims[name] = total.claim(elapsed_s, self._needs(name), is_whole=is_whole)
        return claims

    def apply(self, grants: Grants, now_s: float) -> None:
        dry_s = 0.0
        for name, rate in self._rates:
            if (grant := grants.get(name)) is not None:
                rate.balance += grant.amount
                rate.alone, rate.remaining = grant.alone, grant.remaining
                rate.credited_s, rate.is_first, rate.was_alone = now_s, False, False
                self._waits_s[name] = now_s + grant.wait_s
                # With more demand than its share, the next claims would be in vain as well.
                is_scarce = grant.amount < rate.wanted and rate.demand > rate.alone
                if is_scarce or grant.wait_s:
                    dry_s = max(dry_s, grant.wait_s, _DRY_S)
        for name, total in self._totals:
            if (grant := grants.get(name)) is not None:
                total.granted, total.alone, total.offered_back = grant.amount, grant.alone, 0.0
                total.is_first = False
                self._waits_s[name] = now_s + grant.wait_s
                if grant.wait_s:
                    dry_s = max(dry_s, grant.wait_s, _DRY_S)
        self.dry_until_s = now_s + min(dry_s, _MAX_DRY_S) if dry_s else -math.inf

    def wait(self, name: LimitName, tokens: float, now_s: float) -> tuple[int, float]:
        """Returns the limit and the expected seconds until it admits a request."""
        wait_s = max(0.0, self._waits_s.get(name, now_s) - now_s)
        rate = {"requests": self._requests, "tokens": self._tokens}.get(name)
        if rate is None:
            return dict(self._totals)[name].limit, wait_s
        lacking = (1.0 if name == "requests" else tokens) - rate.balance
        share_s = min(60.0, lacking / rate.alone) if rate.alone else 60.0
        return rate.limit, max(wait_s, share_s)

    def headers(self) -> dict[str, str]:
        """Returns the rates per minute in OpenAI's headers."""
        headers = {}
        for name, limit, remaining, reset_s in self._states():
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = as_duration(reset_s)
        return headers

    def anthropic_headers(self, wall_s: float) -> dict[str, str]:
        """Returns the rates per minute in Anthropic's headers. `wall_s`: seconds since 1970."""
        headers = {}
        for name, limit, remaining, reset_s in self._states():
            at = datetime.fromtimestamp(math.ceil(wall_s + reset_s), UTC)
            headers[f"anthropic-ratelimit-{name}-limit"] = str(limit)
            headers[f"anthropic-ratelimit-{name}-remaining"] = str(remaining)
            headers[f"anthropic-ratelimit-{name}-reset"] = f"{at:%Y-%m-%dT%H:%M:%SZ}"
        return headers

    def _needs(self, name: LimitName) -> Collection[float]:
        """Returns the needs of the waiting requests for this limit, the first first."""
        if name in ("requests", "parallel"):
            return (1.0,) * len(self._waiting)
        return self._waiting.values()

    def _states(self) -> Iterator[tuple[LimitName, int, int, float]]:
        """Yields each rate: its limit, the rest of it, and the seconds until there is more."""
        for name, rate in self._rates:
            remaining = max(0.0, min(rate.limit, rate.balance + rate.remaining))
            per_s = rate.limit / 60
            reset_s = max(0.0, (1.0 if rate.least else 0.0) - rate.balance) / per_s if per_s else 60
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
