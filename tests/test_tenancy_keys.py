"""Keys: their text and hash, the manager's book of them, and the table of an ingress."""

from __future__ import annotations

import asyncio
import gc
import stat
import tracemalloc
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from serve_app.errors import ApiError, ConflictError, ServiceUnavailableError
from serve_app.tenancy import table as table_module
from serve_app.tenancy.caller import KeyPolicy
from serve_app.tenancy.keys import (
    PEPPER_FILE,
    PepperError,
    digest,
    id_of,
    is_id,
    kept_pepper,
    new_id,
    new_key,
)
from serve_app.tenancy.orders import Act, KeyOrder
from serve_app.tenancy.service import KeyService
from serve_app.tenancy.store import StoreUnavailableError
from serve_app.tenancy.table import KeyDelta, KeyEntry, KeyTable, RefusedKeyError, follow
from tests.key_helpers import LocalManager, make_key, open_service, table_of
from tests.waiting import until

NOW_S = 1_800_000_000.0


def refusal(table: KeyTable, text: str, now_s: float = NOW_S) -> str:
    with pytest.raises(RefusedKeyError) as refused:
        table.find(text, now_s)
    return refused.value.reason


async def order(service: KeyService, kind: Any, key: str, **options: Any) -> str:
    _, text = await service.order(KeyOrder(kind, "admin-token", key, **options))
    return text


def test_a_key_has_a_public_id_and_256_random_bits() -> None:
    key_id = new_id()
    text = new_key(key_id)
    assert is_id(key_id)
    assert id_of(text) == key_id
    assert len(text) == len("lpx_") + 10 + 1 + 43
    assert new_key(key_id) != text


@given(st.text(max_size=80))
def test_no_text_of_another_form_has_an_id(text: str) -> None:
    found = id_of(text)
    assert found is None or text == f"lpx_{found}_{text[15:]}"


def test_the_hash_depends_on_the_pepper_and_on_the_id() -> None:
    text = new_key("aaaaaaaaaa")
    other = text.replace("aaaaaaaaaa", "bbbbbbbbbb")
    assert len({digest(b"p", text), digest(b"q", text), digest(b"p", other)}) == 3


def test_the_pepper_of_a_home_is_made_once_and_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    pepper = kept_pepper(None, home)
    assert kept_pepper(None, home) == pepper
    assert stat.S_IMODE((home / PEPPER_FILE).stat().st_mode) == 0o600
    assert kept_pepper("x" * 32, home) == b"x" * 32


def test_a_pepper_that_is_short_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PepperError, match="32"):
        kept_pepper("short", None)
    (tmp_path / PEPPER_FILE).write_text("cut")
    with pytest.raises(PepperError, match=PEPPER_FILE):
        kept_pepper(None, tmp_path)
    with pytest.raises(PepperError, match="LORAPLEX_KEY_PEPPER"):
        kept_pepper(None, None)  # another one after each start


shell_globs = st.lists(st.text("ab*?[]!-\n", max_size=6), max_size=4)


@given(shell_globs, st.text("ab*?[]!-\n", max_size=5))
def test_globs_match_as_in_a_shell(globs: list[str], name: str) -> None:
    allows = KeyPolicy(models=tuple(globs)).allows((name,))
    assert allows == any(fnmatchcase(name, glob) for glob in globs)


