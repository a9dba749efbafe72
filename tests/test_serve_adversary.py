"""Fairness against a client that wants more than its share, and the account of an unproven name.
The honest tenant sends a fifth of the engines' capacity, the attacker twice the capacity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from serve_app.admission.tenants import SHARED_ACCOUNT, Tenants
from serve_app.config import FairnessArgs, IngressArgs
from tests.fairness_attacks import (
    HONEST,
    Score,
    Sent,
    honest,
    priority_attack,
    scores,
    stream,
    sybil_attack,
)

BOTH = (HONEST, "attacker")
SHORT_S = 30.0  # the queue is full after a quarter of it


def for_short(make: Callable[[int], dict[str, object]], per_s: float = 20.0) -> list[Sent]:
    return stream("attacker", per_s, make, SHORT_S)


ATTACKS: dict[str, list[Sent]] = {
    "changing priorities": for_short(lambda i: {"priority": (i * 7919) % 2000 - 1000}),
    "huge max_tokens": for_short(lambda i: {"max_tokens": 100_000}),
    "long answers": for_short(lambda i: {"max_tokens": 100_000, "num_output": 2048}),
    "long prompts": for_short(lambda i: {"num_prompt": 8000}),
    "16 sequences": for_short(lambda i: {"num_sequences": 16}),
    "many adapters": for_short(lambda i: {"adapter": f"adapter-{i % 500}"}),
    "the queue filled first": [Sent(0.0, "attacker")] * 400 + for_short(lambda i: {}),
    "cancelled at once": for_short(lambda i: {"leaves_after_s": 0.0}),
    "cancelled later and later": for_short(
        lambda i: {"leaves_after_s": (i % 7) / 7, "max_tokens": 100_000}, 50.0
    ),
}
MANNERS: dict[int, dict[str, object]] = {  # of made-up tenants, each in its own way
    i: {
        "tenant": f"made-up-{i}",
        "priority": -(i % 100),
        "adapter": f"adapter-{i % 100}",
        "num_sequences": 1 + i % 16,
        "leaves_after_s": (i % 7) or None,
    }
    for i in range(1500)
}


def assert_unhurt(score: Score, attack: list[Sent]) -> None:
    """Nearly all of it is served, and none of it waits longer than a row stays taken."""
    assert score.share_served >= 0.95
    assert score.longest_wait_s <= max(one.service_s for one in attack) + 0.5


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_attacker_takes_nothing_from_a_tenant_within_its_share(attack: list[Sent]) -> None:
    assert_unhurt(scores(honest(seconds=SHORT_S) + attack, BOTH)[HONEST], attack)


def test_a_better_class_takes_nothing_from_another_tenant() -> None:
    attack = priority_attack()
    assert_unhurt(scores(honest() + attack, BOTH)[HONEST], attack)


def test_1000_made_up_tenants_take_nothing_from_a_named_one() -> None:
    attack = sybil_attack()
    found = scores(honest() + attack)
    assert_unhurt(found[HONEST], attack)
    assert found.keys() == {HONEST, SHARED_ACCOUNT}


def test_made_up_tenants_of_many_manners_take_nothing_from_a_named_one() -> None:
    attack = for_short(MANNERS.__getitem__, 50.0)
    assert_unhurt(scores(honest(seconds=SHORT_S) + attack)[HONEST], attack)


def test_made_up_tenants_take_nothing_from_requests_without_a_tenant() -> None:
    attack = sybil_attack(seconds=SHORT_S)
    assert_unhurt(scores(honest("", SHORT_S) + attack)[""], attack)


def test_a_better_class_gains_nothing_against_other_tenants() -> None:
    """Both want more than there is."""
    greedy = stream(HONEST, 20.0, seconds=SHORT_S)
    found = scores(greedy + for_short(lambda i: {"priority": -1}), BOTH)
    usual = scores(greedy + for_short(lambda i: {}), BOTH)
    assert found[HONEST].served == usual[HONEST].served
    assert found["attacker"].served == usual["attacker"].served


def test_made_up_tenants_get_together_what_one_tenant_gets() -> None:
    found = scores(stream(HONEST, 20.0, seconds=SHORT_S) + sybil_attack(seconds=SHORT_S))
    assert found[SHARED_ACCOUNT].work <= 1.1 * found[HONEST].work


def test_an_unproven_tenant_shares_with_all_others_and_keeps_its_adapters_part() -> None:
    """It looks like the attacker: it gets its part of the shared account, by arrival, or by adapter
    if it has its own."""
    modest = honest("somebody", SHORT_S, adapter="own")
    found = scores(modest + sybil_attack(seconds=SHORT_S), named=())
    assert found.keys() == {SHARED_ACCOUNT}
    waits = found[SHARED_ACCOUNT].waits_s
    assert sum(wait_s <= 1.0 for wait_s in waits) >= 0.95 * len(modest)


def test_a_class_counts_nothing_among_unproven_tenants() -> None:
    """Otherwise a client with a false name would go before an honest client."""
    rule = Tenants(FairnessArgs(weights={"gold": 3.0}), is_proven=False)
    assert rule.account("made-up", -5) == rule.account("other", 5)
    assert rule.account("gold", -5) == ("gold", -5)
    assert rule.account("", -5) == ("", -5)


def test_behind_a_trusted_gateway_every_name_is_an_account() -> None:
    rule = Tenants(FairnessArgs(), is_proven=True)
    assert rule.account("team", -5) == ("team", -5)
    found = scores(honest(seconds=SHORT_S) + sybil_attack(4, SHORT_S), is_proven=True)
    assert found.keys() == {HONEST, *(f"made-up-{number}" for number in range(4))}
    assert found[HONEST].share_served >= 0.95  # its share is a fifth of the capacity


def test_no_header_names_the_shared_account() -> None:
    assert not SHARED_ACCOUNT.isprintable()


@pytest.mark.parametrize("name", ["", "   "])
def test_a_trusted_gateway_has_a_name(name: str) -> None:
    with pytest.raises(ValidationError, match="trusted_gateway"):
        IngressArgs(trusted_gateway=name)
