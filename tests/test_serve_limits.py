"""Limits over many ingresses by leases, in virtual time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.errors import RateLimitError
from serve_app.tenancy.caller import Caller, KeyPolicy
from serve_app.tenancy.leases import Claim, LeaseRequest, Leases, fair_share
from serve_app.tenancy.limits import Limits
from serve_app.tenancy.local_leases import as_duration
from tests.limits_world import LATENCY_S, World

SHARES = {1: [1.0], 2: [0.9, 0.1], 8: [0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.01, 0.01]}


async def offer(world: World, per_s: float, seconds: float, tokens=lambda: (1, 1)) -> None:
    async with asyncio.TaskGroup() as group:
        for ingress, share in enumerate(SHARES[world.num_ingresses]):
            rate = per_s * share
            group.create_task(world.clients(ingress, lambda _, r=rate: r, seconds, tokens))


@pytest.mark.parametrize("num_ingresses", [1, 2, 8])
@pytest.mark.parametrize("kills", [False, True])
def test_ten_times_the_limit_is_admitted_within_two_percent(
    num_ingresses: int, kills: bool
) -> None:
    """The manager is away from 20 to 40 s and comes back without memory."""
    world = World(KeyPolicy(requests_per_minute=600), num_ingresses)

    async def scenario() -> None:
        if kills:
            world.loop.call_later(20.0, world.kill)
            world.loop.call_later(40.0, world.revive)
        await offer(world, 100.0, 125.0)

    world.run(scenario())
    first = world.admitted[0][0]
    counts = [world.num_admitted(first + begin, first + begin + 60) for begin in range(0, 61, 5)]
    assert all(588 <= count <= 612 for count in counts), counts
    assert world.num_calls < 127 * num_ingresses * 6  # of about 12,500 requests


@pytest.mark.parametrize("num_ingresses", [2, 8])
def test_tokens_are_admitted_within_five_percent_with_errors_in_the_expected_output(
    num_ingresses: int,
) -> None:
    world = World(KeyPolicy(tokens_per_minute=120_000), num_ingresses)
    draw = random.Random(5)

    def tokens() -> tuple[int, int]:
        prompt, output = draw.randrange(20, 400), int(draw.expovariate(1 / 200))
        return prompt + 128, prompt + max(1, output)  # 128 are expected of each

    async def scenario() -> None:
        world.loop.call_later(20.0, world.kill)
        world.loop.call_later(40.0, world.revive)
        await offer(world, 50.0, 125.0, tokens)

    world.run(scenario())
    for begin in range(2, 62, 10):
        assert world.tokens_admitted(begin, begin + 60) == pytest.approx(120_000, rel=0.05)


def test_a_key_within_its_limit_is_never_refused() -> None:
    world = World(KeyPolicy(requests_per_minute=600, tokens_per_minute=600_000), 2)
    # Every 125 ms at an ingress with nine tenths of the requests, every 1.1 s at the other.

    async def steady(ingress: int, every_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(int(60 / every_s)):
                group.create_task(world.request(ingress, 900, 700, 0.5))
                await asyncio.sleep(every_s)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(steady(0, 0.125))
            group.create_task(steady(1, 1.1))

    world.run(scenario())
    assert world.num_refused == 0
    assert len(world.admitted) == 480 + 54


@pytest.mark.parametrize("num_ingresses", [1, 2, 8])
def test_parallel_requests_never_exceed_their_limit(num_ingresses: int) -> None:
    world = World(KeyPolicy(max_parallel_requests=8), num_ingresses)
    world.run(offer(world, 100.0, 30.0))
    assert world.most_open == 8
    # 0.5 s each: 16 per second if all slots are always in use.
    assert len(world.admitted) > 0.6 * 16 * 30


@pytest.mark.parametrize(("limit", "num_ingresses"), [(1, 2), (1, 4), (2, 4), (3, 2)])
def test_few_slots_are_lent_whole_to_many_ingresses(limit: int, num_ingresses: int) -> None:
    world = World(KeyPolicy(max_parallel_requests=limit), num_ingresses)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            for ingress in range(num_ingresses):
                group.create_task(world.clients(ingress, lambda _: 5.0, 20.0))

    world.run(scenario())
    assert world.most_open == limit
    for begin in range(0, 20, 5):  # 0.5 s each: 10 per slot if it is always in use
        assert world.num_admitted(begin, begin + 5) > 0.4 * 10 * limit


@pytest.mark.parametrize(("limit", "num_ingresses"), [(8, 2), (8, 8), (4, 4), (1, 2)])
def test_no_slot_is_lent_twice_when_a_manager_begins_anew(limit: int, num_ingresses: int) -> None:
    world = World(KeyPolicy(max_parallel_requests=limit), num_ingresses)

    async def scenario() -> None:
        world.loop.call_later(8.0, world.kill)
        world.loop.call_later(12.0, world.revive)
        async with asyncio.TaskGroup() as group:
            for ingress in range(num_ingresses):
                work = world.clients(ingress, lambda _: 10.0, 25.0, lasts_s=lambda: 3.0)
                group.create_task(work)

    world.run(scenario())
    assert world.most_open == limit
    assert world.num_admitted(16.0, 25.0) > 0.5 * 3 * limit  # 3 s each


@pytest.mark.parametrize(("limit", "num_ingresses"), [(1, 2), (3, 4)])
def test_every_slot_belongs_to_an_ingress_while_the_manager_is_away(
    limit: int, num_ingresses: int
) -> None:
    world = World(KeyPolicy(max_parallel_requests=limit), num_ingresses)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:  # all know the key
            for ingress in range(num_ingresses):
                group.create_task(world.request(ingress, 1, 1, 0.1))
        await asyncio.sleep(5.0)
        world.kill()
        await asyncio.sleep(5.0)
        world.num_open = world.most_open = 0
        async with asyncio.TaskGroup() as group:
            for ingress in range(num_ingresses):
                group.create_task(world.request(ingress, 1, 1, 0.1))
        assert world.most_open == limit

    world.run(scenario())


def test_free_slots_stay_usable_while_the_manager_is_away() -> None:
    world = World(KeyPolicy(max_parallel_requests=2), 1)

    async def scenario() -> None:
        limits = world.limits[0]
        (await limits.admit(world.caller, 1)).settle(1)
        world.kill()
        await asyncio.sleep(5.0)
        for _ in range(3):
            charges = [await limits.admit(world.caller, 1) for _ in range(2)]
            with pytest.raises(RateLimitError):
                await limits.admit(world.caller, 1)
            await asyncio.sleep(1.5)
            for charge in charges:
                charge.settle(1)

    world.run(scenario())


def test_a_daily_budget_ends_at_its_limit_and_with_another_code() -> None:
    world = World(KeyPolicy(tokens_per_day=10_000), 2)

    async def scenario() -> None:
        await offer(world, 20.0, 20.0, lambda: (120, 100))
        with pytest.raises(RateLimitError) as refused:
            await world.limits[0].admit(world.caller, 120)
        assert (refused.value.code, refused.value.status) == ("insufficient_quota", 429)
        assert refused.value.should_retry is False
        assert refused.value.retry_after_s == 3600

    world.run(scenario())
    assert 10_000 - 2 * 120 <= world.tokens_admitted(0, 20) <= 10_000 + 120


def test_a_request_larger_than_the_bucket_is_admitted_and_leaves_a_debt() -> None:
    world = World(KeyPolicy(tokens_per_minute=6000), 2)

    async def scenario() -> None:
        charge = await world.limits[0].admit(world.caller, 3000)
        charge.settle(3000)
        for limits in world.limits:
            with pytest.raises(RateLimitError) as refused:
                await limits.admit(world.caller, 10)
            assert refused.value.code == "rate_limit_exceeded"
        await asyncio.sleep(31.0)  # 100 tokens per second
        await world.limits[1].admit(world.caller, 10)

    world.run(scenario())


@pytest.mark.parametrize("num_ingresses", [1, 2])
@pytest.mark.parametrize(
    "policy", [KeyPolicy(tokens_per_minute=1000), KeyPolicy(tokens_per_day=1000)]
)
def test_of_many_requests_at_once_one_goes_beyond_the_limit(
    num_ingresses: int, policy: KeyPolicy
) -> None:
    world = World(policy, num_ingresses)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(world.request(number % num_ingresses, 900, 900, 0.5))

    world.run(scenario())
    assert 900 <= world.tokens_admitted(0, 1) <= 1000 + 900


def test_a_charge_that_is_closed_without_use_is_refunded_whole() -> None:
    policy = KeyPolicy(
        requests_per_minute=1, tokens_per_minute=100, max_parallel_requests=1, tokens_per_day=100
    )
    world = World(policy, 1)

    async def scenario() -> None:
        limits = world.limits[0]
        for _ in range(5):
            charge = await limits.admit(world.caller, 90)
            charge.close()
            charge.settle(90)  # too late: it is closed
        charge = await limits.admit(world.caller, 90)
        with pytest.raises(RateLimitError):
            await limits.admit(world.caller, 90)
        charge.settle(90)
        await asyncio.sleep(2.0)
        with pytest.raises(RateLimitError):
            await limits.admit(world.caller, 90)

    world.run(scenario())


async def _check_and_admit(limits: Limits, caller: Caller, num_tokens: int = 1) -> None:
    limits.check(caller)
    await limits.admit(caller, num_tokens)


def test_a_refused_request_is_counted_once() -> None:
    world = World(KeyPolicy(requests_per_minute=1), 1)

    async def scenario() -> None:
        limits = world.limits[0]
        await limits.admit(world.caller, 1)
        for _ in range(3):
            with pytest.raises(RateLimitError) as refused:
                await _check_and_admit(limits, world.caller)
        assert refused.value.headers()["Retry-After"] == "60"
        assert +Counter(limits.num_refused) == {"requests": 3}
        assert b'loraplex_limit_refusals_total{ingress="i0",limit="requests"} 3' in limits.text()

    world.run(scenario())


@pytest.mark.parametrize("limit", [2, 3, 20, 40])
@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.1, 0.2])
def test_the_first_requests_of_a_key_may_come_one_after_the_other(
    limit: int, pause_s: float
) -> None:
    world = World(KeyPolicy(requests_per_minute=limit), 1)

    async def scenario() -> None:
        for _ in range(min(limit, 4)):
            await world.request(0, 1, 1, lasts_s=pause_s)

    world.run(scenario())
    assert world.num_refused == 0


def test_the_headers_are_those_of_openai() -> None:
    world = World(KeyPolicy(requests_per_minute=600, tokens_per_minute=6000), 1)

    async def scenario() -> None:
        limits = world.limits[0]
        assert limits.headers(world.caller) == {}  # before its first request
        await limits.admit(world.caller, 150)
        headers = limits.headers(world.caller)
        assert headers == {
            "x-ratelimit-limit-requests": "600",
            "x-ratelimit-remaining-requests": "4",
            "x-ratelimit-reset-requests": headers["x-ratelimit-reset-requests"],
            "x-ratelimit-limit-tokens": "6000",
            "x-ratelimit-remaining-tokens": "0",
            "x-ratelimit-reset-tokens": headers["x-ratelimit-reset-tokens"],
        }
        both = limits.headers(world.caller, for_anthropic=True)
        own = {name: value for name, value in both.items() if name not in headers}
        resets = [own.pop(f"anthropic-ratelimit-{name}-reset") for name in ("requests", "tokens")]
        assert own == {
            "anthropic-ratelimit-requests-limit": "600",
            "anthropic-ratelimit-requests-remaining": "4",
            "anthropic-ratelimit-tokens-limit": "6000",
            "anthropic-ratelimit-tokens-remaining": "0",
        }
        for reset in resets:
            at = datetime.strptime(reset, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
            assert 0 <= at.timestamp() - time.time() < 90

    world.run(scenario())


def test_the_reset_headers_of_a_refusal_agree_with_its_retry_after() -> None:
    world = World(KeyPolicy(requests_per_minute=600, tokens_per_minute=600), 2)

    async def scenario() -> None:
        limits = world.limits[0]
        # Half a second of 600 per minute is 5 tokens: the other 95 come back in 9.5 s, all in 10 s.
        await limits.admit(world.caller, 100)
        assert limits.headers(world.caller)["x-ratelimit-reset-tokens"] == "10s"
        for tokens in (10, 200, 400):  # a debt refuses all of them, and its end admits any
            with pytest.raises(RateLimitError) as refused:
                await limits.admit(world.caller, tokens)
            assert refused.value.headers()["Retry-After"] == "10"
            headers = limits.headers(world.caller, for_anthropic=True)
            assert headers["x-ratelimit-reset-tokens"] == "10s"
            assert headers["x-ratelimit-reset-requests"].endswith("ms")  # it refused none
            reset = headers["anthropic-ratelimit-tokens-reset"]
            at = datetime.strptime(reset, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
            assert 9 <= at.timestamp() - time.time() <= 11
        await asyncio.sleep(60.0)
        assert limits.headers(world.caller)["x-ratelimit-reset-tokens"] == "0ms"

    world.run(scenario())


def test_tokens_that_were_expected_and_not_used_pay_the_debt_of_their_request() -> None:
    world = World(KeyPolicy(tokens_per_minute=600), 1)

    async def scenario() -> None:
        limits = world.limits[0]
        charge = await limits.admit(world.caller, 1000)
        await asyncio.sleep(0.2)
        charge.settle(100)
        with pytest.raises(RateLimitError) as refused:
            await limits.admit(world.caller, 1000)
        assert 8 < refused.value.wait_s < 10  # for the 100, less the 5 of the bucket
        await asyncio.sleep(refused.value.wait_s + 0.3)
        await limits.admit(world.caller, 1000)

    world.run(scenario())


@pytest.mark.parametrize(
    ("policy", "first", "is_down"),
    [
        (KeyPolicy(tokens_per_minute=600), 30, False),
        (KeyPolicy(tokens_per_minute=600), 5000, False),  # a debt of many minutes
        (KeyPolicy(tokens_per_minute=600), 105, True),
        (KeyPolicy(requests_per_minute=20), 1, False),
        (KeyPolicy(requests_per_minute=20), 1, True),
        (KeyPolicy(requests_per_minute=600, tokens_per_minute=600), 105, False),
    ],
)
def test_a_refused_request_is_admitted_after_its_retry_after_and_not_before(
    policy: KeyPolicy, first: int, is_down: bool
) -> None:
    world = World(policy, 2)

    async def scenario() -> None:
        limits = world.limits[0]
        with suppress(RateLimitError):
            for _ in range(4):
                (await limits.admit(world.caller, first)).settle(first)
        if is_down:
            world.kill()
            await asyncio.sleep(2.0)
            with suppress(RateLimitError):
                while True:
                    (await limits.admit(world.caller, first)).settle(first)
        with pytest.raises(RateLimitError) as refused:
            await _check_and_admit(limits, world.caller, 220)
        wait_s = refused.value.wait_s
        assert wait_s > 0.5
        await asyncio.sleep(0.9 * wait_s)
        with pytest.raises(RateLimitError) as refused:
            await _check_and_admit(limits, world.caller, 220)
        await asyncio.sleep(refused.value.wait_s + 0.01)
        await _check_and_admit(limits, world.caller, 220)
        assert world.loop.time() < wait_s + 5.0

    world.run(scenario())


def test_use_that_is_recorded_before_the_answer_of_a_claim_is_not_granted_again() -> None:
    world = World(KeyPolicy(tokens_per_day=20), 1)

    async def scenario() -> None:
        limits = world.limits[0]
        for _ in range(2):
            (await limits.admit(world.caller, 8)).settle(8)
        waiting = asyncio.get_running_loop().create_task(limits.admit(world.caller, 8))
        await asyncio.sleep(LATENCY_S * 1.5)  # the manager has answered at the latest
        assert not waiting.done()
        world.used["key", "day"] = 16.0
        limits.recorded("key", 16)
        await waiting  # the last part of the budget
        for _ in range(4):
            with pytest.raises(RateLimitError, match="20 tokens of this day"):
                await limits.admit(world.caller, 8)

    world.run(scenario())


def test_a_request_that_is_cancelled_while_it_waits_holds_nothing() -> None:
    policy = KeyPolicy(
        requests_per_minute=60, tokens_per_minute=60000, max_parallel_requests=2, tokens_per_day=600
    )
    world = World(policy, 1)

    async def scenario() -> None:
        limits = world.limits[0]
        for _ in range(20):  # of both kinds: before its call was sent, and while that is under way
            for wait_s in (0.0, LATENCY_S / 4):
                waiting = asyncio.get_running_loop().create_task(limits.admit(world.caller, 500))
                await asyncio.sleep(wait_s)
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    (await waiting).close()
        await asyncio.sleep(3.0)
        lease = limits._leases["key"]
        assert lease._num_open == 0
        assert all(total.in_use == 0 for total in lease._totals.values())
        assert not lease._waiting
        assert not limits._waiting
        for _ in range(2):
            await limits.admit(world.caller, 250)
        with pytest.raises(RateLimitError, match="2 requests at the same time"):
            await limits.admit(world.caller, 50)

    world.run(scenario())


def test_a_key_without_limits_costs_no_call() -> None:
    world = World(KeyPolicy(), 1)

    async def scenario() -> None:
        charge = await world.limits[0].admit(world.caller, 10)
        charge.settle(10)
        await asyncio.sleep(5.0)

    world.run(scenario())
    assert (world.num_calls, len(world.limits[0])) == (0, 0)


def test_an_idle_key_is_forgotten_everywhere() -> None:
    world = World(KeyPolicy(requests_per_minute=60, tokens_per_day=1000), 2)

    async def scenario() -> None:
        charge = await world.limits[0].admit(world.caller, 10)
        charge.settle(10)
        await asyncio.sleep(30.0)
        world.limits[0].recorded("key", 10)
        assert (len(world.limits[0]), len(world.leases)) == (1, 2)
        await asyncio.sleep(300.0)
        other = Caller("other", KeyPolicy(requests_per_minute=60))
        await world.limits[1].admit(other, 10)
        assert (len(world.limits[0]), len(world.leases)) == (0, 1)

    world.run(scenario())


def test_a_changed_limit_holds_from_the_next_request_on() -> None:
    world = World(KeyPolicy(requests_per_minute=1), 1)

    async def scenario() -> None:
        limits = world.limits[0]
        await limits.admit(world.caller, 1)
        with pytest.raises(RateLimitError):
            await limits.admit(world.caller, 1)
        await asyncio.sleep(1.0)
        raised = Caller("key", KeyPolicy(requests_per_minute=600))
        for _ in range(4):
            await limits.admit(raised, 1)

    world.run(scenario())


def test_open_requests_count_in_new_slots_and_budgets_and_refund_no_new_rate() -> None:
    world = World(KeyPolicy(requests_per_minute=6000), 1)

    async def scenario() -> None:
        limits = world.limits[0]
        charges = []
        for _ in range(3):
            charges.append(await limits.admit(world.caller, 1000))
            await asyncio.sleep(0.1)
        parallel = Caller("key", KeyPolicy(max_parallel_requests=2))
        budget = Caller("key", KeyPolicy(tokens_per_day=2000))
        rate = Caller("key", KeyPolicy(tokens_per_minute=600))
        for caller in (parallel, budget, parallel, budget):
            with pytest.raises(RateLimitError):
                await limits.admit(caller, 10)
            await asyncio.sleep(1.0)
        for charge in charges:
            charge.settle(10)
        (await limits.admit(rate, 100)).settle(100)
        with pytest.raises(RateLimitError):
            await limits.admit(rate, 100)
        for _ in range(2):
            charges.append(await limits.admit(parallel, 10))
        with pytest.raises(RateLimitError, match="2 requests at the same time"):
            await limits.admit(parallel, 10)
        await asyncio.sleep(1.0)
        await limits.admit(budget, 1850)  # beside 30 and 100 that were used, and 20 of open ones
        with pytest.raises(RateLimitError):
            await limits.admit(budget, 10)

    world.run(scenario())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0171, "18ms"), (1.0, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3663, "1h1m3s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert as_duration(seconds) == text


amounts = st.floats(0, 1000)


@given(amounts, amounts, st.lists(amounts, max_size=8))
def test_a_fair_share_is_max_min_fair(amount: float, want: float, others: list[float]) -> None:
    share = fair_share(amount, want, others)
    everyone = [want, *others]
    shares = [
        fair_share(amount, one, everyone[:index] + everyone[index + 1 :])
        for index, one in enumerate(everyone)
    ]
    assert 0 <= share <= want
    assert sum(shares) == pytest.approx(min(amount, sum(everyone)))
    for one, its_share in zip(everyone, shares, strict=True):
        if its_share < one - 1e-6:  # nobody has more than one that lacks something
            assert max(shares) <= its_share + 1e-6


steps = st.lists(
    st.tuples(
        st.floats(0, 5),  # seconds later
        st.integers(0, 7),  # ingress
        st.floats(0, 50),  # need
        st.floats(0, 200),  # want
        st.floats(0, 1),  # share of the last grant that is returned
        st.booleans(),  # the answer is lost
    ),
    max_size=60,
)


@settings(deadline=None)
@given(st.integers(1, 6000), st.floats(0.1, 10), steps)
def test_all_ingresses_together_get_no_more_than_the_bucket_and_what_flows_in(
    limit: int, burst_s: float, steps: list[tuple[float, int, float, float, float, bool]]
) -> None:
    leases, now_s, granted, held = Leases(burst_s), 0.0, 0.0, dict.fromkeys(range(8), 0.0)
    begun_s = steps[0][0] if steps else 0.0
    most_need = 0.0
    for later_s, ingress, need, want, share, is_lost in steps:
        now_s += later_s
        returned = held[ingress] * share
        held[ingress] -= returned
        claim = Claim(limit, need, need, max(want, need), want / 2, returned, is_first=True)
        request = LeaseRequest(str(ingress), {"key": {"tokens": claim}})
        grant = leases.grant(request, {}, {}, now_s)["key"]["tokens"]
        granted += grant.amount - returned
        most_need = max(most_need, need)
        held[ingress] += 0.0 if is_lost else grant.amount
        size = max(limit / 60 * burst_s, 1.0)
        most = size + limit / 60 * (now_s - begun_s) + most_need
        assert granted <= most + 1e-6
        assert 0 <= grant.amount <= max(want, need) + 1e-6


@settings(deadline=None)
@given(st.integers(1, 100), steps)
def test_slots_are_never_lent_twice(
    limit: int, steps: list[tuple[float, int, float, float, float, bool]]
) -> None:
    leases, now_s = Leases(1.0), 0.0
    granted, claimed_s = dict.fromkeys(range(8), 0.0), dict.fromkeys(range(8), -100.0)
    for later_s, ingress, need, want, share, is_lost in steps:
        now_s += later_s
        in_use = float(int(granted[ingress] * share)) if now_s - claimed_s[ingress] < 8 else 0.0
        is_first = claimed_s[ingress] < 0
        claim = Claim(
            *(limit, need, min(need, 1.0), max(want, need)), in_use=in_use, is_first=is_first
        )
        request = LeaseRequest(str(ingress), {"key": {"parallel": claim}})
        grant = leases.grant(request, {}, {}, now_s)["key"]["parallel"]
        # A lost answer: the ingress keeps the slots that it uses, below what is set aside for it.
        granted[ingress] = in_use if is_lost else grant.amount
        claimed_s[ingress] = now_s
        assert grant.amount >= in_use
        live = sum(granted[one] for one in granted if now_s - claimed_s[one] <= 8)
        assert live <= limit + 1e-6
