"""The manager's writes into a real registry: an adapter from a folder, hidden again by unload."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from registry.client import Registry
from registry.entities import AdapterVersion
from registry.errors import NotFoundError, RegistrationError, RegistryUnavailableError
from serve_app.cli.registration import register_base
from serve_app.control import cached_registry
from serve_app.control.adapter_admin import AdapterAdmin
from serve_app.control.cached_registry import CachedRegistry
from serve_app.messages import AdapterChange
from tests.registry_helpers import embedded_uri
from tests.serve_folders import make_adapter_folder, make_base_folder


async def test_an_adapter_from_a_folder_is_checked_registered_hidden_and_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("LORAPLEX_HOME", str(home))
    # The commands use the URI that the configuration file names, not this one.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/another/mlflow.db")
    uri = embedded_uri(home)
    register_base(Registry(uri), make_base_folder(tmp_path / "base"), "tiny")
    reader = CachedRegistry(uri, home / "cache")
    admin = AdapterAdmin(lambda: reader, reader.snapshot)
    bad = make_adapter_folder(tmp_path / "bad", hidden_size=16)
    with pytest.raises(RegistrationError, match=r"adapter 'x' .* is refused: .*the base has 32"):
        await admin.change(AdapterChange("load", "x", str(bad), "tiny@1"))
    assert reader.snapshot().setting("x", "runtime") is None

    folder = make_adapter_folder(tmp_path / "adapter")
    loaded = await admin.change(AdapterChange("load", "x", str(folder), "tiny@1"))
    assert loaded is not None
    assert (loaded.version, loaded.aliases) == (1, ("champion",))
    assert loaded.digest not in reader.local_digests()
    reader.release(reader.fetch(loaded))
    assert loaded.digest in reader.local_digests()

    assert await admin.change(AdapterChange("unload", "x")) is None
    assert not reader.snapshot().adapters
    with pytest.raises(NotFoundError):
        await admin.change(AdapterChange("pin", "x"))
    reader.set_setting("x", "runtime", "loaded")
    assert reader.snapshot().adapters == (loaded,)


def test_a_command_gets_the_registrys_password_and_no_secret_of_the_server_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is a real process that records its arguments and environment."""
    for name in ("LORAPLEX_ADMIN_TOKEN", "LORAPLEX_WEBHOOK_SECRET"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////another.db")
    written = tmp_path / "written.json"
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        f"json.dump([sys.argv, dict(os.environ)], open({str(written)!r}, 'w'))\n"
        "print('{}')\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    uri = "postgresql://mlflow:hunter2@127.0.0.1:1/mlflow"
    root = tmp_path / "files"
    unused = SimpleNamespace(set_alias=None, set_setting=None, ensure_webhook=None)
    monkeypatch.setattr(cached_registry, "Registry", lambda *_, **__: unused)
    reader = CachedRegistry(uri, tmp_path / "cache", None, root, ("s3",))
    reader.check_adapter(AdapterVersion("x", 1, "d" * 64, "tiny", "b" * 64, 8, (), ""))
    arguments, environment = json.loads(written.read_text())
    assert arguments[1:4] == ["-m", "serve_app", "check"]
    assert "hunter2" not in " ".join(arguments)
    assert environment["MLFLOW_TRACKING_URI"] == uri
    assert environment["LORAPLEX_ARTIFACT_ROOT"] == str(root)
    assert environment["LORAPLEX_ARTIFACT_SCHEMES"] == "s3"
    assert "a secret" not in environment.values()
    reader.register_adapter(make_adapter_folder(tmp_path / "folder"), "x", "tiny@1", "prod")
    arguments, environment = json.loads(written.read_text())
    assert "--alias=prod" in arguments
    assert environment["LORAPLEX_ARTIFACT_ROOT"] == str(root)


def test_a_command_that_takes_too_long_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(cached_registry, "_COMMAND_TIMEOUT_S", 0.2)
    reader = CachedRegistry(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "cache")
    folder = make_adapter_folder(tmp_path / "folder")
    with pytest.raises(RegistryUnavailableError, match=r"register adapter did not end within 0.2"):
        reader.register_adapter(folder, "x", "tiny@1", "champion")


@pytest.mark.parametrize("content", [b"", None])
def test_a_folder_without_weights_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such program"))
    folder = make_adapter_folder(tmp_path / "folder")
    weights = folder / "adapter_model.safetensors"
    weights.unlink()
    words = f"{folder} has no adapter_model.safetensors: save the adapter as safetensors"
    if content is not None:
        weights.write_bytes(content)
        words = f"{weights} is empty: save the adapter again"
    reader = CachedRegistry(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "cache")
    with pytest.raises(RegistrationError, match=re.escape(words)):
        reader.register_adapter(folder, "x", "tiny@1", "champion")
