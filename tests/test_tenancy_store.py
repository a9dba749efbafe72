"""The database of the keys: migrations up and down, rows, and a database that is away.

On PostgreSQL too, where Debian's package (apt-get install postgresql) is installed.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from serve_app.errors import ConflictError, to_api_error
from serve_app.tenancy.caller import SCOPES, KeyPolicy
from serve_app.tenancy.keys import PepperError
from serve_app.tenancy.orders import Act
from serve_app.tenancy.store import Store, StoredKey, StoreUnavailableError
from serve_app.tenancy.tables import METADATA
from tests.postgres import Postgres, binaries, running_postgres

FOUND = binaries()
ACT = Act("admin-token", "key.generate", "k", None, {"team_id": "acme"})
POLICY = KeyPolicy(
    "acme", ("base:*", "pirate@3"), frozenset(SCOPES), 600, 10_000, 5, 10**12, 10**13, 512, 0
)
KEY = StoredKey(
    "abcdefghij", POLICY, 1.5, b"\1" * 32, "alias", {"owner": ["é"]}, 2e9, None, b"\2" * 32, 3.25
)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    if FOUND is None:
        pytest.skip("NOT TESTED on PostgreSQL: no /usr/lib/postgresql/*/bin/initdb")
    if importlib.util.find_spec("psycopg2") is None:
        pytest.skip("NOT TESTED on PostgreSQL: its driver psycopg2 is not installed")
    with running_postgres(FOUND) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":  # a busy machine may be at a transaction for seconds
        return f"sqlite:///{tmp_path / 'new folder' / 'loraplex.db'}?timeout=180"
    server: Postgres = request.getfixturevalue("postgres")
    return server.uri


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    store.upgrade()
    yield store
    store.downgrade("base")
    store.close()


def test_migrations_make_the_tables_that_the_code_uses_and_remove_them(url: str) -> None:
    store = Store(url)
    store.upgrade()
    store.upgrade()  # a second start
    engine = create_engine(url)
    found = inspect(engine)
    for table in METADATA.sorted_tables:
        columns = {one["name"]: one["nullable"] for one in found.get_columns(table.name)}
        assert columns == {one.name: one.nullable for one in table.columns}, table.name
    assert not found.has_table("alembic_version")  # MLflow's
    store.downgrade("base")
    assert set(inspect(engine).get_table_names()) == {"loraplex_version"}
    store.upgrade()
    assert store.read_keys() == (0, ())
    store.downgrade("base")
    engine.dispose()
    store.close()


def test_a_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "loraplex.db"
    store = Store(f"sqlite:///{path}")
    store.upgrade()
    assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}
    store.close()


def test_a_key_comes_back_as_it_was_stored(store: Store) -> None:
    assert store.write_keys([(KEY, ACT)], is_new=True) == 1
    bare = StoredKey("bbbbbbbbbb", KeyPolicy("acme"), 2.0, b"\3" * 32)
    assert store.write_keys([(bare, ACT)], is_new=True) == 2
    assert store.read_keys() == (2, (KEY, bare))
    changed = replace(KEY, policy=replace(POLICY, tenant="other"), revoked_s=9.0)
    assert store.write_keys([(changed, ACT)]) == 3
    assert store.read_keys() == (3, (changed, bare))
    assert store.key_revision() == 3


def test_an_alias_belongs_to_one_key_and_a_refused_change_leaves_nothing(store: Store) -> None:
    store.write_keys([(KEY, ACT)], is_new=True)
    with pytest.raises(ConflictError, match="alias"):
        store.write_keys(
            [(replace(KEY, id="bbbbbbbbbb", policy=KeyPolicy("new")), ACT)], is_new=True
        )
    assert store.read_keys() == (1, (KEY,))
    assert len(store.acts(10)) == 1


def test_acts_come_back_latest_first_and_page_by_page(store: Store) -> None:
    for number in range(5):
        store.note(replace(ACT, subject=f"k{number}"))
    first = store.acts(2)
    assert [one["subject"] for one in first] == ["k4", "k3"]
    assert first[0]["after"] == {"team_id": "acme"}
    assert first[0]["before"] is None
    assert [one["subject"] for one in store.acts(9, first[-1]["id"])] == ["k2", "k1", "k0"]


def test_keys_of_another_pepper_are_refused(store: Store) -> None:
    store.check_pepper(b"1" * 32)
    store.check_pepper(b"1" * 32)
    with pytest.raises(PepperError, match="LORAPLEX_KEY_PEPPER"):
        store.check_pepper(b"2" * 32)


def test_a_database_that_goes_and_comes_back(postgres: Postgres) -> None:
    store = Store(postgres.uri.replace("loraplex@", "loraplex:pass-word@"))
    store.upgrade()
    store.write_keys([(KEY, ACT)], is_new=True)
    postgres.stop()
    try:
        with pytest.raises(StoreUnavailableError) as away:
            store.read_keys()
        assert "pass-word" not in str(away.value) + away.value.reason
        answer = to_api_error(pickle.loads(pickle.dumps(away.value)))
        assert (answer.status, answer.retry_after_s) == (503, 5)
    finally:
        postgres.start()
    assert store.read_keys() == (1, (KEY,))
    store.downgrade("base")
    store.close()


@pytest.mark.parametrize("url", ["mysql://host/db", "no url", "postgresql+nodriver://host/db"])
def test_a_url_of_no_usable_database_is_refused_with_its_key(url: str) -> None:
    with pytest.raises(ValueError, match=r"tenancy\.database_url|not supported"):
        Store(url)


def test_a_change_of_several_keys_that_fails_leaves_all_as_they_were(store: Store) -> None:
    bare = StoredKey("bbbbbbbbbb", KeyPolicy("acme"), 2.0, b"\3" * 32)
    store.write_keys([(KEY, ACT)], is_new=True)
    store.write_keys([(bare, ACT)], is_new=True)
    with pytest.raises(ConflictError, match="alias"):  # the second takes the alias of the first
        store.write_keys(
            [(replace(KEY, revoked_s=9.0), ACT), (replace(bare, alias=KEY.alias), ACT)]
        )
    assert store.read_keys() == (2, (KEY, bare))
    assert len(store.acts(10)) == 2


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre"])
def test_sqlite_on_a_network_disk_is_refused(tmp_path: Path, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:21 / / rw,relatime - ext4 /dev/vda rw\n"
        f"30 22 0:44 / {tmp_path}/net\\040disk rw shared:7 - {kind} server:/home rw\n"
        f"31 30 0:45 / {tmp_path}/net\\040disk/local rw - tmpfs tmpfs rw\n"
    )
    for name in ("net disk/loraplex.db", "net disk/a/../b/loraplex.db", "net disk/local2/x.db"):
        for url in (f"sqlite:///{tmp_path}/{name}", f"sqlite:///file:{tmp_path}/{name}?uri=true"):
            with pytest.raises(ValueError, match=rf"network disk \({kind} at .*net disk\)"):
                Store(url, mounts)
    assert not (tmp_path / "net disk").exists()
    for name in ("net disk/local/loraplex.db", "elsewhere.db"):
        Store(f"sqlite:///{tmp_path}/{name}", mounts).close()
    Store("sqlite://", mounts).close()


def test_a_folder_that_cannot_hold_the_database_is_a_database_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "loraplex.db").mkdir()
    with pytest.raises(StoreUnavailableError):
        Store(f"sqlite:///{tmp_path / 'loraplex.db'}").upgrade()
