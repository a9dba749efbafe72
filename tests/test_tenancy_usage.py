"""The recorded use: batches, sums, budgets and prices; on SQLite, and on PostgreSQL if it is
installed.
"""

from __future__ import annotations

import asyncio
import csv
import io
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from serve_app.admin_api import UsageLine, UsageLines, usage_csv
from serve_app.api.ingress import build_asgi
from serve_app.config import PriceArgs, TenancyArgs
from serve_app.control.key_calls import Keys
from serve_app.ray_calls import refusing
from serve_app.tenancy.authentication import ADMIN
from serve_app.tenancy.leases import Claim, LeaseRequest
from serve_app.tenancy.ledger import (
    Ledger,
    UsageBook,
    cost,
)
from serve_app.tenancy.orders import UsageGroup, UsageQuery, check_groups
from serve_app.tenancy.store import Store, StoreUnavailableError
from serve_app.tenancy.usage import Usage, UsageBatch, UsageKey, UsageMeter
from tests.ingress_app import make_state
from tests.key_helpers import make_key, open_service
from tests.test_tenancy_store import postgres, store, url  # noqa: F401
from tests.usage_writer import HOUR, PIRATE, batch, record_for_ever
from tests.waiting import eventually, until

ALL = UsageQuery(("key", "model"), 0, 2 * HOUR)


def sums(ledger: Ledger) -> dict[tuple[str | int, ...], Usage]:
    return {group.values: group.usage for group in ledger.groups(ALL, {})}


def test_batches_are_summed_by_hour_and_each_counts_once(store: Store) -> None:  # noqa: F811
    ledger = Ledger(store)
    assert ledger.record(batch(1, pirate=Usage(1, 10, 4, 5, 1.5), bare=Usage(2, 1, 0, 1)), HOUR)
    assert not ledger.record(batch(1, pirate=Usage(1, 10, 4, 5, 1.5)), HOUR + 1)  # repeated
    assert ledger.record(batch(2, pirate=Usage(1, 10, 4, 5, 1.5)), HOUR + 3599.9)
    assert ledger.record(batch(1, "i1-y", pirate=Usage(3), other=Usage(1, 2, 2, 3)), HOUR + 3600)
    assert sums(ledger) == {
        ("k1", "pirate@3"): Usage(5, 20, 8, 10, 3.0),
        ("k1", "base@1"): Usage(2, 1, 0, 1),
        ("k2", "pirate@3"): Usage(1, 2, 2, 3),
    }
    by_hour = ledger.groups(UsageQuery(("hour", "arm"), HOUR, HOUR + 7200), {})
    assert [(group.values, group.usage.requests) for group in by_hour] == [
        ((HOUR, ""), 4),
        ((HOUR + 3600, ""), 3),
        ((HOUR + 3600, "canary"), 1),
    ]
    assert ledger.groups(UsageQuery(("key",), HOUR + 7200, HOUR + 9999), {}) == []
    assert ledger.tokens(HOUR + 3600) == {"k1": 0, "k2": 5}
    assert not ledger.record(batch(1, pirate=Usage(1)), HOUR + 9)  # older than the last


def test_a_batch_that_arrives_twice_at_once_counts_once(store: Store) -> None:  # noqa: F811
    ledger = Ledger(store)
    with ThreadPoolExecutor(4) as pool:
        for number in range(1, 9):
            one = batch(number, pirate=Usage(1, 7, 0, 3, 0.5))
            done = list(pool.map(lambda one: ledger.record(one, HOUR), [one] * 4))
            assert sorted(done) == [False, False, False, True]
    assert sums(ledger) == {("k1", "pirate@3"): Usage(8, 56, 0, 24, 4.0)}


def has_transactions(store: Store) -> bool:  # noqa: F811
    """Returns True if other processes are connected that do anything on PostgreSQL now."""
    others = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle'"
    )
    with store.transaction() as connection:
        return bool(connection.exec_driver_sql(others).scalar())


