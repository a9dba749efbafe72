"""The replica that each policy ranks first, by tables; the policies' cost and construction."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from pydantic import ValidationError

from serve_app.config import PlatformArgs, RouterArgs, check_routers
from serve_app.messages import RoutingRequest
from serve_app.routing.candidates import CandidateSampler
from serve_app.routing.expected_ttft import ExpectedTtft
from serve_app.routing.policies import POLICIES, PolicyError, make_policy
from serve_app.routing.policy import Policy, Ranked
from serve_app.routing.view import ReplicaView
from tests.routing_factory import make_ask, make_load, make_view, make_views, order


class Alphabetical:
    """A user's own policy."""

    def __init__(self, backwards: bool = False) -> None:
        self._backwards = backwards

    def rank(
        self, request: RoutingRequest, replicas: Sequence[ReplicaView], now_s: float
    ) -> list[Ranked]:
        raise NotImplementedError

    def changed(self, replica_ids: Sequence[str]) -> None:
        pass


class WithCallable(Alphabetical):
    def __init__(self, pick: Callable[[int], float] | None = None) -> None:
        super().__init__()


class NoPolicy:
    pass


def _policy(name: str = "expected_ttft", **options: bool | int | float | str) -> Policy:
    return make_policy(name, {"seed": 1, **options})


def test_the_soonest_goes_first() -> None:
    busy, idle, half = (
        make_view("busy", queued_tokens=3000),
        make_view("idle"),
        make_view("half", queued_tokens=1000),
    )
    policy = _policy()
    assert order(policy, make_ask(), [busy, idle, half]) == ["idle", "half", "busy"]
    assert policy.rank(make_ask(), [busy, idle, half], 1.0)[0].reason == "soonest"


def test_an_adapter_in_memory_is_worth_a_queue_that_is_shorter_than_its_load() -> None:
    views = [
        make_view("has", device="a", queued_tokens=900),
        make_view("lacks", disk="a"),
    ]
    assert order(_policy(), make_ask(adapter="a"), views)[0] == "has"
    views[0].observe(make_load(queued_tokens=5000, adapters_on_device=("a",)), 1.0)
    assert order(_policy(), make_ask(adapter="a"), views)[0] == "lacks"


def test_a_cached_prefix_is_worth_a_queue_that_is_shorter_than_its_prefill() -> None:
    prefixes = tuple(range(20))
    views = [make_view("has", prefixes=prefixes, queued_tokens=300), make_view("lacks")]
    request = make_ask(num_tokens=700, prefixes=prefixes)
    assert order(_policy(), request, views)[0] == "has"
    views[0].observe(make_load(queued_tokens=2000), 1.0)
    assert order(_policy(), request, views)[0] == "lacks"


def test_an_unknown_adapter_goes_to_its_home_whoever_asks() -> None:
    views = make_views(8).replicas
    policies = [_policy(seed=seed) for seed in range(4)]
    for number in range(20):
        request = make_ask(adapter=f"adapter-{number}", session=f"session-{number}")
        ranked = [policy.rank(request, views, 1.0)[0] for policy in policies]
        assert len({one.replica.replica_id for one in ranked}) == 1
        assert {one.reason for one in ranked} == {"home"}


def test_cold_adapters_stay_where_they_are() -> None:
    views = make_views(8).replicas
    policy = _policy()
    for number in range(200):
        request = make_ask(str(number), adapter=f"adapter-{number % 20}")
        replica = policy.rank(request, views, float(number))[0].replica
        replica.on_device |= {request.adapter or ""}
    holders = Counter(adapter for view in views for adapter in view.on_device)
    assert set(holders.values()) == {1}


def test_a_remembered_session_takes_16_bytes_whatever_its_length() -> None:
    sampler = CandidateSampler(random.Random(0), 2)
    for number in range(70_000):
        sampler.record(make_ask(session=f"{number}" + "x" * 256), "r0")
    assert len(sampler._sessions._entries) == 65_536
    assert {len(key) for key in sampler._sessions._entries} == {16}
    assert sampler.session_place("69999" + "x" * 256) == "r0"
    assert sampler.session_place("69999" + "x" * 255) is None


