"""The file that a URI of SQLite names: what SQLAlchemy and SQLite open, and what is only read."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from registry.client import Registry
from registry.errors import RegistryError
from registry.sqlite_database import missing_file, sqlite_file
from serve_app.config.environment import embedded_uri


@pytest.mark.parametrize(
    ("uri", "file"),
    [
        ("sqlite:////a/b.db", "/a/b.db"),
        ("sqlite:///a/b.db?timeout=3", "a/b.db"),
        ("sqlite:////a/b%20c.db", "/a/b c.db"),
        ("sqlite:///file:/a/b.db?uri=true&mode=ro", "/a/b.db"),
        ("sqlite:///file:b%2520c.db?uri=true", "b c.db"),
    ],
)
def test_the_file_is_the_one_that_sqlite_opens(uri: str, file: str) -> None:
    assert sqlite_file(uri) == Path(file)
    missing = missing_file(uri)
    assert missing is not None
    assert missing == Path(file).resolve()


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file::memory:?uri=true",
        "sqlite:///file:name?mode=memory&uri=true",
    ],
)
def test_a_database_in_memory_misses_no_file(uri: str) -> None:
    assert missing_file(uri) is None


@pytest.mark.parametrize("uri", ["sqlite:", "sqlite:/a/b.db", "sqlite://host/b.db"])
def test_a_wrong_uri_is_refused_and_makes_no_folder(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (missing_file, Registry):
        with pytest.raises(RegistryError, match="is not a URI of SQLite, which is sqlite:///FILE"):
            use(uri)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="names a folder"):
        Registry(f"sqlite:///{tmp_path}")


def test_a_registry_with_a_coded_path_is_found_again(tmp_path: Path) -> None:
    """MLflow opens the file that is made, and the probe of writes too."""
    home = tmp_path / "a b%41?c"
    registry = Registry(f"sqlite:///{quote(str(home))}/mlflow.db")
    assert registry.snapshot().bases == ()
    assert {path.name for path in home.iterdir()} == {"mlflow.db"}
    assert registry._store.marker() is not None


def test_the_home_may_have_any_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "100%41 sure?#@:"
    monkeypatch.setenv("LORAPLEX_HOME", str(home))
    assert sqlite_file(embedded_uri()) == home / "mlflow.db"
