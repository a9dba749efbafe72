"""Serve's router with the product's policies, in a real Serve: each handle call gets the
decision that was made for it, and every call gets a replica whatever happens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from ray import serve

from serve_app.config import RouterArgs
from tests.router_app import APP, MAX_ONGOING, fan_application
from tests.waiting import eventually

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module", params=["expected_ttft", "tests.router_app:Broken"])
def url(serve_port: int, request: pytest.FixtureRequest) -> str:
    args = RouterArgs(policy=request.param)
    serve.run(fan_application(args), name=APP, route_prefix="/fan")
    return f"http://127.0.0.1:{serve_port}/fan"


@pytest.fixture
def is_broken(request: pytest.FixtureRequest, url: str) -> bool:
    return "Broken" in request.node.callspec.params["url"]


def fan(url: str, calls: Iterable[dict[str, object]]) -> dict[str, Any]:
    numbered = [{"id": str(number)} | call for number, call in enumerate(calls)]
    answer = httpx.post(url, json=numbered, timeout=120)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert [call_id for call_id, _ in body["answers"]] == [str(n) for n in range(len(numbered))]
    return body


def fan_one(url: str, **call: object) -> str:
    told: str = fan(url, [call])["answers"][0][1]
    return told


def test_every_call_of_one_http_request_goes_where_it_was_sent(url: str, is_broken: bool) -> None:
    ids = fan(url, [{}])["replicas"]
    assert len(ids) == 3
    wanted = [ids[number % 3] for number in range(60)]
    body = fan(url, ({"only": one} for one in wanted))
    if not is_broken:
        misled = sum(told != one for (_, told), one in zip(body["answers"], wanted, strict=True))
        # Each replica accepts three calls at once; a call that finds it full goes elsewhere.
        assert misled <= 60 - 9
        # A replica may count the last call for a moment after its answer has arrived.
        eventually(lambda: all(fan_one(url, only=one) == one for one in ids))
        eventually(lambda: [fan_one(url, only=one) for one in wanted[:12]] == wanted[:12])


def test_calls_without_an_ask_go_anywhere(url: str, is_broken: bool) -> None:
    body = fan(url, [{"has_ask": False}] * 30)
    assert len({told for _, told in body["answers"]}) > 1


def test_a_full_replica_is_passed_over(url: str, is_broken: bool) -> None:
    ids = fan(url, [{}])["replicas"]
    calls: list[dict[str, object]] = [{"only": ids[0], "hold_s": 0.6}] * (2 * MAX_ONGOING)

    def fills_the_wanted_replica() -> bool:
        counts = Counter(told for _, told in fan(url, calls)["answers"])
        assert sum(counts.values()) == 2 * MAX_ONGOING
        return is_broken or counts[ids[0]] == MAX_ONGOING

    # A replica may count the calls of an earlier request for a moment after their answers, and a
    # replica whose queue length does not arrive within Serve's deadline is passed over as well.
    eventually(fills_the_wanted_replica)


def test_more_calls_than_there_is_room_for_wait(url: str, is_broken: bool) -> None:
    body = fan(url, [{"hold_s": 0.1}] * 30)
    assert len(body["answers"]) == 30


def test_who_is_to_be_avoided_is_avoided_unless_nobody_else_is_there(
    url: str, is_broken: bool
) -> None:
    ids = fan(url, [{}])["replicas"]
    if not is_broken:
        eventually(lambda: [fan_one(url, avoid=ids[:2]) for _ in range(6)] == [ids[2]] * 6)
    assert fan_one(url, avoid=ids) in ids


def test_an_adapter_stays_where_it_went(url: str, is_broken: bool) -> None:
    eventually(lambda: len({fan_one(url, adapter="pirate") for _ in range(8)}) == 1 or is_broken)


def test_a_policy_that_fails_is_counted_and_costs_no_request(url: str, is_broken: bool) -> None:
    body = fan(url, [{}] * 10)
    assert (body["reasons"].get("fallback", 0) > 0) == is_broken


def test_what_was_placed_goes_with_its_call(url: str, is_broken: bool) -> None:
    fan(url, [{}] * 5)
    eventually(lambda: fan(url, [{"has_ask": False}])["placed"] == 0)


def test_a_call_apart_outlives_the_client_and_keeps_the_id_of_the_request(
    url: str, is_broken: bool, tmp_path: Path
) -> None:
    inside, apart = tmp_path / "inside", tmp_path / "apart"
    calls = [
        {"id": "0", "hold_s": 600, "fate": str(inside)},
        {"id": "1", "hold_s": 3, "fate": str(apart), "is_apart": True},
    ]
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname or "", place.port)
    headers = {"x-request-id": "of-the-client"}
    connection.request("POST", place.path, json.dumps(calls), headers)
    eventually(lambda: inside.exists() and apart.exists())
    connection.close()
    eventually(lambda: inside.read_text() == "cancelled")  # what `call_apart` is for
    eventually(lambda: apart.read_text() not in ("", "begun"))
    assert apart.read_text() == "whole, of-the-client"
