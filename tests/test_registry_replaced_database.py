"""An SQLite registry whose file is replaced or removed while a server has it open."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from registry.client import Registry
from registry.errors import RegistryUnavailableError
from tests.registry_helpers import embedded, register_adapter, register_base

# Another process: the connections of this one belong to the former file.
MOVE = """
import sys
from registry.client import Registry
Registry(sys.argv[1]).set_alias("pirate", "champion", 1)
"""


def test_a_restored_database_is_followed(tmp_path: Path) -> None:
    """Otherwise a server would read the former file, which nobody can write, until it ends."""
    registry = embedded(tmp_path)
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path, content=b"one")
    register_adapter(registry, tmp_path, content=b"two")
    assert _champion(registry) == 2
    database = tmp_path / "mlflow.db"
    _restore(database, database)
    uri = f"sqlite:///{database}"
    subprocess.run([sys.executable, "-c", MOVE, uri], check=True, cwd=Path(__file__).parents[1])
    assert _champion(registry) == 1
    registry.set_alias("pirate", "champion", 2)
    assert _champion(Registry(uri)) == _champion(registry) == 2


def test_a_lost_database_is_unavailable_until_it_is_back(tmp_path: Path) -> None:
    registry = embedded(tmp_path)
    register_base(registry, tmp_path)
    database, backup = tmp_path / "mlflow.db", tmp_path / "backup.db"
    shutil.copy(database, backup)
    database.unlink()
    with pytest.raises(RegistryUnavailableError, match=r"mlflow\.db is gone"):
        registry.snapshot()
    assert not database.exists()  # an empty one would be taken for a registry without models
    _restore(backup, database)
    assert [base.name for base in registry.snapshot().bases] == ["tiny"]


def test_a_database_that_was_replaced_between_two_registries_is_read(tmp_path: Path) -> None:
    """MLflow keeps the connections of the first for the process."""
    registry = embedded(tmp_path)
    register_base(registry, tmp_path)
    database, backup = tmp_path / "mlflow.db", tmp_path / "backup.db"
    shutil.copy(database, backup)
    register_adapter(registry, tmp_path)
    _restore(backup, database)
    assert Registry(f"sqlite:///{database}").snapshot().adapters == ()


def _champion(registry: Registry) -> int:
    adapter = registry.snapshot().resolve("pirate").adapter
    assert adapter is not None
    return adapter.version


def _restore(backup: Path, database: Path) -> None:
    """Replaces the file by a rename, as a restore does."""
    fresh = database.with_name("restored.db")
    shutil.copy(backup, fresh)
    fresh.rename(database)
