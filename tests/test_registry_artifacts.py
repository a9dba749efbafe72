"""Hostile artifact stores: paths, symlinks, numbers and sizes. Real stores, and a real HTTP server
whose responses differ from its listings.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from registry import artifacts, listing
from registry.artifacts import download, list_files, try_link
from registry.cache import Cache
from registry.client import Registry
from registry.entities import FileEntry, manifest_json
from registry.errors import (
    ArtifactError,
    CacheFullError,
    DigestMismatchError,
    NotFoundError,
    QuarantinedError,
    RegistryUnavailableError,
)
from registry.manifest import MAX_ADAPTER_BYTES, MAX_FILES, check_sizes, parse_manifest
from registry.quarantine import Quarantine
from serve_app.control.cached_registry import CachedRegistry
from tests.registry_helpers import (
    adapter_folder,
    embedded,
    embedded_uri,
    register_adapter,
    register_base,
)

SHA = "0" * 64
SECRET = "root:x:0:0"


@pytest.fixture
def store(tmp_path: Path) -> LocalArtifactRepository:
    """A version's folder, with a secret next to it."""
    (tmp_path / "secret.json").write_text(SECRET)
    folder = tmp_path / "version"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "good.json").write_text("{}")
    return LocalArtifactRepository(folder.as_uri())


def fetched(repository: ArtifactRepository, path: str, folder: Path, max_bytes: int = 100) -> str:
    target = folder / "target"
    try:
        download(repository, path, target, max_bytes=max_bytes)
        return target.read_text()
    finally:
        target.unlink(missing_ok=True)
        assert not list(folder.glob("target*"))


def test_a_file_below_the_version_comes(store: LocalArtifactRepository, tmp_path: Path) -> None:
    assert fetched(store, "data/good.json", tmp_path) == "{}"
    assert list_files(store, "data") == {"data/good.json": 2}


PATHS = [
    "../secret.json",
    "data/../../secret.json",
    "/etc/hostname",
    "./data/good.json",
    "data//good.json",
    "data/good.json/",
    "data\\good.json",
    "data/good.json\0",
    "data/\n.json",
    "data/\ud800.json",
    "x" * 201,
    "a/" * 300 + "b",
    "",
]


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_path_that_is_not_plain_is_refused(
    store: LocalArtifactRepository, tmp_path: Path, path: str
) -> None:
    with pytest.raises(ArtifactError, match="illegal path"):
        fetched(store, path, tmp_path)
    with pytest.raises(ArtifactError, match="illegal path"):
        try_link(store, path, tmp_path / "target")
    with pytest.raises(DigestMismatchError, match="illegal path"):
        parse_manifest(json.dumps([[path, 1, SHA]]))


