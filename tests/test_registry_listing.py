"""Listings of MLflow while others write, and the state after a failed write."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.entities.paged_list import PagedList

from registry import adoption, plain_mlflow
from registry.client import Registry
from registry.errors import RegistryUnavailableError
from registry.store import MlflowStore
from tests.registry_helpers import (
    adapter_folder,
    embedded,
    embedded_uri,
    register_adapter,
    register_base,
)


def test_a_registration_whose_last_answer_is_lost_leaves_the_alias_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path, content=b"one")
    register_adapter(registry, tmp_path, content=b"two", alias="experiment")
    real, answers = MlflowStore.set_alias, iter([False])

    def lose(self: MlflowStore, name: str, alias: str, version: int) -> None:
        real(self, name, alias, version)
        if not next(answers, True):
            raise RegistryUnavailableError("read timeout")

    for content in (b"three", b"two"):  # a new version, and a registered version
        answers = iter([False])
        shutil.rmtree(tmp_path / f"adapter-pirate-{content.hex()}", ignore_errors=True)
        with monkeypatch.context() as patch:
            patch.setattr(MlflowStore, "set_alias", lose)
            with pytest.raises(RegistryUnavailableError, match="read timeout"):
                register_adapter(registry, tmp_path, content=content)
        known = {one.version: one.aliases for one in registry.snapshot().adapters}
        assert known == {1: ("champion",), 2: ("experiment",)}
    answers = iter([False] * 2)  # the alias cannot be restored: its version must stay
    monkeypatch.setattr(MlflowStore, "set_alias", lose)
    with pytest.raises(RegistryUnavailableError, match="read timeout"):
        register_adapter(registry, tmp_path, content=b"four")
    assert registry.snapshot().resolve("pirate@champion").adapter is not None


class Shifting:
    """Runs a function when a listing requests its second page."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, search: str) -> None:
        self.change: Callable[[], None] | None = None
        real = getattr(MlflowClient, search)

        def searched(
            client: MlflowClient,
            *conditions: object,
            max_results: int,
            page_token: str | None,
        ) -> PagedList[object]:
            if page_token is not None and self.change is not None:
                change, self.change = self.change, None
                change()
            page: PagedList[object] = real(
                client, *conditions, max_results=2, page_token=page_token
            )
            return page

        monkeypatch.setattr(MlflowClient, search, searched)


@pytest.mark.parametrize("search", ["search_registered_models", "search_model_versions"])
def test_a_model_deleted_between_two_pages_of_a_listing_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    uri = embedded_uri(tmp_path / "home")
    registry, client = Registry(uri), MlflowClient(uri, uri)
    register_base(registry, tmp_path)
    names = [f"a{number}" for number in range(4)]
    for name in names:
        register_adapter(registry, tmp_path, name, name.encode())
    assert len(registry.snapshot().adapters) == 4
    shifting = Shifting(monkeypatch, search)
    # A registry without, and a registry with an earlier listing.
    for read in (Registry(uri), registry):
        # MLflow lists the newest versions first.
        doomed = names.pop(0 if search == "search_registered_models" else -1)
        shifting.change = partial(client.delete_registered_model, doomed)
        found = read.snapshot()
        assert shifting.change is None
        assert set(names) <= {one.name for one in found.adapters}
        assert [one.name for one in found.bases] == ["tiny"]
        assert [one.name for one in read.snapshot().adapters] == names


def test_an_endpoint_that_answers_everything_with_an_empty_object_is_no_empty_registry() -> None:
    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with pytest.raises(RegistryUnavailableError, match="it is not an MLflow server"):
            Registry(f"http://127.0.0.1:{server.server_port}").snapshot()
    finally:
        server.shutdown()
        server.server_close()


def log_files(client: MlflowClient, folder: Path) -> str:
    """Returns the run that has the files."""
    run: str = client.create_run("0").info.run_id
    client.log_artifacts(run, str(folder), "adapter")
    return run


@pytest.mark.parametrize("late", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_version_whose_files_come_late_is_served_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    uri = embedded_uri(tmp_path / "home")
    registry, client = Registry(uri), MlflowClient(uri, uri)
    register_base(registry, tmp_path)
    folder = adapter_folder(tmp_path / "a", base="tiny")
    (folder / late).rename(tmp_path / late)
    run = log_files(client, folder)
    client.create_registered_model("late")
    tags = {"loraplex.kind": "adapter"}
    client.create_model_version("late", f"runs:/{run}/adapter", tags=tags)
    reads: list[ArtifactRepository] = []
    real = plain_mlflow.inspect

    def counted(repository: ArtifactRepository, scratch: Path) -> plain_mlflow.PlainAdapter | None:
        reads.append(repository)
        return real(repository, scratch)

    monkeypatch.setattr(plain_mlflow, "inspect", counted)
    monkeypatch.setattr(registry._adoption, "_now_s", lambda: 0.0)
    for _ in range(3):
        (rejected,) = registry.snapshot().rejected
        assert rejected.name == "late"
    assert len(reads) == 1  # and not once per look
    client.log_artifact(run, str(tmp_path / late), "adapter")
    later = adoption.LATE_FILES_S + 1
    monkeypatch.setattr(registry._adoption, "_now_s", lambda: later)
    registry.snapshot()
    found = registry.snapshot()
    assert (len(reads), found.rejected) == (2, ())
    assert [one.name for one in found.adapters] == ["late"]


def test_tags_of_a_version_are_not_written_to_another_one_under_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = embedded_uri(tmp_path / "home")
    registry, client = Registry(uri), MlflowClient(uri, uri)
    register_base(registry, tmp_path)
    runs = [
        log_files(client, adapter_folder(tmp_path / words, words.encode(), base="tiny"))
        for words in ("old", "new")
    ]

    def register(run: str) -> None:
        client.create_registered_model("pirate")
        client.create_model_version("pirate", f"runs:/{run}/adapter")

    register(runs[0])
    real = Registry._write_tags

    def write_late(self: Registry, *given: object) -> None:
        client.delete_registered_model("pirate")
        register(runs[1])
        real(self, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_write_tags", write_late)
        registry.snapshot()
    assert registry._store.version("pirate", 1).tags == {}
    (served,) = Registry(uri).snapshot().adapters
    (alike,) = registry.snapshot().adapters
    assert served.digest == alike.digest


def test_a_version_registered_under_an_unloaded_name_is_seen(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path, content=b"one")
    registry.set_setting("pirate", "runtime", "unloaded")
    assert registry.snapshot().adapters == ()
    added = register_adapter(registry, tmp_path, content=b"two")
    assert registry.snapshot().resolve("pirate").adapter == added