def test_a_session_stays_where_it_was_among_those_that_are_as_soon() -> None:
    views = make_views(6).replicas
    policy = _policy()
    first = order(policy, make_ask(session="s"), views)[0]
    for _ in range(20):
        assert order(policy, make_ask(session="s"), views)[0] == first
    ranked = policy.rank(make_ask(session="s"), views, 1.0)
    assert ranked[0].reason == "session"
    ranked[0].replica.observe(make_load(queued_tokens=5000), 1.0)
    assert order(policy, make_ask(session="s"), views)[0] != first


@pytest.mark.parametrize("name", POLICIES)
def test_who_is_to_be_avoided_is_the_last_resort(name: str) -> None:
    views = make_views(3).replicas
    views[1].disconnect()
    request = make_ask(avoid=frozenset({"r0", "r2"}))
    for _ in range(10):
        assert order(_policy(name), request, views)[0] == "r1"
    views[1].observe(make_load(), 2.0)
    assert order(_policy(name), request, views)[0] == "r1"
    nobody_else = make_ask(avoid=frozenset({"r0", "r1", "r2"}))
    assert order(_policy(name), nobody_else, views)


@pytest.mark.parametrize("name", POLICIES)
def test_only_means_this_one(name: str) -> None:
    views = make_views(20).replicas
    policy = _policy(name)
    assert order(policy, make_ask(only="r17"), views) == ["r17"]
    assert order(policy, make_ask(only="gone"), views)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_gives_the_same_decisions(name: str) -> None:
    def decisions(seed: int) -> list[list[str]]:
        views, policy = make_views(40).replicas, _policy(name, seed=seed)
        asks = [make_ask(str(i), adapter=f"a{i % 7}") for i in range(50)]
        return [order(policy, request, views, i * 0.1) for i, request in enumerate(asks)]

    assert decisions(3) == decisions(3)


@pytest.mark.parametrize("name", POLICIES)
def test_a_dry_run_changes_no_later_decision(name: str) -> None:
    views, policy = make_views(3).replicas, _policy(name, seed=5)
    twin = _policy(name, seed=5)
    real = make_ask("real", adapter="a", session="s")
    dry = make_ask("dry", adapter="b", session="s", dry_run=True)
    if name == "round_robin":
        for _ in range(5):
            order(policy, dry, views)
        assert order(policy, real, views) == order(twin, real, views)
    elif isinstance(policy, ExpectedTtft):
        for _ in range(500):
            policy.rank(dry, views, 1.0)
        assert policy.placement.num_homes("b", 1.0) == 1
        policy.rank(real, views, 1.0)
    assert all(len(view._placed) == 0 for view in views)


@pytest.mark.parametrize("name", POLICIES)
def test_of_a_thousand_replicas_few_are_looked_at(name: str) -> None:
    views = make_views(1000)
    policy = _policy(name)
    holder = views.replicas[321]
    holder.on_device = frozenset({"a"})
    for number in range(50):
        request = make_ask(str(number), adapter="a", session="s", prefixes=tuple(range(100)))
        ranked = policy.rank(request, views.replicas, 1.0)
        assert 2 <= len(ranked) <= 20
        assert len({one.replica.replica_id for one in ranked}) == len(ranked)


def test_among_a_thousand_a_prefix_is_found_again() -> None:
    views, policy = make_views(1000).replicas, _policy()
    request = make_ask(num_tokens=3200, prefixes=tuple(range(100)))
    first = policy.rank(request, views, 1.0)[0].replica
    first.change_prefixes(request.prefixes, ())
    for _ in range(10):
        assert policy.rank(request, views, 1.0)[0].replica is first


def test_power_of_two_takes_the_emptier_of_two() -> None:
    views = [make_view("busy", num_running=5), make_view("idle")]
    for _ in range(10):
        assert order(_policy("power_of_two"), make_ask(), views) == ["idle", "busy"]


def test_round_robin_takes_turns() -> None:
    views, policy = make_views(3).replicas, _policy("round_robin")
    assert [order(policy, make_ask(), views)[0] for _ in range(4)] == ["r0", "r1", "r2", "r0"]


def test_adapter_affinity_holds_until_the_holder_has_six_more() -> None:
    policy, request = _policy("adapter_affinity"), make_ask(adapter="a")
    views = [make_view("has", device="a", num_running=5), make_view("lacks")]
    assert order(policy, request, views)[0] == "has"
    views[0].observe(make_load(num_running=7, adapters_on_device=("a",)), 1.0)
    assert order(policy, request, views)[0] == "lacks"


