"""The order of the fair queue: shares, classes, bounded waiting, and evictions when it is full."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.admission.cost import token_cost
from serve_app.admission.fair_queue import FairQueue, QueuedRequest
from serve_app.messages import RoutingRequest

LONG = 1e9  # no tenant is ever overdue


def queue(max_wait_s: float = LONG, **weights: float) -> FairQueue:
    return FairQueue(weights, max_wait_s)


def newcomer(tenant: str, adapter: str = "", priority: int = 0) -> RoutingRequest:
    return RoutingRequest("", 0, adapter_name=adapter, tenant=tenant, priority=priority)


def add(
    fair: FairQueue, tenant: str, adapter: str, priority: int, cost: float, now_s: float
) -> QueuedRequest:
    queued = QueuedRequest(newcomer(tenant, adapter, priority), cost, now_s)
    fair.add_request(queued, now_s)
    return queued


def fill(fair: FairQueue, tenant: str, count: int, *, adapter: str = "", cost: float = 1.0) -> None:
    for _ in range(count):
        add(fair, tenant, adapter, 0, cost, 0.0)


def served(fair: FairQueue, count: int, now_s: float = 0.0) -> list[QueuedRequest]:
    """Pops so many requests."""
    popped = []
    for _ in range(count):
        queued = fair.pop_request(now_s)
        assert queued is not None
        popped.append(queued)
    return popped


def shares(fair: FairQueue, count: int) -> Counter[str]:
    """Pops so many requests and counts them by tenant."""
    return Counter(queued.request.tenant for queued in served(fair, count))


def test_equal_tenants_share_whatever_they_send() -> None:
    fair = queue()
    fill(fair, "many", 90)
    fill(fair, "few", 10)
    assert shares(fair, 20) == {"many": 10, "few": 10}


def test_a_tenant_gets_by_its_weight() -> None:
    fair = queue(gold=3.0)
    fill(fair, "gold", 100)
    fill(fair, "tin", 100)
    assert shares(fair, 40) == {"gold": 30, "tin": 10}


def test_tokens_count_and_not_requests() -> None:
    fair = queue()
    fill(fair, "long", 100, cost=9.0)
    fill(fair, "short", 100, cost=1.0)
    assert shares(fair, 50) == {"long": 5, "short": 45}


def test_adapters_share_what_their_tenant_gets() -> None:
    fair = queue()
    fill(fair, "a", 50, adapter="hot")
    fill(fair, "a", 50, adapter="warm")
    fill(fair, "b", 50)
    assert Counter((e.request.tenant, e.request.adapter_name) for e in served(fair, 40)) == {
        ("a", "hot"): 10,
        ("a", "warm"): 10,
        ("b", ""): 20,
    }


def test_one_adapter_is_served_in_the_order_of_arrival() -> None:
    fair = queue()
    requests = [add(fair, "a", "x", 0, 1.0, float(now)) for now in range(5)]
    assert served(fair, 5) == requests


def test_who_was_idle_starts_with_the_others() -> None:
    fair = queue()
    fill(fair, "steady", 200)
    served(fair, 100)
    fill(fair, "late", 100)
    assert shares(fair, 20) == {"steady": 10, "late": 10}


def test_what_an_answer_really_took_is_set_right() -> None:
    fair = queue()
    fill(fair, "a", 50)
    fill(fair, "b", 50)
    first = served(fair, 2)
    long = next(queued for queued in first if queued.request.tenant == "a")
    fair.charge(long, 10.0)
    assert shares(fair, 10) == {"b": 10}
    fair.charge(long, -10.0)
    assert shares(fair, 10) == {"a": 10}


def test_a_better_class_goes_first() -> None:
    fair = queue()
    later = add(fair, "a", "", 5, 1.0, 0.0)
    usual = add(fair, "a", "", 0, 1.0, 0.0)
    urgent = add(fair, "a", "", -1, 1.0, 0.0)
    assert served(fair, 3) == [urgent, usual, later]


def test_a_class_puts_no_tenant_before_another() -> None:
    fair = queue()
    fill(fair, "modest", 50)
    for number in range(50):
        add(fair, "pushy", "", -1 - number, 1.0, 0.0)
    assert shares(fair, 20) == {"modest": 10, "pushy": 10}


def test_no_class_keeps_an_adapter_waiting_for_ever() -> None:
    fair = queue(max_wait_s=10.0)
    late = add(fair, "a", "patient", 9, 1.0, 0.0)
    for _ in range(100):
        add(fair, "a", "urgent", -1, 1.0, 0.0)
    assert late not in served(fair, 10, now_s=9.9)
    assert late in served(fair, 2, now_s=20.0)


def test_the_longest_waiting_of_those_overdue_goes_first() -> None:
    fair = queue(max_wait_s=10.0)
    fill(fair, "first class", 50)
    second = add(fair, "b", "", 7, 1.0, 2.0)
    first = add(fair, "a", "", 8, 1.0, 1.0)
    served(fair, 1, now_s=5.0)
    assert served(fair, 2, now_s=13.0) == [first, second]


def test_a_late_class_of_a_tenant_goes_in_its_own_turn_once_overdue() -> None:
    fair = queue(max_wait_s=10.0)
    late = add(fair, "a", "batch", 9, 1.0, 0.0)
    fill(fair, "a", 50, adapter="chat")
    fill(fair, "b", 50)
    assert late not in served(fair, 10, now_s=9.0)
    assert late in served(fair, 2, now_s=11.0)


def test_an_overload_stays_fair_however_long_requests_wait() -> None:
    """The longest queue holds the oldest requests: by age alone it would get everything."""
    fair = queue(max_wait_s=10.0)
    fill(fair, "flood", 500)
    fill(fair, "modest", 100)
    requests = [fair.pop_request(now_s=float(second)) for second in range(60)]
    assert Counter(e.request.tenant for e in requests if e is not None) == {
        "flood": 30,
        "modest": 30,
    }


def test_a_full_queue_gives_up_the_newest_of_the_longest() -> None:
    fair = queue()
    fill(fair, "flood", 5, adapter="hot")
    newest = add(fair, "flood", "hot", 0, 1.0, 1.0)
    add(fair, "flood", "cold", 0, 1.0, 2.0)
    assert fair.eviction_victim(newcomer("modest", "", 0)) is newest
    assert fair.eviction_victim(newcomer("flood", "cold", 0)) is newest
    assert fair.eviction_victim(newcomer("flood", "hot", 0)) is None


def test_a_full_queue_gives_up_the_last_class_of_its_largest_tenant_first() -> None:
    fair = queue()
    fill(fair, "flood", 5)
    batch = add(fair, "flood", "", 3, 1.0, 0.0)
    add(fair, "modest", "", 9, 1.0, 0.0)
    assert fair.eviction_victim(newcomer("flood", "", 0)) is batch
    assert fair.eviction_victim(newcomer("flood", "", 4)) is None
    assert fair.eviction_victim(newcomer("modest", "", 9)) is batch
    assert fair.newest_of_largest() is batch


def test_no_class_finds_a_place_at_the_cost_of_another_tenant() -> None:
    fair = queue()
    fill(fair, "modest", 3)
    for number in range(5):
        add(fair, "pushy", "", -1 - number, 1.0, 0.0)
    victim = fair.eviction_victim(newcomer("pushy", "", -9))
    assert victim is not None
    assert (victim.request.tenant, victim.request.priority) == ("pushy", -1)
    victim = fair.eviction_victim(newcomer("modest", "", 5))
    assert victim is not None
    assert victim.request.tenant == "pushy"


def test_a_heavier_tenant_may_hold_more_of_a_full_queue() -> None:
    fair = queue(gold=3.0)
    fill(fair, "gold", 6)
    fill(fair, "tin", 3)
    victim = fair.eviction_victim(newcomer("gold", "", 0))
    assert victim is not None
    assert victim.request.tenant == "tin"


def test_what_goes_before_a_newcomer_is_known() -> None:
    fair = queue()
    fill(fair, "flood", 100)
    fill(fair, "modest", 2)
    add(fair, "pushy", "", -1, 5.0, 0.0)
    # Its own two, and as much of each other tenant meanwhile and until its own turn.
    assert fair.cost_ahead(newcomer("modest", "", 0), 1.0) == 2 + 3 + 3
    assert fair.cost_ahead(newcomer("flood", "", 0), 1.0) == 100 + 2 + 5
    assert fair.cost_ahead(newcomer("new", "", -5), 1.0) == 3
    assert fair.cost_ahead(newcomer("new", "", 5), 1.0) == 3
    # Better classes of its own go first, worse classes after it.
    assert fair.cost_ahead(newcomer("modest", "", 1), 1.0) == 2 + 3 + 3
    assert fair.cost_ahead(newcomer("modest", "", -1), 1.0) == 1 + 1


def test_who_leaves_while_waiting_is_never_served() -> None:
    fair = queue()
    requests = [add(fair, "a", "", 0, 1.0, 0.0) for _ in range(4)]
    for queued in (requests[0], requests[2]):
        fair.close(queued)
    assert served(fair, 2) == [requests[1], requests[3]]
    assert fair.pop_request(0.0) is None


def test_few_of_many_idle_tenants_are_remembered() -> None:
    fair = queue()
    for number in range(5000):
        add(fair, f"tenant {number}", f"adapter {number}", 0, 1.0, 0.0)
        queued = fair.pop_request(0.0)
        assert queued is not None
        fair.close(queued)
    tenants = [*fair._tenants.busy.values(), *fair._tenants._idle.values()]
    adapters = [tenant.adapters for tenant in tenants]
    num_adapters = sum(len(one.busy) + len(one._idle) for one in adapters)
    assert len(tenants) + num_adapters <= 2 * 1024


def test_a_higher_rank_costs_more() -> None:
    prices = [token_cost(rank, 100, 100) for rank in (0, 16, 64)]
    assert prices == sorted(set(prices))
    assert prices[1] / prices[0] < 1.2


@dataclass(slots=True)
class World:
    """A queue in use, and the state that its rules imply."""

    fair: FairQueue
    now_s: float = 0.0
    waiting: dict[QueuedRequest, tuple[str, str, int]] = field(default_factory=dict)
    tenant_since: dict[str, float] = field(default_factory=dict)
    lane_since: dict[tuple[str, str, int], float] = field(default_factory=dict)

    def add(self, tenant: str, adapter: str, priority: int, cost: float) -> None:
        if not any(key[0] == tenant for key in self.waiting.values()):
            self.tenant_since[tenant] = self.now_s
        if (tenant, adapter, priority) not in self.waiting.values():
            self.lane_since[tenant, adapter, priority] = self.now_s
        queued = add(self.fair, tenant, adapter, priority, cost, self.now_s)
        self.waiting[queued] = (tenant, adapter, priority)

    def pop(self) -> QueuedRequest:
        queued = self.fair.pop_request(self.now_s)
        assert queued is not None
        del self.waiting[queued]
        return queued


def lane_of(queued: QueuedRequest) -> tuple[str, str, int]:
    request = queued.request
    return request.tenant, request.adapter_name, request.priority


TENANTS = st.sampled_from(["a", "b", "c"])
ADAPTERS = st.sampled_from(["", "x", "y"])
PRIORITIES = st.sampled_from([0, 0, 0, 1, -3])
COSTS = st.floats(1, 100)
ADDS = st.tuples(st.just("add"), TENANTS, ADAPTERS, PRIORITIES, COSTS)
POPS = st.tuples(st.just("pop"))
LEAVES = st.tuples(st.just("leave"), st.integers(0, 50))
PASSES = st.tuples(st.just("pass"), st.floats(0.1, 4))
CHARGES = st.tuples(st.just("charge"), st.floats(-20, 20))


@settings(max_examples=300, deadline=None)
@given(st.lists(ADDS | POPS | LEAVES | PASSES | CHARGES, max_size=120))
def test_whoever_waits_is_served_and_nobody_is_passed_over(events: list[tuple]) -> None:
    """Work conservation, and bounded waiting: after the bound a tenant is next, unless others wait
    even longer. A class is passed over only by its own tenant's overdue adapters."""
    max_wait_s = 5.0
    world = World(FairQueue({"b": 2.5}, max_wait_s))
    gone: list[QueuedRequest] = []
    for kind, *values in events:
        if kind == "add":
            world.add(*values)
        elif kind == "pass":
            world.now_s += values[0]
        elif kind == "leave" and world.waiting:
            queued = list(world.waiting)[values[0] % len(world.waiting)]
            del world.waiting[queued]
            world.fair.close(queued)
        elif kind == "charge" and gone:
            world.fair.charge(gone[-1], max(values[0], -gone[-1].cost))
        elif kind == "pop" and world.waiting:
            there = {key[0] for key in world.waiting.values()}
            oldest = min(there, key=lambda tenant: world.tenant_since[tenant])
            is_overdue = world.now_s - world.tenant_since[oldest] >= max_wait_s
            queued = world.pop()
            gone.append(queued)
            lane = tenant, _, priority = lane_of(queued)
            if is_overdue:
                assert world.tenant_since[tenant] == world.tenant_since[oldest]
            else:
                of_tenant = [key for key in world.waiting.values() if key[0] == tenant]
                is_first = all(priority <= key[2] for key in of_tenant)
                assert is_first or world.now_s - world.lane_since[lane] >= max_wait_s
            world.tenant_since[tenant] = world.now_s
            world.lane_since[lane] = world.now_s
        assert len(world.fair) == len(world.waiting)
    while world.waiting:
        gone.append(world.pop())
    assert world.fair.pop_request(world.now_s) is None
    for queued in gone:
        world.fair.close(queued)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.2, 5), min_size=2),
    st.data(),
)
def test_backlogged_tenants_are_never_apart_by_more_than_one_request(
    weights: dict[str, float], data: st.DataObject
) -> None:
    fair = FairQueue(weights, LONG)
    largest = 50.0
    for tenant in weights:
        for cost in data.draw(st.lists(st.floats(1, largest), min_size=60, max_size=60)):
            add(fair, tenant, "", 0, cost, 0.0)
    had: dict[str, float] = defaultdict(float)
    for _ in range(40):
        queued = fair.pop_request(0.0)
        assert queued is not None
        had[queued.request.tenant] += queued.cost / weights[queued.request.tenant]
        bound = max(largest / weight for weight in weights.values())
        assert max(had[t] for t in weights) - min(had[t] for t in weights) <= bound + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(2, 30), st.integers(-5, 5))
def test_a_cold_adapter_waits_no_longer_than_the_bound(
    num_hot: int, flood: int, priority: int
) -> None:
    """A request goes each second; the flood keeps coming with a better class."""
    max_wait_s = 4.0
    fair = FairQueue({}, max_wait_s)
    cold = add(fair, "shy", "cold", priority, 1.0, 0.0)
    went: list[float] = []
    for second in range(100):
        for number in range(flood):
            add(fair, "loud", f"hot-{number % num_hot}", -9, 1.0, float(second))
        queued = fair.pop_request(float(second))
        if queued is cold:
            went.append(float(second))
            break
    assert went
    assert went[0] <= max_wait_s + 1  # the loud tenant may be overdue in the same second


def test_an_adapter_is_served_at_least_once_in_each_bound_of_its_tenants_turns() -> None:
    fair = FairQueue({}, 4.0)
    turns: list[int] = []
    for second in range(60):
        add(fair, "a", "rare", 5, 1.0, float(second))
        add(fair, "a", "hot", 0, 1.0, float(second))
        queued = fair.pop_request(float(second))
        assert queued is not None
        if queued.request.adapter_name == "rare":
            turns.append(second)
    assert max(later - earlier for earlier, later in pairwise(turns)) <= 5
