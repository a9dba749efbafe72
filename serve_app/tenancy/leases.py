"""The limits of keys over many ingresses, kept by the manager: each ingress gets leases of them.

An ingress claims amounts for the keys that are active there, once per second and at once when a
lease runs dry, in one call at a time. Two kinds of limits:

- requests and tokens per minute: a bucket that refills at the limit's rate. A grant is taken from
  it, so all ingresses together never admit more than the bucket's size and its inflow.
  Tokens of one request that needs more than the bucket holds are granted whole and leave a debt.
- parallel requests, tokens per day and per month: a total. A grant is the amount of it that the
  ingress may have in use; claims are absolute, so a lost message does no harm.

Each ingress gets at most its fair share (max-min) of the present amount. While the manager is away
an ingress continues by the last grant's `alone`: its part of the rate, or of the rest of a total.
Pure: the time is an argument, of the manager's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from serve_app.tenancy.caller import KeyPolicy

RateName = Literal["requests", "tokens"]  # per minute
BudgetName = Literal["day", "month"]  # of tokens
TotalName = Literal["parallel", BudgetName]
LimitName = RateName | TotalName
BUDGETS = get_args(BudgetName)

LEASE_S = 2.0  # of an ingress's demand, at most, that it holds in advance
CLAIM_INTERVAL_S = 1.0
MAX_AGE_S = 8.0  # of the claims of a live ingress
_FRESH_S = 3.0  # age up to which a claim counts in the shares of other ingresses
_ASK_S = 0.25  # the time between two claims of an ingress whose lease is dry
_LEAST_BURST = 4  # requests that an idle key may send at once, unless its limit is lower
_ROUNDING = 1e-6
_FORGET_S = 120.0  # after which an unused bucket is full again, and forgotten


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of an ingress on one limit of a key."""

    limit: int  # per minute, or the total
    need: float = 0.0  # of the requests that wait for the answer
    least: float = 0.0  # of the first of them
    want: float = 0.0  # beyond the amount that it holds, for the next LEASE_S
    demand: float = 0.0  # per second, admitted or not
    returned: float = 0.0  # of a rate: the part of earlier grants that it does not need
    in_use: float = 0.0  # of a total: amounts of open requests, and of use not yet recorded
    is_first: bool = False  # no manager has granted it anything of this limit
    alone: float = 0.0  # per second of a rate: its refill without a manager since its last claim
    held: float = 0.0  # of a total: as much as it may have in use without a manager


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a claim."""

    amount: float  # of a rate: to add to the lease; of a total: the most that it may have in use
    alone: float  # while the manager is away: per second of a rate; of a total: in addition
    remaining: float  # the rest that the key may use now, at all ingresses; below 0: a debt
    wait_s: float  # until there is more; 0 if it covers the need
    room: float = 0.0  # of a rate: the amount that its bucket lacks to be full


def limits_of(policy: KeyPolicy) -> dict[LimitName, int]:
    limits: dict[LimitName, int | None] = {
        "requests": policy.requests_per_minute,
        "tokens": policy.tokens_per_minute,
        "parallel": policy.max_parallel_requests,
        "day": policy.tokens_per_day,
        "month": policy.tokens_per_month,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


Claims = Mapping[LimitName, Claim]
Grants = Mapping[LimitName, Grant]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The claims of an ingress for its active keys, by key id."""

    ingress_id: str
    keys: Mapping[str, Claims]
    closed: tuple[str, ...] = ()  # keys that are no longer active there


def fair_share(amount: float, want: float, others: Iterable[float]) -> float:
    """Returns the max-min fair share of `amount` for an ingress that wants `want`, where the other
    ingresses want `others`: no ingress gets more than it wants, and an ingress that gets less gets
    no less than any other."""
    wants = sorted([want, *others])
    for index, least in enumerate(wants):
        even = amount / (len(wants) - index)
        if least >= even:
            return min(want, even)
        if least >= want:
            return want
        amount -= least
    return min(want, max(0.0, amount))


def burst(limit: int, burst_s: float, least: int) -> float:
    """Returns the size of the bucket of a limit per minute."""
    return max(limit / 60 * burst_s, float(min(limit, least)))


@dataclass(slots=True)
class _Holder:
    """The last claim of an ingress on a limit."""

    claim: Claim
    claimed_s: float
    amount: float = 0.0  # of a total: as granted
    alone: float = 0.0  # of slots: as granted


