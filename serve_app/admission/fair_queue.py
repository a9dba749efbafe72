"""The order in which requests go to the engines of one base when they cannot all go at once. Pure.

The tenant that had least by its weight goes first; of that tenant its best priority class (lower is
earlier, as in vLLM), and of that class the adapter that had least, in tokens (virtual token
counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024); of one adapter the
oldest. A class puts a tenant's own requests in order and nothing else: a client that sends a better
one gains nothing against other tenants. The cost that is expected of a request is charged when it
goes, and corrected later by its real cost.

Bounded waiting goes before all of that: a tenant that was passed over for `max_wait_s` is next,
whatever its counter is, the longest waiting tenant first; so is an adapter among its tenant's. The
clock runs from the last time that the tenant (the adapter) was served, not from a request's
arrival: a tenant that queues a thousand requests waits behind itself, and would else turn every
overload into first come, first served, where the share goes to the most requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import inf

from serve_app.admission.counters import Account, Accounts, Overdue, Ranking

_MAX_IDLE_TENANTS = 1024  # whose counters are kept
_MAX_IDLE_ADAPTERS = 256  # the same, of one tenant


class Entry:
    """One request, from `add` to `close`. Its fields are for reading."""

    __slots__ = ("cost", "enqueued_s", "is_waiting", "lane")

    def __init__(self, lane: _Lane, cost: float, now_s: float) -> None:
        self.lane = lane
        self.cost = cost
        self.enqueued_s = now_s
        self.is_waiting = True

    @property
    def tenant(self) -> str:
        return self.lane.band.tenant.name

    @property
    def adapter(self) -> str:
        return self.lane.account.name

    @property
    def priority(self) -> int:
        return self.lane.band.priority


class _Tenant(Account):
    __slots__ = ("adapters", "bands", "cost", "floor", "num_waiting", "overdue", "since_s")

    def __init__(self, name: str, weight: float) -> None:
        super().__init__(name, weight)
        self.adapters = Accounts(lambda adapter: Account(adapter, 1.0), _MAX_IDLE_ADAPTERS)
        self.bands: dict[int, _Band] = {}  # by priority; those where something waits
        self.overdue: Overdue[_Lane] = Overdue()
        self.floor = 0.0
        self.since_s = inf  # it waits, and was not served
        self.num_waiting = 0
        self.cost = 0.0  # of what waits

    @property
    def excess(self) -> float:
        """What it holds of the queue, by weight."""
        return self.num_waiting / self.weight

    @property
    def last_band(self) -> _Band:
        """Its worst class; something of it must wait."""
        return self.bands[max(self.bands)]


class _Band:
    """What waits of one tenant with one priority."""

    __slots__ = ("cost", "lanes", "priority", "ranking", "tenant")

    def __init__(self, tenant: _Tenant, priority: int) -> None:
        self.tenant = tenant
        self.priority = priority
        self.lanes: dict[Account, _Lane] = {}
        self.ranking: Ranking[Account] = Ranking()
        self.cost = 0.0


class _Lane:
    """What waits of one adapter in a band, the oldest first."""

    __slots__ = ("account", "band", "cost", "entries", "since_s")

    def __init__(self, band: _Band, account: Account) -> None:
        self.band = band
        self.account = account
        self.entries: OrderedDict[Entry, None] = OrderedDict()
        self.cost = 0.0
        self.since_s = inf  # it waits, and was not served


class FairQueue:
    """Every method takes the time, so that simulators and tests can make it."""

    def __init__(self, weights: Mapping[str, float], max_wait_s: float) -> None:
        self._weights = weights
        self._max_wait_s = max_wait_s
        self._tenants: Accounts[_Tenant] = Accounts(self._make_tenant, _MAX_IDLE_TENANTS)
        self._ranking: Ranking[_Tenant] = Ranking()  # those of which something waits
        self._overdue: Overdue[_Tenant] = Overdue()
        self._floor = 0.0
        self._num_waiting = 0

    def __len__(self) -> int:
        """Those that wait."""
        return self._num_waiting

    @property
    def num_accounts(self) -> int:
        """Tenants and adapters whose counters are kept."""
        return sum(1 + len(tenant.adapters) for tenant in self._tenants)

    def add(self, tenant: str, adapter: str, priority: int, cost: float, now_s: float) -> Entry:
        """`cost`: what it is expected to take, see `routing.cost`."""
        owner = self._tenants.open(tenant)
        account = owner.adapters.open(adapter)
        band = owner.bands.get(priority) or self._new_band(owner, priority, now_s)
        lane = band.lanes.get(account) or _new_lane(band, account, now_s)
        entry = Entry(lane, cost, now_s)
        lane.entries[entry] = None
        lane.cost += cost
        band.cost += cost
        owner.num_waiting += 1
        owner.cost += cost
        self._num_waiting += 1
        return entry

    def pop(self, now_s: float) -> Entry | None:
        """The next to go, charged; None: nobody waits. `close` it when its request ended."""
        if not len(self._ranking):
            return None
        lane = self._next_lane(now_s)
        entry = next(iter(lane.entries))
        tenant = lane.band.tenant
        self._take_out(entry)
        self.charge(entry, entry.cost)
        if lane.entries:
            lane.since_s = now_s
            tenant.overdue.push(lane)
        if tenant.bands:
            tenant.since_s = now_s
            self._overdue.push(tenant)
        return entry

    def charge(self, entry: Entry, cost: float) -> None:
        """To who it belongs to; below zero: it took less than was expected."""
        entry.lane.account.charge(cost)
        entry.lane.band.tenant.charge(cost)

    def close(self, entry: Entry) -> None:
        """Its request ended, or does not wait any more. Once for every entry."""
        if entry.is_waiting:
            self._take_out(entry)
        tenant = entry.lane.band.tenant
        tenant.adapters.close(entry.lane.account)
        self._tenants.close(tenant)

    def rival(self, tenant: str, adapter: str, priority: int) -> Entry | None:
        """The entry that leaves a full queue for a newcomer: the newest of the last class of the
        tenant that holds most of the queue, by weight. None: the newcomer itself. So every tenant
        finds room for its share, and a flood is told at once to come back later."""
        own = self._tenants.get(tenant)
        own_excess = 1 / self._weights.get(tenant, 1.0) + (0.0 if own is None else own.excess)
        others = (one for one in self._ranking if one is not own)
        largest = max(others, key=lambda one: one.excess, default=None)
        if largest is not None and largest.excess > own_excess:
            return _newest(largest.last_band, None)
        if own is None or not own.bands or priority > max(own.bands):
            return None
        band = own.last_band
        return _newest(band, adapter if band.priority == priority else None)

    def largest(self) -> Entry | None:
        """The newest of the last class of the tenant that holds most of the queue, by weight."""
        if not len(self._ranking):
            return None
        return _newest(max(self._ranking, key=lambda tenant: tenant.excess).last_band, None)

    def cost_ahead(self, tenant: str, adapter: str, priority: int, cost: float) -> float:
        """The cost that goes before a newcomer is served if nobody else comes, in a fluid
        approximation: all of its tenant's better classes, its share of its own class, and what the
        other tenants get in the meantime."""
        own, others = 0.0, []
        for one in self._ranking:
            if one.name != tenant:
                others.append((one.cost, one.weight))
                continue
            own = sum(band.cost for band in one.bands.values() if band.priority < priority)
            if (band := one.bands.get(priority)) is not None:
                own += _cost_ahead_in_band(band, adapter, cost)
        share = (own + cost) / self._weights.get(tenant, 1.0)
        return own + sum(min(waits, share * weight) for waits, weight in others)

    def _make_tenant(self, name: str) -> _Tenant:
        return _Tenant(name, self._weights.get(name, 1.0))

    def _new_band(self, tenant: _Tenant, priority: int, now_s: float) -> _Band:
        if not tenant.bands:
            ranking = self._ranking
            tenant.lift(ranking.first().counter if len(ranking) else self._floor)
            ranking.add(tenant)
            tenant.since_s = now_s
            self._overdue.push(tenant)
        band = tenant.bands[priority] = _Band(tenant, priority)
        return band

    def _next_lane(self, now_s: float) -> _Lane:
        long_ago_s = now_s - self._max_wait_s
        tenant = self._overdue.first(long_ago_s)
        if tenant is None:
            tenant = self._ranking.first()
            self._floor = tenant.counter
        band = tenant.bands[min(tenant.bands)]
        lane = tenant.overdue.first(long_ago_s)
        if lane is None:
            account = band.ranking.first()
            tenant.floor = account.counter
            lane = band.lanes[account]
        return lane

    def _take_out(self, entry: Entry) -> None:
        lane, band = entry.lane, entry.lane.band
        tenant = band.tenant
        entry.is_waiting = False
        del lane.entries[entry]
        lane.cost -= entry.cost
        band.cost -= entry.cost
        tenant.num_waiting -= 1
        tenant.cost -= entry.cost
        self._num_waiting -= 1
        if lane.entries:
            return
        lane.since_s = inf
        del band.lanes[lane.account]
        band.ranking.remove(lane.account)
        if band.lanes:
            return
        del tenant.bands[band.priority]
        if not tenant.bands:
            self._ranking.remove(tenant)
            tenant.since_s = inf
            tenant.cost = 0.0  # without what rounding left


def _new_lane(band: _Band, account: Account, now_s: float) -> _Lane:
    ranking = band.ranking
    account.lift(ranking.first().counter if len(ranking) else band.tenant.floor)
    ranking.add(account)
    lane = band.lanes[account] = _Lane(band, account)
    lane.since_s = now_s
    band.tenant.overdue.push(lane)
    return lane


def _cost_ahead_in_band(band: _Band, adapter: str, cost: float) -> float:
    """All of the newcomer's own adapter, and what the others get in the meantime."""
    lanes = band.lanes.values()
    mine = sum(lane.cost for lane in lanes if lane.account.name == adapter)
    others = (lane.cost for lane in lanes if lane.account.name != adapter)
    return mine + sum(min(waits, mine + cost) for waits in others)


def _newest(band: _Band, newcomer: str | None) -> Entry | None:
    """Of the adapter that holds most of the band; None: that is the newcomer's."""

    def length(lane: _Lane) -> int:
        return len(lane.entries) + (lane.account.name == newcomer)

    lanes = band.lanes.values()
    longest = max(lanes, key=length)
    if newcomer is not None:
        own = max((length(lane) for lane in lanes if lane.account.name == newcomer), default=1)
        if own >= length(longest):
            return None
    return next(reversed(longest.entries))
