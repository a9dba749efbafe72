"""The order in which requests go to the engines of a base when they cannot all go at once. Pure.

The tenant that had least by its weight goes first; of that tenant its best priority class (lower is
earlier, as in vLLM), and of that class the adapter that had least, in tokens (virtual token
counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024); requests for the
same adapter go in the order of their arrival. A class orders the requests of one tenant and has no
effect on other tenants: a client that asks for a better class has no advantage over them. The
expected cost of a request is charged when it goes, and corrected later by its real cost.

Bounded waiting overrides all of that: a tenant that was passed over for `max_wait_s` is next,
whatever its counter, the longest waiting tenant first; the same holds for an adapter within its
tenant. The clock starts when the tenant (the adapter) was last served, not when a request arrives.
Otherwise a tenant that floods the queue would always be overdue, which would degrade fairness to
first come, first served.

A queue holds few requests (`max_queued_requests`, 256 by default), so that plain dictionaries and
`min()` find the next one fast enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from serve_app.messages import RoutingRequest

_MAX_IDLE_TENANTS = 1024  # whose counters are kept
_MAX_IDLE_ADAPTERS = 256  # the same, per tenant

# Keys for `min` and `max`, faster than lambdas.
_counter: Callable[[_Account], float] = attrgetter("counter")
_share: Callable[[_Tenant], float] = attrgetter("share")
_since_s: Callable[[_Tenant | _Lane], float] = attrgetter("since_s")


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request from `add_request` to `close`. Its fields are for reading; `FairQueue` and
    `AdmissionController` alone write them."""

    request: RoutingRequest
    cost: float  # expected, of its prompts and of `num_charged` output tokens
    enqueued_s: float
    num_charged: int = 0  # output tokens that its tenant was charged so far
    num_generated: int = 0  # output tokens of all its choices
    waited_s: float = 0.0  # final once an engine may have it
    is_waiting: bool = True
    is_closed: bool = False


@dataclass(slots=True, eq=False)
class _Account:
    """The cost that a tenant, or an adapter of a tenant, was charged so far. It starts at the least
    counter of the accounts that wait, so that idle time earns no credit."""

    counter: float = 0.0  # cost units, of a tenant divided by its weight
    num_open: int = 0  # requests that wait or run: an account with any is not forgotten

    def lift(self, others: Iterable[_Account], floor: float) -> None:
        """Raises the counter as a wait begins: to the least counter of the `others` that wait, or
        to `floor` without others."""
        least = min(others, key=_counter, default=None)
        self.counter = max(self.counter, floor if least is None else least.counter)


A = TypeVar("A", bound=_Account)


class _Accounts(Generic[A]):
    """Accounts by name. At most `max_idle` accounts without requests are kept, and the longest idle
    is forgotten first: a counter that was far above the others then starts again at their level."""

    def __init__(self, make: Callable[[str], A], max_idle: int) -> None:
        self.busy: dict[str, A] = {}
        self._idle: OrderedDict[str, A] = OrderedDict()
        self._make = make
        self._max_idle = max_idle

    def open(self, name: str) -> A:
        """Returns the account for one more request, which must `close` it once."""
        account = self.busy.get(name)
        if account is None:
            account = self.busy[name] = self._idle.pop(name, None) or self._make(name)
        account.num_open += 1
        return account

    def close(self, name: str) -> None:
        account = self.busy[name]
        account.num_open -= 1
        if not account.num_open:
            self._idle[name] = self.busy.pop(name)
            if len(self._idle) > self._max_idle:
                self._idle.popitem(last=False)


@dataclass(slots=True, eq=False)
class _Lane:
    """The waiting requests of a tenant with the same adapter and priority, oldest first."""

    account: _Account
    priority: int
    since_s: float  # when it was last served or began to wait
    requests: dict[QueuedRequest, None] = field(default_factory=dict)
    cost: float = 0.0  # of `requests`


@dataclass(slots=True, eq=False, kw_only=True)
class _Tenant(_Account):
    """The account of a tenant, its adapters' accounts, and its waiting requests."""

    weight: float
    adapters: _Accounts[_Account] = field(
        default_factory=lambda: _Accounts(lambda _: _Account(), _MAX_IDLE_ADAPTERS)
    )
    lanes: dict[tuple[int, str], _Lane] = field(default_factory=dict)  # none is empty
    floor: float = 0.0  # counter of the adapter that was last served by its counter
    since_s: float = 0.0  # when it was last served or began to wait
    num_waiting: int = 0
    cost: float = 0.0  # of the requests that wait

    @property
    def share(self) -> float:
        """The part of the queue that its requests hold, by weight."""
        return self.num_waiting / self.weight

    def newest(self, newcomer: RoutingRequest | None = None) -> QueuedRequest | None:
        """Returns the newest request, in the worst class, of the adapter with most requests there;
        None if that would be the `newcomer`, a further request of this tenant."""
        worst, _ = max(self.lanes)
        in_class = (lane for lane in self.lanes.values() if lane.priority == worst)
        longest = max(in_class, key=lambda lane: len(lane.requests))
        if newcomer is not None and newcomer.priority >= worst:
            own = self.lanes.get((worst, newcomer.adapter_name))
            num_own = 1 + (0 if own is None else len(own.requests))
            if newcomer.priority > worst or num_own >= len(longest.requests):
                return None
        return next(reversed(longest.requests))

    def cost_ahead(self, request: RoutingRequest, cost: float) -> float:
        """Returns the cost of the tenant's own requests that go before a newcomer: the better
        classes, the same adapter in its class, and the share that other adapters get meanwhile."""
        own = self.lanes.get((request.priority, request.adapter_name))
        ahead = 0.0 if own is None else own.cost
        most = ahead + cost
        for lane in self.lanes.values():
            if lane.priority < request.priority:
                ahead += lane.cost
            elif lane.priority == request.priority and lane is not own:
                ahead += lane.cost if lane.cost < most else most
        return ahead


