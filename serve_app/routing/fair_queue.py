"""The order in which requests go to the engines of one base when they cannot all go at once. Pure.

Priority classes first (lower is earlier, as in vLLM); in a class the tenant that had least by its
weight, and of that tenant the adapter that had least, in tokens (virtual token counters: Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024); of one adapter the oldest. The cost
that is expected of a request is charged when it goes, what it really took is set right later.

Bounded waiting goes before all of that: a tenant that was passed over for `max_wait_s` is next,
whatever its class and counter, the longest waiting of those first; so is an adapter among its
tenant's. The clock runs from the last time that the tenant (the adapter) was served, not from a
request's arrival: who queues a thousand requests waits behind himself, and would else turn every
overload into first come, first served, where the share goes to who sends most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import inf

from serve_app.routing.counters import Account, Accounts, Overdue, Ranking

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
    __slots__ = ("adapters", "bands", "floor", "overdue", "since_s")

    def __init__(self, name: str, weight: float) -> None:
        super().__init__(name, weight)
        self.adapters = Accounts(lambda adapter: Account(adapter, 1.0), _MAX_IDLE_ADAPTERS)
        self.bands: dict[int, _Band] = {}  # by priority; those where something waits
        self.overdue: Overdue[_Lane] = Overdue()
        self.floor = 0.0
        self.since_s = inf  # it waits, and was not served


class _Band:
    """What waits of one tenant with one priority."""

    __slots__ = ("lanes", "num_waiting", "priority", "ranking", "tenant")

    def __init__(self, tenant: _Tenant, priority: int) -> None:
        self.tenant = tenant
        self.priority = priority
        self.lanes: dict[Account, _Lane] = {}
        self.ranking: Ranking[Account] = Ranking()
        self.num_waiting = 0

    @property
    def excess(self) -> float:
        return self.num_waiting / self.tenant.weight


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
        self._classes: dict[int, Ranking[_Tenant]] = {}  # by priority; those where something waits
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
        band.num_waiting += 1
        self._num_waiting += 1
        return entry

    def pop(self, now_s: float) -> Entry | None:
        """The next to go, charged; None: nobody waits. `close` it when its request ended."""
        if not self._classes:
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
        """Who leaves a full queue for a newcomer: of the last class the newest of whoever holds
        most of it, by weight. None: the newcomer himself. So everybody finds room for his share,
        and a flood is told at once to come back later."""
        worst = max(self._classes, default=priority)
        if priority > worst or not self._classes:
            return None
        own = self._tenants.get(tenant) if priority == worst else None
        own_excess = 1 / self._weights.get(tenant, 1.0) if priority == worst else 0.0
        if own is not None and worst in own.bands:
            own_excess += own.bands[worst].excess
        longest = max(
            (one.bands[worst] for one in self._classes[worst] if one is not own),
            key=lambda band: band.excess,
            default=None,
        )
        if longest is None or longest.excess <= own_excess:
            longest = own.bands.get(worst) if own is not None else None
            if longest is None:
                return None
        return _newest(longest, adapter if longest.tenant is own else None)

    def largest(self) -> Entry | None:
        """Of the last class the newest of whoever holds most of it, by weight."""
        if not self._classes:
            return None
        worst = max(self._classes)
        bands = (tenant.bands[worst] for tenant in self._classes[worst])
        return _newest(max(bands, key=lambda band: band.excess), None)

    def cost_ahead(self, tenant: str, adapter: str, priority: int, cost: float) -> float:
        """What goes before a newcomer is served if nobody else comes, in a fluid approximation:
        all of better classes; in its own class what the others get in the meantime."""
        ahead = 0.0
        own, others = 0.0, []
        for of_class, ranking in self._classes.items():
            for one in ranking:
                lanes = one.bands[of_class].lanes.values()
                if of_class < priority:
                    ahead += sum(lane.cost for lane in lanes)
                elif of_class == priority and one.name == tenant:
                    mine = sum(lane.cost for lane in lanes if lane.account.name == adapter)
                    own = mine + sum(
                        min(lane.cost, mine + cost)
                        for lane in lanes
                        if lane.account.name != adapter
                    )
                elif of_class == priority:
                    others.append((sum(lane.cost for lane in lanes), one.weight))
        share = (own + cost) / self._weights.get(tenant, 1.0)
        return ahead + own + sum(min(waits, share * weight) for waits, weight in others)

    def _make_tenant(self, name: str) -> _Tenant:
        return _Tenant(name, self._weights.get(name, 1.0))

    def _new_band(self, tenant: _Tenant, priority: int, now_s: float) -> _Band:
        ranking = self._classes.get(priority)
        if ranking is None:
            tenant.lift(self._floor)
            ranking = self._classes[priority] = Ranking()
        else:
            tenant.lift(ranking.first().counter)
        if not tenant.bands:
            tenant.since_s = now_s
            self._overdue.push(tenant)
        ranking.add(tenant)
        band = tenant.bands[priority] = _Band(tenant, priority)
        return band

    def _next_lane(self, now_s: float) -> _Lane:
        long_ago_s = now_s - self._max_wait_s
        tenant = self._overdue.first(long_ago_s)
        if tenant is not None:
            band = tenant.bands[min(tenant.bands)]
        else:
            priority = min(self._classes)
            tenant = self._classes[priority].first()
            self._floor = tenant.counter
            band = tenant.bands[priority]
        lane = tenant.overdue.first(long_ago_s)
        if lane is None:
            account = band.ranking.first()
            tenant.floor = account.counter
            lane = band.lanes[account]
        return lane

    def _take_out(self, entry: Entry) -> None:
        lane, band = entry.lane, entry.lane.band
        entry.is_waiting = False
        del lane.entries[entry]
        lane.cost -= entry.cost
        band.num_waiting -= 1
        self._num_waiting -= 1
        if lane.entries:
            return
        lane.since_s = inf
        del band.lanes[lane.account]
        band.ranking.remove(lane.account)
        if band.lanes:
            return
        tenant = band.tenant
        del tenant.bands[band.priority]
        ranking = self._classes[band.priority]
        ranking.remove(tenant)
        if not len(ranking):
            del self._classes[band.priority]
        if not tenant.bands:
            tenant.since_s = inf


def _new_lane(band: _Band, account: Account, now_s: float) -> _Lane:
    ranking = band.ranking
    account.lift(ranking.first().counter if len(ranking) else band.tenant.floor)
    ranking.add(account)
    lane = band.lanes[account] = _Lane(band, account)
    lane.since_s = now_s
    band.tenant.overdue.push(lane)
    return lane


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
