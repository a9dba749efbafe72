"""Registration while the registry's responses get lost: a failure leaves the registry unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry import publish
from registry.cache import Cache
from registry.errors import RegistrationError, RegistryError, RegistryUnavailableError
from registry.store import MlflowStore
from tests.registry_helpers import embedded, register_adapter, register_base

LOST = RegistryUnavailableError("the answer was lost")


def losing(method: Callable[..., Any]) -> Callable[..., Any]:
    """The call takes effect, and its response is lost."""

    def call(*arguments: Any) -> Any:
        method(*arguments)
        raise LOST

    return call


def test_a_version_whose_answer_was_lost_is_removed_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the name would resolve to a listed version without files."""
    registry = embedded(tmp_path)
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path, content=b"one", alias=None)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, "create_version", losing(MlflowStore.create_version))
        with pytest.raises(RegistryError, match="lost"):
            register_adapter(registry, tmp_path, content=b"two", alias=None)
    assert [one.version for one in registry.snapshot().adapters] == [1]
    assert register_adapter(registry, tmp_path, "other", b"three").version == 1


def test_a_version_that_could_not_be_removed_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = embedded(tmp_path)
    register_base(registry, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, "create_version", losing(MlflowStore.create_version))
        patch.setattr(MlflowStore, "delete_version", _raise)
        with pytest.raises(RegistryError, match="lost"):
            register_adapter(registry, tmp_path)
    (left,) = registry.snapshot().adapters
    files = Path(left.source.removeprefix("file://"))
    assert (files / "loraplex.json").is_file()


def repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    """The response is lost, and MLflow's client sends the call again."""

    def call(*arguments: Any) -> Any:
        method(*arguments)
        return method(*arguments)

    return call


def test_a_version_whose_call_was_repeated_is_registered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second version has the same files: removing it must remove neither the first version nor
    the alias, of which the name would fall back to its highest version."""
    registry = embedded(tmp_path)
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path, content=b"one")
    register_adapter(registry, tmp_path, content=b"two", alias=None)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, "create_version", repeated(MlflowStore.create_version))
        new = register_adapter(registry, tmp_path, content=b"three")
    assert (new.version, new.aliases) == (3, ("champion",))
    catalog = registry.snapshot()
    assert [one.version for one in catalog.adapters] == [1, 2, 3]
    assert catalog.resolve("pirate").adapter == new
    registry.fetch(new, Cache(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("where", "step"), [(MlflowStore, "create_version"), (publish, "_only_made")]
)
def test_a_version_that_is_deleted_meanwhile_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, step: str
) -> None:
    """Another user may do so; the command line shows errors of the registry, and no others."""
    registry = embedded(tmp_path)
    register_base(registry, tmp_path)
    method = getattr(where, step)

    def deleted_after(store: MlflowStore, name: str, *rest: Any) -> Any:
        answer = method(store, name, *rest)
        store.delete_version(name, 1)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(where, step, deleted_after)
        with pytest.raises(RegistrationError, match="was deleted while it was registered"):
            register_adapter(registry, tmp_path)
    assert registry.snapshot().adapters == ()
    assert register_adapter(registry, tmp_path / "again").version == 1


def _raise(*_: object) -> None:
    raise LOST
