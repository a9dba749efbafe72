"""Requests that killed engines: which of them are refused, for how long, and at which ingresses."""

from __future__ import annotations

import pytest

from engine.types import Request, SamplingParams
from serve_app.control.base_sleep import ScaleToZero
from serve_app.dispatch.request_quarantine import HELD_S, MAX_HELD, RequestQuarantine
from serve_app.errors import RequestQuarantinedError
from serve_app.messages import IngressReport


class Ingress:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.quarantine = RequestQuarantine(lambda: self.now_s)

    def refuses(self, *requests: Request) -> bool:
        try:
            self.quarantine.check(requests)
        except RequestQuarantinedError:
            return True
        return False


def request(*token_ids: int, seed: int | None = None, adapter: str | None = None) -> Request:
    return Request("id", token_ids, SamplingParams(seed=seed), adapter)


def test_the_same_request_is_refused_whatever_its_seed() -> None:
    ingress = Ingress()
    ingress.quarantine.add([request(1, 2, seed=3)])
    assert ingress.refuses(request(1, 2, seed=4))
    assert ingress.refuses(request(1, 2))
    assert not ingress.refuses(request(1, 2, 3))
    assert not ingress.refuses(request(1, 2, adapter="a"))
    assert not ingress.refuses(request(1, 2), request(1, 2))
    ingress.now_s += HELD_S + 1
    assert not ingress.refuses(request(1, 2))


def test_so_many_are_held_and_the_oldest_go_first() -> None:
    ingress = Ingress()
    for number in range(MAX_HELD + 1):
        ingress.now_s += 0.01
        ingress.quarantine.add([request(number)])
    assert not ingress.refuses(request(0))
    assert ingress.refuses(request(1))
    assert ingress.refuses(request(MAX_HELD))


def test_the_other_ingresses_hold_it_too_and_no_longer() -> None:
    one, two = Ingress(), Ingress()
    keeper = ScaleToZero()
    one.quarantine.add([request(1, 2)])
    one.now_s += 400
    for ingress, name in ((one, "one"), (two, "two")):
        entries = ingress.quarantine.export()
        keeper.add_report(IngressReport(name, quarantined=entries), 10.0)
    assert keeper.answer("one", 10.5).quarantined == ()
    answer = keeper.answer("two", 10.5)
    assert answer.num_ingresses == 2
    for _ in range(3):  # with every report's answer
        two.quarantine.merge(answer.quarantined)
    assert two.refuses(request(1, 2, seed=9))
    assert two.quarantine.export() == ()  # it is another ingress's entry
    two.now_s += HELD_S - 400 + 1
    assert not two.refuses(request(1, 2))


def test_what_was_told_is_refused_no_longer_than_usual() -> None:
    ingress = Ingress()
    ingress.quarantine.merge([(b"x" * 32, 1e9)])
    ingress.quarantine.add([request(1)])
    ingress.now_s += HELD_S + 1
    assert ingress.quarantine.export() == ()
    assert not ingress.refuses(request(1))


def test_an_ingress_tells_the_newest_of_many() -> None:
    ingress = Ingress()
    for number in range(100):
        ingress.now_s += 1
        ingress.quarantine.add([request(number)])
    entries = ingress.quarantine.export()
    assert len(entries) == 64
    assert max(left_s for _, left_s in entries) == pytest.approx(HELD_S)