def test_a_killed_manager_leaves_whole_batches_and_the_next_continues(
    store: Store,  # noqa: F811
    url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The ingress repeats the batch whose answer it did not receive."""
    ledger, started = Ledger(store), tmp_path / "started"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=record_for_ever, args=(url, str(started)))
    process.start()
    while not (started.exists() and int(started.read_text() or 0) > 20):
        assert process.is_alive()
        process.join(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if url.startswith("postgresql"):  # it may commit for a process that is gone
        eventually(lambda: not has_transactions(store))
    answered = int(started.read_text() or 0)
    found = sums(ledger)["k1", "pirate@3"].requests
    assert found == sums(ledger)["k1", "base@1"].requests  # no half batch
    assert answered <= found <= answered + 1
    assert ledger.record(batch(found, pirate=Usage(1, 1)), HOUR) is False
    assert ledger.record(batch(found + 1, pirate=Usage(1, 1)), HOUR) is True


def test_prices_are_applied_when_usage_is_read() -> None:
    usage = Usage(1, 3_000_000, 1_000_000, 500_000, 7200_000.0)
    price = PriceArgs(prompt=2.0, cached=0.5, output=8.0, engine_hour=3.0, per_rank=0.01)
    assert cost(usage, price, 0) == pytest.approx(2 * 2.0 + 0.5 + 4.0 + 6.0)
    assert cost(usage, price, 16) == pytest.approx(14.5 * 1.16)
    assert cost(usage, PriceArgs(prompt=2.0), 16) == pytest.approx(6.0)  # cached costs the same
    assert cost(usage, None, 16) == 0.0


def test_the_cost_of_a_group_has_the_price_of_each_rank(store: Store) -> None:  # noqa: F811
    ledger = Ledger(store)
    used = Usage(1, 1_000_000)
    ledger.record(batch(1, pirate=used, bare=used, other=used), HOUR)
    prices = {"*": PriceArgs(prompt=1.0, per_rank=0.1)}
    found = ledger.groups(UsageQuery(("key",), 0, 2 * HOUR), prices)
    assert [(group.values, round(group.cost, 6)) for group in found] == [
        (("k1",), 3.6),
        (("k2",), 2.6),
    ]
    alone = ledger.groups(UsageQuery(("key",), 0, 2 * HOUR, "k2"), prices)
    assert [group.values for group in alone] == [("k2",)]
    own = {"base": PriceArgs(prompt=5.0), **prices}
    assert ledger.groups(UsageQuery(("base",), 0, 2 * HOUR), own)[0].cost == pytest.approx(15.0)


async def test_a_batch_is_repeated_until_it_is_recorded_and_new_use_waits() -> None:
    received: list[UsageBatch] = []
    answers: list[bool | Exception] = [False, ConnectionError("lost"), True, True]
    recorded: list[tuple[str, int]] = []

    async def record(sent: UsageBatch) -> bool:
        received.append(sent)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    meter = UsageMeter("i0", record, lambda *one: recorded.append(one))
    await meter.send()
    assert received == []  # nothing to send
    meter.add(PIRATE, Usage(1, 10, 4, 5, 1.0))
    await meter.send()
    meter.add(PIRATE, Usage(1, 1, 0, 1, 1.0))  # after the batch was closed
    with pytest.raises(ConnectionError):
        await meter.send()
    await meter.send()
    assert received[0] == received[1] == received[2]
    assert received[2].rows == ((PIRATE, Usage(1, 10, 4, 5, 1.0)),)
    await meter.send()
    assert (received[3].number, received[3].rows) == (2, ((PIRATE, Usage(1, 1, 0, 1, 1.0)),))
    assert recorded == [("k1", 15), ("k1", 2)]


async def test_an_ingress_that_ends_sends_the_use_that_is_left() -> None:
    received: list[UsageBatch] = []
    is_away = True

    async def record(sent: UsageBatch) -> bool:
        nonlocal is_away
        received.append(sent)
        was_away, is_away = is_away, False
        return not was_away

    meter = UsageMeter("i0", record, lambda *one: None)
    meter.start()
    await asyncio.sleep(0)
    meter.add(PIRATE, Usage(1, 10, 4, 5, 1.0))
    await meter.send()  # the database is away
    meter.add(PIRATE, Usage(1, 1, 0, 1, 1.0))
    await meter.close()
    assert [one.number for one in received] == [1, 1, 2]
    assert received[2].rows == ((PIRATE, Usage(1, 1, 0, 1, 1.0)),)


async def test_the_use_that_is_left_is_given_up_without_a_manager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def record(sent: UsageBatch) -> bool:
        await asyncio.sleep(3600)
        return True

    meter = UsageMeter("i0", record, lambda *one: None)
    meter.add(PIRATE, Usage(1, 10, 4, 5, 1.0))
    await asyncio.wait_for(meter.close(), 30)
    assert "is lost" in caplog.text


async def test_the_book_reads_the_tokens_of_this_month_and_begins_each_day_anew(
    tmp_path: Path,
) -> None:
    now_s = [1_790_712_000.0]  # 2026-09-29T20:00Z
    opened = Store(f"sqlite:///{tmp_path / 'loraplex.db'}")
    book = UsageBook(opened, {}, clock=lambda: now_s[0])
    # The tables are not there yet: the batch stays at the ingress.
    assert await book.record(batch(1, pirate=Usage(1, 10, 0, 5))) is False
    opened.upgrade()
    Ledger(opened).record(batch(1, "i9-z", pirate=Usage(1, 100)), now_s[0] - 86_400)
    assert await book.record(batch(1, pirate=Usage(1, 10, 0, 5))) is True
    assert await book.record(batch(1, pirate=Usage(1, 10, 0, 5))) is True  # known: not added
    assert dict(book.used) == {("k1", "day"): 15, ("k1", "month"): 115}
    assert book.turn(now_s[0]) == {"day": 4 * 3600, "month": 28 * 3600}
    again = UsageBook(opened, {}, clock=lambda: now_s[0])  # after a restart
    assert await again.record(batch(2, pirate=Usage(1, 1))) is True
    assert dict(again.used) == {("k1", "day"): 16, ("k1", "month"): 116}
    now_s[0] += 4 * 3600
    again.turn(now_s[0])
    assert dict(again.used) == {("k1", "month"): 116}
    now_s[0] += 86_400
    again.turn(now_s[0])
    assert dict(again.used) == {}
    opened.close()


async def test_a_batch_whose_answer_is_lost_counts_in_the_budget_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Store(f"sqlite:///{tmp_path / 'loraplex.db'}")
    opened.upgrade()
    book = UsageBook(opened, {}, clock=lambda: 1_790_712_000.0)  # no day ends meanwhile
    assert await book.record(batch(1, pirate=Usage(1, 10)))
    record, has_begun, may_end = book._ledger.record, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def lost(sent: UsageBatch, now_s: float) -> bool:
        record(sent, now_s)
        raise StoreUnavailableError("the connection ended before the answer of the commit")

    def slow(sent: UsageBatch, now_s: float) -> bool:
        loop.call_soon_threadsafe(has_begun.set)
        assert may_end.wait(120)
        return record(sent, now_s)

    monkeypatch.setattr(book._ledger, "record", lost)
    assert await book.record(batch(2, pirate=Usage(1, 20))) is False
    monkeypatch.setattr(book._ledger, "record", slow)
    cancelled = loop.create_task(book.record(batch(3, pirate=Usage(1, 40))))
    await has_begun.wait()
    cancelled.cancel()
    may_end.set()
    with suppress(asyncio.CancelledError):
        await cancelled
    monkeypatch.setattr(book._ledger, "record", record)
    for number, tokens in ((2, 20), (3, 40)):  # which the ingress repeats
        assert await book.record(batch(number, pirate=Usage(1, tokens)))
    assert dict(book.used) == {("k1", "day"): 70, ("k1", "month"): 70}
    opened.close()


async def test_claims_do_not_queue_for_the_recorded_use_while_the_database_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = open_service(tmp_path)
    service.store.upgrade()
    keys = Keys(TenancyArgs(enabled=True), service)
    tokens, may_end = keys.book._ledger.tokens, threading.Event()
    read_s = []

    def hanging(from_s: float) -> dict[str, int]:
        read_s.append(from_s)
        assert may_end.wait(20)
        return tokens(from_s)

    monkeypatch.setattr(keys.book._ledger, "tokens", hanging)
    request = LeaseRequest("i0", {"k1": {"day": Claim(100, need=10, is_first=True)}})
    assert await asyncio.gather(*(keys.grant(request) for _ in range(5))) == [None] * 5
    may_end.set()
    await until(lambda: keys.book._is_known)
    granted = await keys.grant(request)
    assert granted is not None
    assert granted["k1"]["day"].amount == 10
    assert len(read_s) == 2  # of the day and of the month


async def test_a_batch_that_the_manager_before_recorded_late_counts_in_the_budget(
    tmp_path: Path,
) -> None:
    opened = Store(f"sqlite:///{tmp_path / 'loraplex.db'}")
    opened.upgrade()
    before, book = (UsageBook(opened, {}, clock=lambda: 1_790_712_000.0) for _ in range(2))
    assert await book.know()
    assert await before.record(batch(1, pirate=Usage(1, 10)))  # its answer is lost
    for _ in range(2):
        assert await book.record(batch(1, pirate=Usage(1, 10)))
        assert dict(book.used) == {("k1", "day"): 10, ("k1", "month"): 10}
    opened.close()


async def test_a_clock_that_is_set_back_returns_to_the_use_of_its_day(tmp_path: Path) -> None:
    now_s = [1_790_712_000.0]  # 2026-09-29T20:00Z
    opened = Store(f"sqlite:///{tmp_path / 'loraplex.db'}")
    opened.upgrade()
    book = UsageBook(opened, {}, clock=lambda: now_s[0])
    assert await book.record(batch(1, pirate=Usage(1, 10)))
    now_s[0] += 3 * 86_400
    assert await book.record(batch(2, pirate=Usage(1, 20)))
    assert dict(book.used) == {("k1", "day"): 20, ("k1", "month"): 20}
    now_s[0] -= 3 * 86_400
    book.turn(now_s[0])
    assert await book.record(batch(3, pirate=Usage(1, 40)))
    assert book.used["k1", "day"] == 50 + 20  # the recorded future included
    opened.close()


class _Manager:
    """Answers /admin/usage and remembers the query."""

    def __init__(self, groups: list[UsageGroup]) -> None:
        self.queries: list[UsageQuery] = []
        self.usage = self

        async def answer(query: UsageQuery) -> list[UsageGroup]:
            self.queries.append(query)
            return groups

        self.remote = refusing(answer)


def test_usage_is_answered_as_json_and_csv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", "secret")
    groups = [
        UsageGroup(("=cmd()", "pirate@3"), Usage(2, 10, 4, 5, 1.23456), 0.25),
        UsageGroup(("k,2", "base@1"), Usage(1, 1, 0, 1, 0.5), 0.0),
    ]
    manager = _Manager(groups)
    client = TestClient(build_asgi(make_state(manager=manager)))
    client.headers["authorization"] = "Bearer secret"
    path = "/admin/usage?by=model,key&from=2026-11-01&to=2026-11-02T12:00:00%2B02:00"
    found = msgspec.json.decode(client.get(path).content, type=UsageLines)
    assert (found.from_, found.to) == ("2026-11-01T00:00:00Z", "2026-11-02T10:00:00Z")
    assert found.usage[0] == UsageLine(2, 10, 4, 5, 1.235, 0.25, key="=cmd()", model="pirate@3")
    assert manager.queries[0].by == ("key", "model")
    answer = client.get(f"{path}&format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    head, *rows = csv.reader(io.StringIO(answer.text))
    sums = ["requests", "prompt_tokens", "cached_tokens", "output_tokens", "engine_ms", "cost"]
    assert head == ["key", "model", *sums]
    assert rows == [  # no spreadsheet runs the first
        ["'=cmd()", "pirate@3", "2", "10", "4", "5", "1.235", "0.25"],
        ["k,2", "base@1", "1", "1", "0", "1", "0.5", "0.0"],
    ]
    assert usage_csv(("key", "model"), found.usage) == answer.text
    assert client.get("/key/usage?by=key,model").status_code == 200
    # The token is a key, too; `test_console_pages` asks with one of a client.
    assert [query.key_id for query in manager.queries] == [None, None, ADMIN.key_id]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("by=secret", "by"),
        ("by=key,key", "by"),
        ("by=", "by"),
        ("from=yesterday", "from"),
        ("from=2026-11-02&to=2026-11-01", "from"),
        ("to=9999999999", "to"),
        ("to=9999-12-31T23:59:59-01:00", "to"),
        ("to=9999-12-31T23:59:59.999999", "to"),
        ("from=0001-01-01T00:00%2B14:00", "from"),
        ("format=xml", "format"),
        ("until=2026-11-01", "until"),
    ],
)
def test_a_bad_query_names_its_parameter(
    query: str, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", "secret")
    client = TestClient(build_asgi(make_state(manager=_Manager([]))))
    answer = client.get(f"/admin/usage?{query}", headers={"authorization": "Bearer secret"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_times_in_the_wrong_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", "secret")
    client = TestClient(build_asgi(make_state(manager=_Manager([]))))
    path = "/admin/usage?from=2026-11-02&to=2026-11-01T12:00"
    answer = client.get(path, headers={"authorization": "Bearer secret"})
    words = "from: must be before to, got 2026-11-02T00:00:00Z and 2026-11-01T12:00:00Z."
    assert answer.json()["error"]["message"] == words


@pytest.mark.parametrize("offset", ["%2B10:00", "+10:00", "+1000"])
def test_an_offset_counts_whether_its_plus_is_escaped_or_not(
    offset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", "secret")
    manager = _Manager([])
    client = TestClient(build_asgi(make_state(manager=manager)))
    query = f"from=2026-11-02T00:00{offset}&to=2026-11-03T00:00:00Z"
    answer = client.get(f"/admin/usage?{query}", headers={"authorization": "Bearer secret"})
    assert answer.json()["from"] == "2026-11-01T14:00:00Z"


def test_the_answer_of_an_early_year_may_be_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", "secret")
    client = TestClient(build_asgi(make_state(manager=_Manager([]))))
    headers = {"authorization": "Bearer secret"}
    found = client.get("/admin/usage?from=0001-01-01&to=0999-01-01", headers=headers).json()
    assert (found["from"], found["to"]) == ("0001-01-01T00:00:00Z", "0999-01-01T00:00:00Z")
    query = f"from={found['from']}&to={found['to']}"
    assert client.get(f"/admin/usage?{query}", headers=headers).json() == found


def test_groups_are_known_and_in_one_order() -> None:
    assert check_groups(["hour", "key"]) == ("key", "hour")
    with pytest.raises(ValueError, match="'x' is none of key, tenant"):
        check_groups(["x"])


async def test_the_metrics_have_the_used_part_of_each_budget(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    made = {}
    for name, policy in (
        ("both", {"tokens_per_day": 200, "tokens_per_month": 1000}),
        ("over", {"tokens_per_day": 50}),
        ("free", {}),
        ("gone", {"tokens_per_day": 100}),
    ):
        made[name], _ = await make_key(service, alias=name, tenant="acme", **policy)
    limits = Keys(TenancyArgs(enabled=True), service)
    rows = tuple(
        (UsageKey(key_id, "acme", "base", "base@1"), Usage(1, 60, 0, 40))
        for key_id in made.values()
    )
    assert await limits.book.record(UsageBatch("i0", 1, rows))
    await service.revoke("admin-token", ["gone"])
    name = "loraplex_key_budget_used_ratio"
    assert [line for line in limits.text().decode().splitlines() if line.startswith(name)] == [
        f'{name}{{key="{made["over"]}",period="day",tenant="acme"}} 2.0',
        f'{name}{{key="{made["both"]}",period="day",tenant="acme"}} 0.5',
        f'{name}{{key="{made["both"]}",period="month",tenant="acme"}} 0.1',
    ]
