"""The registry against a real `mlflow server`: the same calls, over HTTP, and its absence."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.cache import TEXT_FILES, Cache
from registry.client import Registry
from registry.errors import DigestMismatchError, RegistrationError, RegistryUnavailableError
from tests.mlflow_server import MlflowServer, running_server
from tests.registry_helpers import adapter_folder, register_adapter, register_base


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


def test_registered_over_http_resolves_and_comes_back(server: MlflowServer, tmp_path: Path) -> None:
    registry = Registry(server.uri)
    base = register_base(registry, tmp_path, name="b.1")
    adapter = register_adapter(registry, tmp_path, base="b.1", content=b"x" * 1_000_000)
    assert (
        register_adapter(registry, tmp_path / "2", base="b.1", content=b"x" * 1_000_000) == adapter
    )
    found = Registry(server.uri).snapshot().resolve("b.1:pirate@champion")
    assert (found.base, found.adapter) == (base, adapter)
    cache = Cache(tmp_path / "cache")
    tree = registry.fetch(adapter, cache)
    assert (tree / "adapter_model.safetensors").stat().st_size > 1_000_000
    assert not (registry.fetch(base, cache, TEXT_FILES) / "model.safetensors").exists()


def test_the_documented_registration_with_plain_mlflow_is_found(
    server: MlflowServer, tmp_path: Path
) -> None:
    page = Path(__file__).parent.parent / "docs" / "registering_and_canaries.md"
    (code,) = re.findall(r"```python\n(import mlflow\n.*?)```", page.read_text(), re.DOTALL)
    register_base(Registry(server.uri), tmp_path, name="my-base")
    adapter_folder(tmp_path / "adapter", base="my-base")
    settings = {**os.environ, "MLFLOW_TRACKING_URI": server.uri}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=settings, check=True)
    found = Registry(server.uri).snapshot().resolve("my-base:my-adapter@champion")
    assert (found.base.name, found.adapter and found.adapter.version) == ("my-base", 1)


def test_tampered_artifact_is_refused(server: MlflowServer, tmp_path: Path) -> None:
    registry = Registry(server.uri)
    register_base(registry, tmp_path, name="tampered-base")
    adapter = register_adapter(registry, tmp_path, "tampered", b"honest bytes", "tampered-base")
    for path in server.artifacts.rglob("adapter_model.safetensors"):
        content = path.read_bytes()
        if b"honest bytes" in content:
            path.write_bytes(content.replace(b"honest", b"forged"))
    cache = Cache(tmp_path / "cache")
    with pytest.raises(DigestMismatchError, match="adapter_model"):
        registry.fetch(adapter, cache)
    assert cache.digests() == frozenset()


def test_refused_registration_leaves_nothing(server: MlflowServer, tmp_path: Path) -> None:
    registry = Registry(server.uri)
    before = registry.snapshot()
    with pytest.raises(RegistrationError):
        register_adapter(registry, tmp_path, name="lost", base="nobody")
    assert registry.snapshot() == before
    assert "lost" not in [model.name for model in registry._store.listing()[0]]


def test_server_that_is_gone_is_unavailable_and_known_files_stay(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    with running_server(tmp_path / "server") as server:
        registry = Registry(server.uri, timeout_s=60, max_retries=0)
        base = register_base(registry, tmp_path)
        adapter = register_adapter(registry, tmp_path)
        known = registry.snapshot()
        tree = registry.fetch(base, cache)
    with pytest.raises(RegistryUnavailableError):
        registry.snapshot()
    with pytest.raises(RegistryUnavailableError):
        registry.fetch(adapter, cache)
    with pytest.raises(RegistryUnavailableError):
        register_base(registry, tmp_path, name="new")
    assert known.resolve("tiny:pirate").adapter == adapter
    assert registry.fetch(base, cache) == tree


def test_server_that_answers_nonsense_is_unavailable(server: MlflowServer) -> None:
    with pytest.raises(RegistryUnavailableError):
        Registry(f"{server.uri}/no-such-path", timeout_s=2, max_retries=0).snapshot()
