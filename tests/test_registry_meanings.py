"""The resolution of a name whose alias is on an unservable version, and for two bases."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from registry.catalog import Catalog, DefaultAliases
from registry.client import Registry
from registry.entities import AdapterVersion, DanglingAlias
from registry.errors import NotFoundError
from registry.events import Change, changes
from registry.meanings import Meanings
from tests.canary_factory import BASE, OTHER_BASE, adapter
from tests.registry_helpers import adapter_folder, embedded_uri, register_adapter, register_base

BROKEN = DanglingAlias("pirate", "champion", 3, "adapter_config.json is not JSON", is_public=True)


def catalog(*adapters: AdapterVersion, dangling: tuple[DanglingAlias, ...] = ()) -> Catalog:
    return Catalog((BASE, OTHER_BASE), adapters, dangling=dangling)


def meaning(found: Catalog, model: str = "pirate") -> int:
    version = found.resolve(model).adapter
    assert version is not None
    return version.version


def test_the_last_good_meaning_is_served_while_the_alias_is_on_a_broken_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meanings = Meanings()
    good = catalog(adapter(1, "champion"), adapter(2))
    broken = catalog(adapter(1), adapter(2), dangling=(BROKEN,))
    assert meaning(meanings.follow(good)) == 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            held = meanings.follow(broken)
    assert meaning(held) == meaning(held, "base:pirate") == 1
    assert meaning(meanings.hold(broken)) == 1
    assert held.entries()[-1].version == 1
    (warning,) = caplog.messages
    assert "pirate@champion is version 3" in warning
    assert "version 1" in warning
    mended = meanings.follow(catalog(adapter(1), adapter(2), adapter(3, "champion")))
    assert meaning(mended) == 3


def test_without_memory_the_name_is_refused_with_the_alias_and_the_reason() -> None:
    found = Meanings().follow(catalog(adapter(1), adapter(2), dangling=(BROKEN,)))
    for model in ("pirate", "base:pirate"):
        with pytest.raises(NotFoundError, match=r"pirate@champion is version 3.*is not JSON"):
            found.resolve(model)
    assert [entry.name for entry in found.entries()] == ["base", "other"]
    assert meaning(found, "pirate@2") == 2


def test_clients_are_not_given_the_error_of_a_store(caplog: pytest.LogCaptureFixture) -> None:
    failing = DanglingAlias("pirate", "champion", 3, "s3://team-7/adapters: access denied")
    with caplog.at_level(logging.WARNING):
        found = Meanings().follow(catalog(adapter(1), dangling=(failing,)))
    with pytest.raises(NotFoundError) as caught:
        found.resolve("pirate")
    assert str(caught.value) == (
        "pirate@champion is version 3, which cannot be served; the server's log has the reason; "
        "name a version, or move the alias"
    )
    assert "s3://team-7/adapters: access denied" in caplog.text


def test_an_alias_that_is_not_the_default_blocks_nothing() -> None:
    staging = replace(BROKEN, alias="staging")
    found = catalog(adapter(1, "champion"), adapter(2), dangling=(staging,))
    assert meaning(found) == 1


def test_a_version_that_a_check_refuses_gives_the_name_back_to_the_one_before() -> None:
    meanings = Meanings()
    meanings.follow(catalog(adapter(1, "champion"), adapter(2)))
    assert meaning(meanings.follow(catalog(adapter(1), adapter(2, "champion")))) == 2
    refused = replace(adapter(2, "champion"), refused="its rank is 512")
    assert meaning(meanings.follow(catalog(adapter(1), refused))) == 1


def test_a_name_of_two_bases_keeps_its_meaning_and_its_base() -> None:
    first, other = adapter(1, "champion"), adapter(2, base=OTHER_BASE)
    meanings = Meanings()
    assert meaning(meanings.follow(catalog(first, other))) == 1
    held = meanings.follow(catalog(adapter(1), other, dangling=(BROKEN,)))
    assert meaning(held) == meaning(held, "base:pirate") == 1
    assert meaning(held, "other:pirate") == 2
    refused = replace(adapter(3, "champion", base=OTHER_BASE), refused="its rank is 512")
    assert meaning(meanings.follow(catalog(adapter(1), other, refused))) == 1


def test_a_held_meaning_that_is_deleted_is_not_replaced_by_an_older_one() -> None:
    meanings = Meanings()
    meanings.follow(catalog(adapter(1, "champion"), adapter(2)))
    meanings.follow(catalog(adapter(1), adapter(2, "champion")))
    found = meanings.follow(catalog(adapter(1), dangling=(BROKEN,)))
    with pytest.raises(NotFoundError, match="version 3"):
        found.resolve("pirate")


def test_a_name_that_loses_its_alias_means_its_highest_version_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meanings = Meanings()
    meanings.follow(catalog(adapter(1, "champion"), adapter(2)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert meaning(meanings.follow(catalog(adapter(2)))) == 2
    (warning,) = caplog.messages
    assert "pirate@champion is gone, it was version 1" in warning
    assert "2" in warning


def test_a_version_for_a_second_base_takes_no_name_away_from_the_first() -> None:
    aliases = DefaultAliases("champion", (("other", "prod"),))
    first, other = adapter(1, "champion"), adapter(3, base=OTHER_BASE)
    found = replace(catalog(first, adapter(2), other), default_aliases=aliases)
    assert meaning(found) == meaning(found, "base:pirate") == 1
    assert meaning(found, "other:pirate") == 3
    both = replace(other, aliases=("prod",))
    found = replace(catalog(first, adapter(2), both), default_aliases=aliases)
    assert [meaning(found, name) for name in ("pirate", "base:pirate", "other:pirate")] == [3, 1, 3]


def test_mlflows_alias_on_a_version_that_cannot_be_read_is_told_and_held(tmp_path: Path) -> None:
    uri = embedded_uri(tmp_path / "store")
    registry, client = Registry(uri), MlflowClient(uri, uri)
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path, content=b"one")
    register_adapter(registry, tmp_path, content=b"two", alias="experiment")
    meanings, before = Meanings(), registry.snapshot()
    meanings.follow(before)
    bad = adapter_folder(tmp_path / "bad")
    (bad / "adapter_config.json").write_text("{no JSON")
    run = client.create_run("0").info.run_id
    client.log_artifacts(run, str(bad), "adapter")
    third = client.create_model_version("pirate", f"runs:/{run}/adapter").version
    client.set_registered_model_alias("pirate", "champion", third)
    after = registry.snapshot()
    (dangling,) = after.dangling
    assert (dangling.alias, dangling.version) == ("champion", 3)
    assert "is not JSON" in dangling.reason
    moved = Change("alias_moved", "pirate@champion moved from version 1 to 3")
    assert moved in changes(before, after)
    assert meaning(meanings.follow(after)) == 1
    with pytest.raises(NotFoundError, match="pirate@champion is version 3"):
        after.resolve("pirate")
