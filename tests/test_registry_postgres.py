"""The registry on a real PostgreSQL: as a database with files on disk, and behind `mlflow server`.

Skipped, with the reason, where Debian's package (apt-get install postgresql) is missing.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from registry import mlflow_errors
from registry.cache import Cache
from registry.client import Registry
from registry.errors import RegistryError, RegistryUnavailableError
from registry.events import Change, changes
from tests.mlflow_server import running_server
from tests.postgres import Postgres, binaries, running_postgres
from tests.registry_helpers import register_adapter, register_base

FOUND = binaries()

pytestmark = [
    pytest.mark.skipif(
        FOUND is None, reason="NOT TESTED on PostgreSQL: no /usr/lib/postgresql/*/bin/initdb"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("psycopg2") is None,
        reason="NOT TESTED on PostgreSQL: its driver psycopg2 is not installed",
    ),
]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    assert FOUND is not None
    with running_postgres(FOUND) as server:
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def test_a_database_needs_a_place_for_files(postgres: Postgres) -> None:
    secret_uri = postgres.uri.replace("loraplex@", "loraplex:pass-word@")
    with pytest.raises(RegistryError, match="artifact root") as refused:
        Registry(secret_uri)
    assert "pass-word" not in str(refused.value)


def test_registered_in_the_database_comes_back_from_the_disk(
    postgres: Postgres, files: Path, tmp_path: Path
) -> None:
    registry = Registry(postgres.uri, artifact_root=files)
    base = register_base(registry, tmp_path)
    first = register_adapter(registry, tmp_path, content=b"first version")
    second = register_adapter(registry, tmp_path, content=b"second version")
    before = registry.snapshot()
    assert before.resolve("tiny:pirate").base == base
    registry.set_alias("pirate", "champion", 1)
    after = Registry(postgres.uri, artifact_root=files).snapshot()
    assert changes(before, after) == (
        Change("alias_moved", "pirate@champion moved from version 2 to 1"),
    )
    found = after.resolve("pirate").adapter
    assert found is not None
    assert (found.digest, second.version) == (first.digest, 2)
    tree = registry.fetch(found, Cache(tmp_path / "cache"))
    assert b"first version" in (tree / "adapter_model.safetensors").read_bytes()
    assert list(files.rglob("adapter_model.safetensors"))


def test_a_database_that_went_and_came_back_is_read_again(
    postgres: Postgres, files: Path, tmp_path: Path
) -> None:
    registry = Registry(postgres.uri, artifact_root=files)
    known, cache = registry.snapshot(), Cache(tmp_path / "cache")
    base = known.resolve_base("tiny")
    folder = registry.fetch(base, cache)
    postgres.stop()
    try:
        with pytest.raises(RegistryUnavailableError):
            registry.snapshot()
        # Another process that starts now goes on with the files on its disk.
        started = Registry(postgres.uri, artifact_root=files)
        assert started.fetch(base, cache) == folder
        with pytest.raises(RegistryUnavailableError):
            started.snapshot()
    finally:
        postgres.start()
    assert registry.snapshot() == started.snapshot() == known


def test_a_server_on_the_database_tells_the_same(
    postgres: Postgres, files: Path, tmp_path: Path
) -> None:
    direct = Registry(postgres.uri, artifact_root=files)
    with running_server(tmp_path / "server", store_uri=postgres.uri) as server:
        registry = Registry(server.uri)
        assert registry.snapshot() == direct.snapshot()
        adapter = register_adapter(registry, tmp_path, "other", b"through the server")
        found = direct.snapshot().resolve("tiny:other@champion").adapter
        assert found is not None
        assert found.digest == adapter.digest
        tree = registry.fetch(adapter, Cache(tmp_path / "cache"))
        assert b"through the server" in (tree / "adapter_model.safetensors").read_bytes()


def test_a_statement_that_hangs_ends_at_the_servers_limit(postgres: Postgres, files: Path) -> None:
    registry = Registry(postgres.uri, artifact_root=files, timeout_s=2)
    registry.snapshot()
    engine = create_engine(postgres.uri)
    with engine.begin() as locking:
        locking.execute(text("LOCK TABLE registered_models IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(RegistryUnavailableError, match="statement timeout"):
            registry.snapshot()
    engine.dispose()
    registry.snapshot()


def test_a_database_that_takes_a_connection_and_never_answers_is_away_after_the_time_out(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_errors, "_OPEN_TRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        uri = f"postgresql+psycopg2://loraplex:pass-word@127.0.0.1:{black_hole.getsockname()[1]}/x"
        registry = Registry(uri, artifact_root=files, timeout_s=2)
        with pytest.raises(RegistryUnavailableError, match="timeout expired") as refused:
            registry.snapshot()
    assert "pass-word" not in str(refused.value)


def test_time_limits_leave_what_the_user_wrote_and_other_databases_alone() -> None:
    own = "postgresql://user:p%40ss@host:5432/db?connect_timeout=60&options=-c+geqo%3Doff"
    limited = make_url(mlflow_errors.with_time_limits(own, 10))
    assert limited.password == "p@ss"
    assert limited.query["connect_timeout"] == "60"
    assert limited.query["options"] == "-c geqo=off"
    assert limited.query["tcp_user_timeout"] == "20000"
    socket_uri = "postgresql+psycopg:///db?host=/run/postgresql"
    assert (
        make_url(mlflow_errors.with_time_limits(socket_uri, 10)).query["host"] == "/run/postgresql"
    )
    for uri in ("sqlite:////tmp/mlflow.db", "http://host:5000", "mysql://host/db"):
        assert mlflow_errors.with_time_limits(uri, 10) == uri