@dataclass(slots=True)
class _Bucket:
    """A limit per minute. `level` is negative after a grant that was larger."""

    level: float
    updated_s: float
    is_whole: bool  # requests: a part of one is of no use, and no grant leaves a debt
    rate: float = 0.0  # per second
    reset_s: float = -math.inf  # when the first ingress came back from being alone
    holders: dict[str, _Holder] = field(default_factory=dict)

    def grant(self, ingress_id: str, claim: Claim, size: float, now_s: float) -> Grant:
        rate = self.rate = claim.limit / 60
        self.level += rate * (now_s - self.updated_s) + claim.returned
        self.level = min(self.level, size)
        self.updated_s = now_s
        if claim.alone:
            if now_s - self.reset_s > _FRESH_S:
                self.reset_s = now_s
                self.level = min(self.level, 0.0)  # all were alone, and spent it
            self.level -= claim.alone * (now_s - self.reset_s)
        others = _fresh(self.holders, ingress_id, now_s)
        # The claims that the others would make now.
        wants = [one.claim.demand * min(now_s - one.claimed_s, LEASE_S) for one in others]
        amount = 0.0
        if self.level > 0:
            share = fair_share(self.level, max(claim.want, claim.need), wants)
            if self.is_whole:
                least = min(1.0, claim.need) if self.level + _ROUNDING >= 1 else 0.0
                amount = max(math.floor(share + _ROUNDING), least)
            else:
                amount = max(share, claim.least)
            self.level -= amount
        self.holders[ingress_id] = _Holder(claim, now_s)
        alone = fair_share(rate, claim.demand, [one.claim.demand for one in others])
        rest = rate - alone - sum(min(one.claim.demand, rate) for one in others)
        alone += max(0.0, rest) / (1 + len(others))
        lacking_s = ((1.0 if self.is_whole else 0.0) - self.level) / rate if rate else 60.0
        wait_s = max(_ASK_S, lacking_s) if amount + _ROUNDING < claim.need else 0.0
        return Grant(amount, alone, self.level, wait_s, size - self.level)


@dataclass(slots=True)
class _Total:
    """A limit of the sum over all ingresses."""

    updated_s: float
    settled_s: float  # until then ingresses may hold a part that this manager does not count
    is_whole: bool  # slots: a part of one is of no use, and no grant goes beyond the total
    holders: dict[str, _Holder] = field(default_factory=dict)

    def grant(
        self, ingress_id: str, claim: Claim, used: float, reset_s: float, now_s: float
    ) -> Grant:
        """`used`: recorded already; `reset_s`: until the total begins again."""
        self.updated_s = now_s
        for name in [n for n, one in self.holders.items() if now_s - one.claimed_s > MAX_AGE_S]:
            del self.holders[name]
        taken = sum(one.amount for name, one in self.holders.items() if name != ingress_id)
        free = max(0.0, claim.limit - used - taken - claim.in_use)
        others = _fresh(self.holders, ingress_id, now_s)
        wants = [max(0.0, one.claim.in_use + one.claim.want - one.amount) for one in others]
        more = fair_share(free, max(claim.want, claim.need), wants)
        if self.is_whole:
            least = min(1.0, claim.need) if free + _ROUNDING >= 1 else 0.0
            more = max(math.floor(more + _ROUNDING), least)
        elif free > 0:  # the last part of a total admits one more request, which may go beyond it
            more = max(more, claim.least)
        rest = max(0.0, free - more)
        alone = rest / (1 + len(others))
        if self.is_whole:  # a part for each would be of no use to any
            set_aside = sum(one.alone for name, one in self.holders.items() if name != ingress_id)
            alone = min(math.ceil(alone - _ROUNDING), max(0.0, rest - set_aside))
        wait_s = reset_s or _ASK_S
        if not self.is_whole and self._is_held(ingress_id):
            wait_s = min(wait_s, CLAIM_INTERVAL_S)
        if now_s < self.settled_s:
            if not self.is_whole and free > 0:
                wait_s = max(_ASK_S, self.settled_s - now_s)
            more, alone = self._unsettled(claim, more, alone)
        self.holders[ingress_id] = _Holder(claim, now_s, claim.in_use + more, alone)
        is_covered = more + _ROUNDING >= claim.need
        return Grant(claim.in_use + more, alone, rest, 0.0 if is_covered else wait_s)

    def _is_held(self, ingress_id: str) -> bool:
        """Returns True if other ingresses hold a part that no request uses, which their next claims
        share."""
        others = (one for name, one in self.holders.items() if name != ingress_id)
        return any(one.amount > one.claim.in_use + _ROUNDING for one in others)

    def note_recorded(self, ingress_id: str, num_tokens: float) -> None:
        holder = self.holders.get(ingress_id)
        if holder is not None:
            in_use = max(0.0, holder.claim.in_use - num_tokens)
            holder.claim = replace(holder.claim, in_use=in_use)
            holder.amount = max(in_use, holder.amount - num_tokens)

    def _unsettled(self, claim: Claim, more: float, alone: float) -> tuple[float, float]:
        """Returns the two parts of a grant, together no more than the last manager granted it."""
        own = max(0.0, claim.held - claim.in_use)
        if not self.is_whole:
            more = min(more, own)
            return more, min(alone, own - more)
        if claim.is_first:
            return 0.0, 0.0
        more = min(more, math.floor(own + _ROUNDING))
        return more, own - more