def test_prefix_affinity_holds_while_the_load_is_even() -> None:
    policy = _policy("prefix_affinity")
    request = make_ask(num_tokens=100, prefixes=(1, 2, 3))
    views = [make_view("has", prefixes=(1, 2), num_running=30), make_view("lacks")]
    assert order(policy, request, views)[0] == "has"
    views[0].observe(make_load(num_running=40), 1.0)
    assert order(policy, request, views)[0] == "lacks"
    views[0].observe(make_load(num_running=30), 1.0)
    assert order(policy, make_ask(num_tokens=1000, prefixes=(1, 2, 3)), views)[0] == "lacks"


def test_a_hot_adapter_gets_homes_and_they_are_told_to_load_it() -> None:
    views, policy = make_views(8, step_token_s=0.0005).replicas, _policy()
    assert isinstance(policy, ExpectedTtft)
    now_s = 0.0
    for number in range(600):
        now_s += 0.02
        replica = policy.rank(make_ask(str(number), adapter="hot"), views, now_s)[0].replica
        replica.on_device |= {"hot"}
    homes = policy.placement.homes("hot", now_s)
    assert len(homes) >= 3
    lacking = [one for one in homes if not _by_id(views, one).has_adapter("hot")]
    assert policy.warm_ups(now_s) == [("hot", lacking[0])]
    for one in lacking:
        _by_id(views, one).on_device |= {"hot"}
    assert policy.warm_ups(now_s) == []
    used = Counter(order(policy, make_ask(adapter="hot"), views, now_s)[0] for _ in range(100))
    assert set(used) == set(homes)


@pytest.mark.parametrize("name", ["expected_ttft", "power_of_two"])
def test_ingresses_with_the_same_old_view_do_not_herd(name: str) -> None:
    """Four ingresses send 64 requests each before the next frame; eight engines are idle."""
    ingresses = [(make_views(8), _policy(name, seed=seed)) for seed in range(4)]
    counts: Counter[str] = Counter()
    for number in range(64):
        for place, (views, policy) in enumerate(ingresses):
            request = make_ask(f"{place}-{number}")
            chosen = policy.rank(request, views.replicas, 1.0)[0].replica
            chosen.place(request, 1.0)
            counts[chosen.replica_id] += 1
    assert sum(counts.values()) == 256
    slack = 4 if name == "expected_ttft" else 16
    assert 32 - slack <= min(counts.values())
    assert max(counts.values()) <= 32 + slack


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("fastest", {}, "policy 'fastest' is none of expected_ttft, adapter_affinity"),
        ("nowhere:Policy", {}, "policy 'nowhere:Policy' cannot be imported: ModuleNotFound"),
        ("serve_app.routing.policies:Nobody", {}, "cannot be imported: AttributeError"),
        ("serve_app.routing.policies:POLICIES", {}, "is not a class"),
        (f"{__name__}:NoPolicy", {}, "has no method rank and no changed"),
        ("round_robin", {"speed": 1}, "options.speed: policy 'round_robin' does not have it; its"),
        (f"{__name__}:Alphabetical", {"backwards": "yes"}, "options.backwards is 'yes', but must"),
        ("expected_ttft", {"tie_s": "long"}, "options.tie_s is 'long', but must be float"),
        ("expected_ttft", {"seed": True}, "options.seed is True, but must be int"),
        ("expected_ttft", {"target_usage": 0}, "target_usage is 0, but must be above 0"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused_with_the_file(
    policy: str, options: dict[str, object], words: str
) -> None:
    args = {"models": [{"name": "base", "router": {"policy": policy, "options": options}}]}
    with pytest.raises((ValidationError, PolicyError)) as caught:
        check_routers(PlatformArgs.model_validate(args))
    assert "models" in str(caught.value)
    assert "router" in str(caught.value)
    assert words in str(caught.value)


def test_checking_the_text_of_a_configuration_imports_no_policy() -> None:
    """A registry's tag goes through this check, too."""
    router = RouterArgs(policy="tests.text_factory_that_is_not_there:Policy")
    assert router.policy.endswith(":Policy")


def test_a_users_own_class_is_taken_with_its_options() -> None:
    policy = make_policy(f"{__name__}:Alphabetical", {"backwards": True})
    assert type(policy).__name__ == "Alphabetical"
    assert issubclass(PolicyError, ValueError)
    assert make_policy(f"{__name__}:WithCallable", {"pick": "any"})


def _by_id(views: Sequence[ReplicaView], replica_id: str) -> ReplicaView:
    return next(one for one in views if one.replica_id == replica_id)