async def test_a_key_is_found_by_its_text_alone(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    key_id, text = await make_key(service, tenant="acme", models=("base:*",))
    table = await table_of(service)
    caller = table.find(text, NOW_S)
    assert (caller.key_id, caller.policy.tenant, caller.policy.models) == (
        key_id,
        "acme",
        ("base:*",),
    )
    wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
    unknown = new_key(new_id())
    for other in (wrong, unknown, "", "sk-1234", text + "x", text[:-1], key_id):
        assert refusal(table, other) == "invalid"


async def test_a_key_expires(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    _, text = await make_key(service, expires_s=NOW_S)
    table = await table_of(service)
    assert table.find(text, NOW_S - 1)
    assert refusal(table, text) == "expired"


async def test_after_a_rotation_two_secrets_count_until_the_grace_ends(tmp_path: Path) -> None:
    service = open_service(tmp_path, clock=lambda: NOW_S)
    key_id, first = await make_key(service)
    second = await order(service, "rotate", key_id, grace_s=60.0)
    table = await table_of(service)
    assert table.find(first, NOW_S + 59).key_id == table.find(second, NOW_S + 61).key_id == key_id
    assert refusal(table, first, NOW_S + 60) == "expired"
    third = await order(service, "rotate", key_id)
    table = await table_of(service)
    assert table.find(third, NOW_S).key_id == key_id
    assert {refusal(table, first), refusal(table, second)} == {"invalid"}


async def test_changes_reach_a_table_that_waits_for_them(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    kept_id, kept = await make_key(service)
    key_id, text = await make_key(service, alias="ci")
    table = await table_of(service)
    assert await service.delta(table.revision, 0.01) is None
    waiting = asyncio.ensure_future(service.delta(table.revision, 30))
    await asyncio.sleep(0)
    await service.revoke("admin-token", ["ci"])
    delta = await waiting
    assert delta is not None
    assert (delta.entries, delta.removed, delta.is_whole) == ((), (key_id,), False)
    table.apply(delta)
    assert refusal(table, text) == "invalid"
    assert table.find(kept, NOW_S).key_id == kept_id
    await order(service, "update", kept_id, changes={"max_tokens": 7})
    delta = await service.delta(table.revision, 5)
    assert delta is not None
    assert [entry.policy.max_tokens for entry in delta.entries] == [7]


async def test_an_ingress_follows_its_manager_also_after_calls_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.tenancy.table._RETRY_S", 0.0)
    manager, table, num_failures = LocalManager(open_service(tmp_path)), KeyTable(), 3
    manager_keys = manager.service
    assert manager_keys is not None

    async def poll(known: str, timeout_s: float) -> KeyDelta | None:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise RayActorError
        delta: KeyDelta | None = await manager.key_delta.remote(known, timeout_s)
        return delta

    following = follow(table, poll)
    _, text = await make_key(manager_keys)
    await until(lambda: len(table) == 1)
    key_id = table.find(text, NOW_S).key_id
    await manager_keys.revoke("admin-token", [key_id])
    await until(lambda: len(table) == 0)
    following.cancel()


async def test_a_database_of_another_pepper_refuses_orders_and_says_why(tmp_path: Path) -> None:
    await make_key(open_service(tmp_path))
    other = KeyService(f"sqlite:///{tmp_path / 'loraplex.db'}", "x" * 32, None)
    with pytest.raises(ServiceUnavailableError, match="another pepper"):
        await other.note(Act("admin-token", "test", ""))
    with pytest.raises(ServiceUnavailableError, match="another pepper"):
        await other.revoke("admin-token", [])
    with pytest.raises(ServiceUnavailableError, match="LORAPLEX_KEY_PEPPER"):
        await make_key(other)


async def test_a_database_of_a_newer_release_refuses_orders_and_says_why(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    await make_key(service)
    with service.store.transaction() as connection:
        connection.execute(sqlalchemy.text("UPDATE loraplex_version SET version_num = '9999'"))
    newer = open_service(tmp_path)
    with pytest.raises(StoreUnavailableError) as refused:
        await make_key(newer)
    assert refused.value.reason == (
        "its tables are of another release: Can't locate revision identified by '9999'"
    )


async def test_another_manager_on_the_database_follows_and_a_new_one_knows_all(
    tmp_path: Path,
) -> None:
    first, second = open_service(tmp_path), open_service(tmp_path)
    _, text = await make_key(first)
    await make_key(second)  # which reads the key of the first
    assert (await table_of(second)).find(text, NOW_S)
    # A table of the first manager's gets all of the second's.
    table = await table_of(first)
    delta = await second.delta(table.revision, 5)
    assert delta is not None
    assert delta.is_whole
    table.apply(delta)
    assert len(table) == 2


async def test_an_unknown_key_and_an_alias_in_use_are_refused(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    key_id, _ = await make_key(service, alias="ci")
    with pytest.raises(ConflictError, match="'ci'"):
        await make_key(service, alias="ci")
    with pytest.raises(ApiError, match="looks like the id"):
        await make_key(service, alias=new_id())
    with pytest.raises(ApiError, match="No key has the id or alias 'nobody'"):
        await service.revoke("admin-token", ["nobody"])
    await service.revoke("admin-token", [key_id])
    with pytest.raises(ApiError):
        await order(service, "rotate", key_id)
    await make_key(service, alias="ci")  # free again
    assert [one["action"] for one in await service.acts(10, None)] == [
        "key.generate",
        "key.revoke",
        "key.generate",
    ]


async def test_several_keys_are_revoked_all_or_none(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    made = [await make_key(service, alias=f"k{number}") for number in range(3)]
    table = await table_of(service)
    with pytest.raises(ApiError, match="'nobody'"):
        await service.revoke("admin-token", ["k0", made[1][0], "nobody"])
    assert len(await service.lines()) == 3
    ids = [key_id for key_id, _ in made]
    # An id and its alias are one key.
    assert await service.revoke("admin-token", ["k0", ids[0], ids[1]]) == ids[:2]
    assert await service.revoke("admin-token", []) == []
    delta = await service.delta(table.revision, 5)
    assert delta is not None
    assert set(delta.removed) == set(ids[:2])
    assert [line.token_id for line in await service.lines()] == ids[2:]
    acts = await service.acts(2, None)
    assert [one["action"] for one in acts] == ["key.revoke"] * 2
    assert {one["subject"] for one in acts} == set(ids[:2])


async def test_the_audit_log_holds_no_secret(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    key_id, text = await make_key(service, metadata={"owner": "ci"})
    other = await order(service, "rotate", key_id)
    acts = repr(await service.acts(10, None))
    assert "ci" in acts
    assert text[15:] not in acts
    assert other[15:] not in acts


async def test_a_database_that_is_away_leaves_the_known_keys(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    _, text = await make_key(service)
    (tmp_path / "loraplex.db").rename(tmp_path / "away")
    for rest in tmp_path.glob("loraplex.db-*"):
        rest.unlink()
    (tmp_path / "loraplex.db").mkdir()
    service.store.close()
    with pytest.raises(ServiceUnavailableError, match="database of the keys"):
        await make_key(service)
    assert (await table_of(service)).find(text, NOW_S)
    # A manager that starts now knows nothing yet, and says so instead of refusing every key.
    with pytest.raises(ServiceUnavailableError, match="not been read"):
        await open_service(tmp_path).lines()
    assert await open_service(tmp_path).delta("", 0.01) is None


def entries(number: int) -> tuple[KeyEntry, ...]:
    return tuple(
        KeyEntry(f"{n:010d}", KeyPolicy(f"tenant {n}", ("base:*",)), n.to_bytes(32, "big"))
        for n in range(number)
    )


def test_ten_thousand_keys_take_less_than_ten_megabytes() -> None:
    tracemalloc.start()
    try:
        table = KeyTable()
        table.apply(KeyDelta("e-1", entries(10_000), (), True, b"pepper"))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 10_000
    assert used < 10 * 10**6


def test_unknown_keys_leave_nothing_behind() -> None:
    table = KeyTable()
    table.apply(KeyDelta("e-1", entries(10), (), True, b"pepper"))
    texts = [new_key(new_id()) for _ in range(2000)]
    for text in texts[:100]:
        refusal(table, text)
    # Other threads of the tests allocate, too, but not in this folder.
    own = tracemalloc.Filter(True, str(Path(table_module.__file__).parent / "*"))

    def traced_bytes() -> int:
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces([own]).traces
        return sum(trace.size for trace in traces)

    tracemalloc.start()
    try:
        before = traced_bytes()
        num_refused = 0
        for text in texts:
            try:
                table.find(text, NOW_S)
            except RefusedKeyError:
                num_refused += 1
        after = traced_bytes()
    finally:
        tracemalloc.stop()
    assert num_refused == len(texts)
    assert after - before < 50 * len(texts)  # an entry of a table has 200 bytes at least