def _fresh(holders: dict[str, _Holder], ingress_id: str, now_s: float) -> list[_Holder]:
    return [
        one
        for name, one in holders.items()
        if name != ingress_id and now_s - one.claimed_s <= _FRESH_S
    ]


class Leases:
    """The limits of all active keys. All methods belong to the manager's event loop."""

    def __init__(self, burst_s: float, began_s: float = -math.inf) -> None:
        """`burst_s`: seconds of its rate that an idle key may use at once; `began_s`: the start of
        this manager, before which another one may have granted something."""
        self._burst_s = burst_s
        self._buckets: dict[tuple[str, LimitName], _Bucket] = {}
        self._totals: dict[tuple[str, LimitName], _Total] = {}
        self._swept_s = 0.0
        self._began_s = began_s

    def __len__(self) -> int:
        """The number of limits that are kept."""
        return len(self._buckets) + len(self._totals)

    def grant(
        self,
        request: LeaseRequest,
        used: Mapping[tuple[str, LimitName], float],
        resets_s: Mapping[LimitName, float],
        now_s: float,
    ) -> dict[str, Grants]:
        """Returns the grants by key id. `used`: the recorded tokens of this day and month, by key
        id and limit; `resets_s`: seconds until the next day and month."""
        self._sweep(now_s)
        for key_id in request.closed:
            self._close(key_id, request.ingress_id)
        return {
            key_id: {
                name: self._grant(request.ingress_id, key_id, name, claim, used, resets_s, now_s)
                for name, claim in claims.items()
            }
            for key_id, claims in request.keys.items()
        }

    def note_recorded(self, ingress_id: str, key_id: str, num_tokens: int) -> None:
        """Notes that use which an ingress held is recorded, and counts there from now on. Counted
        twice until the ingress claims again, it made others refuse requests of half a budget."""
        for name in BUDGETS:
            if (total := self._totals.get((key_id, name))) is not None:
                total.note_recorded(ingress_id, num_tokens)

    def _grant(
        self,
        ingress_id: str,
        key_id: str,
        name: LimitName,
        claim: Claim,
        used: Mapping[tuple[str, LimitName], float],
        resets_s: Mapping[LimitName, float],
        now_s: float,
    ) -> Grant:
        key = key_id, name
        if name in ("requests", "tokens"):
            size = burst(claim.limit, self._burst_s, _LEAST_BURST if name == "requests" else 1)
            bucket = self._buckets.get(key)
            if bucket is None:
                level = size if claim.is_first else 0.0  # otherwise an earlier manager granted it
                bucket = self._buckets[key] = _Bucket(level, now_s, name == "requests")
            return bucket.grant(ingress_id, claim, size, now_s)
        total = self._totals.get(key)
        if total is None:  # after a manager that granted it something, all ingresses claim first
            is_new = claim.is_first and not claim.in_use
            settled_s = now_s if is_new else now_s + _FRESH_S
            if name in BUDGETS:  # an ingress that holds a part may claim after one that is new
                settled_s = max(settled_s, self._began_s + _FRESH_S)
            total = self._totals[key] = _Total(now_s, settled_s, name == "parallel")
        recorded, reset_s = used.get(key, 0.0), resets_s.get(name, 0.0)
        return total.grant(ingress_id, claim, recorded, reset_s, now_s)

    def _close(self, key_id: str, ingress_id: str) -> None:
        for name in get_args(RateName):
            if (bucket := self._buckets.get((key_id, name))) is not None:
                bucket.holders.pop(ingress_id, None)
        for name in get_args(TotalName):
            if (total := self._totals.get((key_id, name))) is not None:
                total.holders.pop(ingress_id, None)

    def _sweep(self, now_s: float) -> None:
        """Forgets the limits that have not been claimed for a while. A debt of tokens is kept."""
        if now_s - self._swept_s < _FORGET_S:
            return
        self._swept_s = now_s
        for key, bucket in tuple(self._buckets.items()):
            idle_s = now_s - bucket.updated_s
            if idle_s > _FORGET_S and bucket.level + bucket.rate * idle_s >= 0:
                del self._buckets[key]
        for key, total in tuple(self._totals.items()):
            if now_s - total.updated_s > _FORGET_S:
                del self._totals[key]