class FairQueue:
    """The waiting requests of a base, in the order of the module's rules."""

    def __init__(self, weights: Mapping[str, float], max_wait_s: float) -> None:
        """`weights`: of tenants, 1 for all others."""
        self._weights = weights
        self._max_wait_s = max_wait_s
        self._tenants = _Accounts(
            lambda name: _Tenant(weight=self._weight(name)), _MAX_IDLE_TENANTS
        )
        self._waiting: dict[str, _Tenant] = {}  # the tenants that have waiting requests
        self._floor = 0.0  # counter of the tenant that was last served by its counter
        self._num_waiting = 0

    def __len__(self) -> int:
        """The number of requests that wait."""
        return self._num_waiting

    def add_request(self, queued: QueuedRequest, now_s: float) -> None:
        request = queued.request
        tenant = self._tenants.open(request.tenant)
        account = tenant.adapters.open(request.adapter_name)
        if not tenant.lanes:
            tenant.lift(self._waiting.values(), self._floor)
            self._waiting[request.tenant] = tenant
            tenant.since_s = now_s
        key = request.priority, request.adapter_name
        lane = tenant.lanes.get(key)
        if lane is None:
            lanes = tenant.lanes.values()
            same_class = [one.account for one in lanes if one.priority == request.priority]
            account.lift(same_class, tenant.floor)
            lane = tenant.lanes[key] = _Lane(account, request.priority, now_s)
        lane.requests[queued] = None
        lane.cost += queued.cost
        tenant.cost += queued.cost
        tenant.num_waiting += 1
        self._num_waiting += 1

    def pop_request(self, now_s: float) -> QueuedRequest | None:
        """Returns the next request to go and charges its cost; None if the queue is empty. `close`
        it when its response has ended."""
        if not self._waiting:
            return None
        tenant, lane = self._next(now_s)
        queued = next(iter(lane.requests))
        self._remove(queued)
        self.charge(queued, queued.cost)
        tenant.since_s = lane.since_s = now_s
        return queued

    def charge(self, queued: QueuedRequest, cost: float) -> None:
        """Charges its tenant and adapter; a negative cost refunds unused output."""
        tenant = self._tenants.busy[queued.request.tenant]
        tenant.counter += cost / tenant.weight
        tenant.adapters.busy[queued.request.adapter_name].counter += cost

    def close(self, queued: QueuedRequest) -> None:
        """Ends a request, which is removed if it still waits. Call it once for each."""
        if queued.is_waiting:
            self._remove(queued)
        queued.is_closed = True
        self._tenants.busy[queued.request.tenant].adapters.close(queued.request.adapter_name)
        self._tenants.close(queued.request.tenant)

    def eviction_victim(self, newcomer: RoutingRequest) -> QueuedRequest | None:
        """Returns the request to evict from a full queue: the newest, in the worst class, of the
        tenant with the largest weighted share of the queue; None if that is the newcomer. So each
        tenant finds a place for its share, and a flood is refused at once."""
        own = self._waiting.get(newcomer.tenant)
        own_share = (1 + (0 if own is None else own.num_waiting)) / self._weight(newcomer.tenant)
        others = (tenant for tenant in self._waiting.values() if tenant is not own)
        largest = max(others, key=_share, default=None)
        if largest is not None and largest.share > own_share:
            return largest.newest()
        return None if own is None else own.newest(newcomer)

    def newest_of_largest(self) -> QueuedRequest | None:
        """Returns the newest request, in the worst class, of the tenant with the largest weighted
        share of the queue; None if the queue is empty."""
        largest = max(self._waiting.values(), key=_share, default=None)
        return None if largest is None else largest.newest()

    def cost_ahead(self, request: RoutingRequest, cost: float) -> float:
        """Returns the cost that goes before a newcomer if no further request comes, in a fluid
        approximation: its tenant's own requests, and the share that other tenants get meanwhile."""
        own = self._waiting.get(request.tenant)
        ahead = 0.0 if own is None else own.cost_ahead(request, cost)
        served = (ahead + cost) / self._weight(request.tenant)
        for tenant in self._waiting.values():
            if tenant is not own:
                most = served * tenant.weight
                ahead += tenant.cost if tenant.cost < most else most
        return ahead

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _next(self, now_s: float) -> tuple[_Tenant, _Lane]:
        """Returns the tenant and the lane that are served next."""
        long_ago_s = now_s - self._max_wait_s
        tenant = min(self._waiting.values(), key=_since_s)
        if tenant.since_s > long_ago_s:
            tenant = min(self._waiting.values(), key=_counter)
            self._floor = tenant.counter
        lane = min(tenant.lanes.values(), key=_since_s)
        if lane.since_s > long_ago_s:
            lane = min(tenant.lanes.values(), key=lambda one: (one.priority, one.account.counter))
            tenant.floor = lane.account.counter
        return tenant, lane

    def _remove(self, queued: QueuedRequest) -> None:
        request = queued.request
        key = request.priority, request.adapter_name
        tenant = self._waiting[request.tenant]
        lane = tenant.lanes[key]
        queued.is_waiting = False
        del lane.requests[queued]
        lane.cost -= queued.cost
        tenant.cost -= queued.cost
        tenant.num_waiting -= 1
        self._num_waiting -= 1
        if not lane.requests:
            del tenant.lanes[key]
            if not tenant.lanes:
                del self._waiting[request.tenant]
                tenant.cost = 0.0  # rounding left a rest