def test_symlink_is_never_followed(store: LocalArtifactRepository, tmp_path: Path) -> None:
    data = tmp_path / "version" / "data"
    (data / "file.json").symlink_to(tmp_path / "secret.json")
    (data / "inside.json").symlink_to("good.json")
    (tmp_path / "version" / "folder").symlink_to(tmp_path)
    for path in ("data/file.json", "data/inside.json", "folder/secret.json"):
        with pytest.raises(ArtifactError, match=f"{path} is a symlink"):
            fetched(store, path, tmp_path)
        with pytest.raises(ArtifactError, match=f"{path} is a symlink"):
            try_link(store, path, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_pipe_folder_and_socket_are_no_files(
    store: LocalArtifactRepository, tmp_path: Path
) -> None:
    """Opening a pipe would block."""
    os.mkfifo(tmp_path / "version" / "data" / "pipe.json")
    for path in ("data/pipe.json", "data", "data/good.json/more"):
        with pytest.raises(ArtifactError, match="not a regular file"):
            fetched(store, path, tmp_path)


def test_missing_file_is_the_versions_fault_missing_store_is_not(
    store: LocalArtifactRepository, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=r"data/none\.json is missing"):
        fetched(store, "data/none.json", tmp_path)
    gone = LocalArtifactRepository((tmp_path / "unmounted").as_uri())
    with pytest.raises(RegistryUnavailableError):
        fetched(gone, "data/good.json", tmp_path)


def test_too_large_a_file_is_named_with_its_size(
    store: LocalArtifactRepository, tmp_path: Path
) -> None:
    os.truncate(tmp_path / "version" / "data" / "good.json", 10 * 1024**4)  # sparse
    with pytest.raises(ArtifactError, match=r"data/good\.json has 10995116277760 bytes, at most 9"):
        fetched(store, "data/good.json", tmp_path, max_bytes=9)


class Liar(BaseHTTPRequestHandler):
    """Serves a response that its path names, whatever was listed."""

    sent = 0

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.send_response(404 if name == "missing" else 500 if name == "broken" else 200)
        if name == "short":
            self.send_header("Content-Length", "50")
        self.end_headers()
        if name == "short":
            self.wfile.write(b"x" * 20)
        elif name == "endless":
            self._send_for_ever()
        elif name == "dripping":
            self._drip()
        else:
            self.wfile.write(b"a%20b" if name == "a%20b" else b"fine")

    def _send_for_ever(self) -> None:
        try:
            while Liar.sent < 2 * 1024**3:
                Liar.sent += self.wfile.write(b"x" * 65536)
        except OSError:
            pass

    def _drip(self) -> None:
        with suppress(OSError):
            for _ in range(3000):
                self.wfile.write(b"x")
                time.sleep(0.01)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def liar() -> Iterator[HttpArtifactRepository]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        uri = f"http://127.0.0.1:{server.server_port}/artifacts"
        yield HttpArtifactRepository(uri)  # type: ignore[no-untyped-call]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_server_that_sends_for_ever_is_cut_off(tmp_path: Path) -> None:
    Registry(embedded_uri(tmp_path / "home"), timeout_s=5, max_retries=0)  # MLflow's settings
    with liar() as repository:
        assert fetched(repository, "good", tmp_path) == "fine"
        assert fetched(repository, "a b", tmp_path) == "a%20b"
        with pytest.raises(ArtifactError, match="endless sends more than the 1000000 bytes"):
            fetched(repository, "endless", tmp_path, max_bytes=1_000_000)
        with pytest.raises(ArtifactError, match="missing is missing"):
            fetched(repository, "missing", tmp_path)
        for path in ("short", "broken"):
            with pytest.raises(RegistryUnavailableError):
                fetched(repository, path, tmp_path)
    assert Liar.sent < 100_000_000


def test_server_that_drips_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It exceeds no time-out, and four such files would keep an engine from all its downloads."""
    Registry(embedded_uri(tmp_path / "home"), timeout_s=5, max_retries=0)  # MLflow's settings
    monkeypatch.setattr(artifacts, "_PATIENCE_S", 0.2)
    words = "dripping was not sent within"
    with liar() as repository, pytest.raises(RegistryUnavailableError, match=words):
        fetched(repository, "dripping", tmp_path, max_bytes=5000)


MANIFESTS = {
    "no JSON": "[",
    "too deep": "[" * 100_000,
    "no rows": "7",
    "not three": '[["a"]]',
    "infinite": f'[["a", Infinity, "{SHA}"]]',
    "negative": f'[["a", -1, "{SHA}"]]',
    "bad hash": '[["a", 1, "../../../etc/passwd"]]',
    "twice": f'[["a", 1, "{SHA}"], ["a", 1, "{SHA}"]]',
    "file and folder": f'[["a", 1, "{SHA}"], ["a/b", 1, "{SHA}"]]',
    "too many": json.dumps([[f"f{i}", 1, SHA] for i in range(MAX_FILES + 1)]),
}


@pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS)
def test_hostile_manifest_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="manifest"):
        parse_manifest(text)


def test_sizes_are_judged_before_anything_is_fetched() -> None:
    weights = FileEntry("model.safetensors", MAX_ADAPTER_BYTES, SHA)
    check_sizes((weights,), MAX_ADAPTER_BYTES, "it")
    tokenizer = FileEntry("tokenizer.json", 10**10, SHA)
    with pytest.raises(ArtifactError, match=r"it: tokenizer\.json has 10000000000 bytes"):
        check_sizes((weights, tokenizer), MAX_ADAPTER_BYTES, "it")
    config = FileEntry("config.json", 1, SHA)
    with pytest.raises(ArtifactError, match="bytes in all"):
        check_sizes((weights, config), MAX_ADAPTER_BYTES, "it")


def weights_in(home: Path) -> Path:
    return next((home / "artifacts").rglob("adapter_model.safetensors"))


def test_root_of_a_version_cannot_lead_out_of_it(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    adapter = register_adapter(registry, tmp_path)
    registry._store.tag_version("pirate", 1, listing.ROOT, "../../..")
    with pytest.raises(ArtifactError, match="illegal path"):
        registry.fetch(adapter, Cache(tmp_path / "cache"))


def test_manifest_that_wants_everything_costs_nothing(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    adapter = register_adapter(registry, tmp_path)
    huge = manifest_json((FileEntry("adapter_model.safetensors", 10**15, SHA),))
    registry._store.tag_version("pirate", 1, listing.MANIFEST, huge)
    with pytest.raises(ArtifactError, match=r"'pirate' version 1: adapter_model\.safetensors has"):
        registry.fetch(adapter, Cache(tmp_path / "cache"))


def test_weights_behind_a_symlink_are_refused_even_if_they_are_right(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    adapter = register_adapter(registry, tmp_path)
    weights = weights_in(tmp_path / "home")
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="is a symlink"):
        registry.fetch(adapter, Cache(tmp_path / "cache"))


def test_bad_version_is_quarantined_and_the_next_version_is_not(tmp_path: Path) -> None:
    """A version repaired in the store stays in quarantine, and is not downloaded meanwhile."""
    uri = embedded_uri(tmp_path / "home")
    registry = Registry(uri)
    register_base(registry, tmp_path)
    first = register_adapter(registry, tmp_path, content=b"first")
    weights = weights_in(tmp_path / "home")
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + b"!")
    serving = CachedRegistry(uri, tmp_path / "cache")
    with pytest.raises(DigestMismatchError):
        serving.fetch(first)
    weights.write_bytes(good)
    with pytest.raises(QuarantinedError, match=r"adapter_model\.safetensors: got"):
        serving.fetch(first)
    with pytest.raises(QuarantinedError):
        CachedRegistry(uri, tmp_path / "cache").fetch(first)
    assert serving.cache_stats().num_quarantined == 1
    second = register_adapter(registry, tmp_path, content=b"second")
    assert serving.snapshot().resolve("pirate").adapter == second
    assert serving.fetch(second).name == second.digest


def test_a_version_that_was_made_again_condemns_no_files(tmp_path: Path) -> None:
    """An ingress with an older view asks for the former files, which may come back."""
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    first = register_adapter(registry, tmp_path, content=b"first")
    registry._store.delete_model("pirate")
    register_adapter(registry, tmp_path, content=b"second")
    cache = Cache(tmp_path / "cache", quarantine=Quarantine())
    with pytest.raises(NotFoundError, match="created again with other files"):
        registry.fetch(first, cache)
    registry._store.delete_model("pirate")
    again = register_adapter(registry, tmp_path / "again", content=b"first")
    assert again.digest == first.digest
    registry.fetch(again, cache)


def test_limit_of_the_config_reaches_the_cache(tmp_path: Path) -> None:
    uri = embedded_uri(tmp_path / "home")
    registry = Registry(uri)
    register_base(registry, tmp_path)
    adapter = register_adapter(registry, tmp_path, content=b"x" * 5000)
    with pytest.raises(CacheFullError, match=r"registry\.cache_bytes"):
        CachedRegistry(uri, tmp_path / "cache", 4096).fetch(adapter)
    opened = CachedRegistry(uri, tmp_path / "cache", 8192)
    assert opened.fetch(adapter).is_dir()
    assert opened.verify(adapter)


PLAIN = {
    "yaml": ("MLmodel", "{[}: !!python/object:os.system\n"),
    "shape": ("MLmodel", "- just\n- a list\n"),
    "flavour": ("MLmodel", "flavors:\n  transformers: [peft_adaptor]\n"),
    "root": ("MLmodel", "flavors:\n  transformers: {peft_adaptor: ../../../..}\n"),
    "deep": ("adapter_config.json", "[" * 200_000),
}


def test_hostile_plain_versions_hide_no_other(tmp_path: Path) -> None:
    """A snapshot reads all versions, so no version may make it fail."""
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    good = register_adapter(registry, tmp_path)
    client = registry._store._client
    for kind, (name, text) in PLAIN.items():
        folder = adapter_folder(tmp_path / kind, base="tiny")
        if name == "MLmodel":
            (folder / "adapter_config.json").unlink()
        (folder / name).write_text(text)
        client.create_registered_model(kind)
        client.create_model_version(kind, folder.as_uri(), tags={listing.KIND: "adapter"})
    links = adapter_folder(tmp_path / "links", base="tiny")
    (links / "tokenizer.json").symlink_to("/etc/passwd")
    client.create_registered_model("links")
    client.create_model_version("links", links.as_uri())
    catalog = registry.snapshot()
    assert catalog.adapters == (good,)
    rejected = {one.name: one.reason for one in catalog.rejected}
    assert set(rejected) == {*PLAIN, "links"}
    assert "tokenizer.json is a symlink" in rejected["links"]


def test_numbers_in_tags_may_be_anything(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path)
    for value in ("9" * 5000, "\u0663", "-1", "1e9", "NaN"):
        registry._store.tag_version("pirate", 1, listing.RANK, value)
        registry._store.tag_version("tiny", 1, listing.MAX_LEN, value)
        catalog = registry.snapshot()
        assert catalog.adapters[0].rank == 0
        assert catalog.bases[0].max_model_len is None
