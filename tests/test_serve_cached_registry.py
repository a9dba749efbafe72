"""The manager's writes into a real registry: an adapter from a folder, and what hides it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry.client import Registry
from registry.errors import NotFoundError, RegistrationError
from serve_app.adapter_admin import AdapterAdmin, AdapterChange
from serve_app.cached_registry import CachedRegistry
from serve_app.register import register_base
from tests.registry_helpers import embedded_uri
from tests.serve_folders import make_adapter_folder, make_base_folder


async def test_an_adapter_from_a_folder_is_checked_registered_hidden_and_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("LORAPLEX_HOME", str(home))
    uri = embedded_uri(home)
    register_base(Registry(uri), make_base_folder(tmp_path / "base"), "tiny")
    reader, admin = CachedRegistry(uri, home / "cache"), AdapterAdmin()
    bad = make_adapter_folder(tmp_path / "bad", hidden_size=16)
    with pytest.raises(RegistrationError, match=r"adapter 'x' .* is refused: .*the base has 32"):
        await admin.change(AdapterChange("load", "x", str(bad), "tiny@1"), reader, reader.snapshot)
    assert reader.snapshot().setting("x", "runtime") is None

    folder = make_adapter_folder(tmp_path / "adapter")
    loaded = await admin.change(
        AdapterChange("load", "x", str(folder), "tiny@1"), reader, reader.snapshot
    )
    assert loaded is not None
    assert (loaded.version, loaded.aliases) == (1, ("champion",))
    assert loaded.digest not in reader.local_digests()
    reader.release(reader.fetch(loaded))
    assert loaded.digest in reader.local_digests()

    assert await admin.change(AdapterChange("unload", "x"), reader, reader.snapshot) is None
    assert not reader.snapshot().adapters
    with pytest.raises(NotFoundError):
        await admin.change(AdapterChange("pin", "x"), reader, reader.snapshot)
    reader.set_setting("x", "runtime", "loaded")
    assert reader.snapshot().adapters == (loaded,)
