"""The manager's part of canaries, on a registry in a folder: rollbacks and operators' changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.errors import InvalidRequestError
from registry.catalog import Catalog, DefaultAliases
from registry.errors import InvalidNameError, NotFoundError, RegistryUnavailableError
from serve_app.canary import controller as module
from serve_app.canary.commands import CanaryCommand
from serve_app.canary.controller import Canaries
from serve_app.canary.split import read_traffic
from serve_app.canary.status import CanaryStatus
from serve_app.config import CanaryArgs
from serve_app.messages import CanaryChange, IngressReport
from serve_app.platform_view import CanaryState, RegistryReader
from tests.canary_factory import (
    BASE,
    CANARY,
    OTHER_BASE,
    STABLE,
    adapter,
    catalog,
    key,
    report,
    tally,
)
from tests.fakes_registry import FolderRegistry
from tests.waiting import until


@dataclass(slots=True)
class Desk:
    canaries: Canaries
    registry: FolderRegistry
    wakes: list[float]  # the times of the requests to look at the registry
    looked_s: float = 0.0

    def review(self) -> CanaryState:
        """Does as the manager does a few times a second, after a look at the registry."""
        looked_s = asyncio.get_running_loop().time()
        try:
            known = self.registry.snapshot()
        except RegistryUnavailableError:
            known = self.canaries._catalog
        else:
            self.looked_s = looked_s
        return self.review_of(known)

    def review_of(self, known: Catalog) -> CanaryState:
        """Reviews `known`, without a look at the registry since the last `review`."""
        return self.canaries.review(known, {BASE.digest}, self.looked_s)

    def fail(self) -> CanaryState:
        """Reports enough errors for the rule."""
        self.canaries.add_report(report())
        self.review()
        self.canaries.add_report(report(stable=tally(ok=50), canary=tally(ok=20, error=30)))
        return self.review()

    async def written(self) -> None:
        """Waits until the registry has every rollback, and the next look begins later."""
        await until(lambda: not rollback_tasks())
        await asyncio.sleep(0.005)

    async def change(
        self, kind: Literal["start", "promote", "abort"], *arguments: Any
    ) -> CanaryStatus:
        return await self.canaries.change(CanaryChange(kind, "pirate", *arguments))

    def setting(self, key: str) -> str | None:
        return self.registry.snapshot().setting("pirate", key)

    def aliases(self, version: int) -> tuple[str, ...]:
        (found,) = [one for one in self.registry.snapshot().adapters if one.version == version]
        return found.aliases


def rollback_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "write-rollback"]


@pytest.fixture
def desk(tmp_path: Path) -> Callable[[Catalog], Desk]:
    def make(known: Catalog) -> Desk:
        registry = FolderRegistry(tmp_path)
        registry.write(known)
        wakes: list[float] = []
        loop = asyncio.get_running_loop()
        canaries = Canaries(
            CanaryArgs(), lambda: registry, registry.snapshot, lambda: wakes.append(loop.time())
        )
        made = Desk(canaries, registry, wakes)
        made.review()
        return made

    return make


Make = Callable[[Catalog], Desk]


async def test_a_bad_canary_loses_its_requests_at_once_and_its_weight(desk: Make) -> None:
    made = desk(catalog(canary_weight="0.5"))
    state = made.fail()
    ((name, digest, reason),) = state.vetoes
    assert (name, digest) == ("pirate", CANARY.digest)
    assert "30 errors in 50 requests" in reason
    assert state.num_rollbacks == (("pirate", 1),)
    await made.written()
    assert made.setting("canary_weight") == "0"
    record = json.loads(made.setting("canary_rolled_back") or "")
    assert (record["version"], record["reason"]) == (2, reason)
    assert record["time"].startswith("20")
    state = made.review()  # the registry has it now
    assert (state.vetoes, state.num_rollbacks) == ((), (("pirate", 1),))
    (status,) = made.canaries.statuses()
    assert status.verdict == "ended"
    assert status.rolled_back == made.setting("canary_rolled_back")
    assert [(arm.arm, arm.weight, arm.outcomes["error"]) for arm in status.arms] == [
        ("stable", 1.0, 0),
        ("canary", 0.0, 30),
    ]


async def test_a_registry_that_is_down_stops_no_roll_back(
    desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    made = desk(catalog(canary_weight="0.5"))
    content = (made.registry.folder / "catalog.json").read_bytes()
    (made.registry.folder / "catalog.json").unlink()
    assert made.fail().vetoes
    for _ in range(3):
        assert made.review().vetoes
        assert made.review().num_rollbacks == (("pirate", 1),)
    (made.registry.folder / "catalog.json").write_bytes(content)
    await made.written()
    assert made.setting("canary_weight") == "0"
    assert made.review().vetoes == ()


async def test_a_roll_back_holds_until_the_registry_is_read_after_it_was_written(
    desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = desk(catalog(canary_weight="0.5"))
    stale = made.registry.snapshot()
    assert made.fail().vetoes
    await made.written()
    assert len(made.wakes) == 1  # so that the view does not wait for a poll
    later_s = made.canaries._vetoes["pirate", CANARY.digest].written_s or 0.0
    monkeypatch.setattr(module, "_now_s", lambda: later_s + 3600)
    for _ in range(3):
        assert made.review_of(stale).vetoes  # an hour later, the same old catalog
    assert made.review().vetoes == ()
    assert made.review().num_rollbacks == (("pirate", 1),)


async def test_a_roll_back_is_written_while_the_bare_name_means_nothing(desk: Make) -> None:
    """The server's default alias is `production`; a later version of the name was made for a base
    version that is gone, so that without that alias the name cannot be resolved."""
    stable, canary = adapter(1, "production"), adapter(2, "canary")
    orphan = replace(adapter(3), base_digest="x" * 64)
    made = desk(Catalog((BASE,), (stable, canary, orphan)))
    made.registry.set_setting("pirate", "canary_weight", "0.5")
    made.canaries._look = made.registry.snapshot
    named = replace(made.registry.snapshot(), default_aliases=DefaultAliases("production"))
    made.review_of(named)
    made.canaries.add_report(report())
    made.canaries.add_report(
        IngressReport(
            "one",
            arms=(
                (key("stable", stable), tally(ok=100)),
                (key("canary", canary), tally(ok=10, error=90)),
            ),
        )
    )
    assert made.review_of(named).vetoes
    await made.written()
    assert made.setting("canary_weight") == "0"
    assert "90 errors" in (made.setting("canary_rolled_back") or "")


async def test_no_order_promotes_a_version_whose_roll_back_is_not_written_yet(
    desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 3600.0)
    made = desk(catalog(canary_weight="0.5"))
    file = made.registry.folder / "catalog.json"
    content = file.read_bytes()
    file.unlink()
    assert made.fail().vetoes
    await until(lambda: not made.canaries._writing.locked() and made.registry.num_vain_polls > 2)
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match="2 was rolled back \\(30 errors"):
        await made.change("promote")
    assert made.aliases(2) == ("canary",)
    for task in rollback_tasks():
        task.cancel()


async def test_a_promotion_can_name_the_version_that_it_means(desk: Make) -> None:
    made = desk(catalog(canary_weight="0.5"))
    with pytest.raises(InvalidRequestError, match=r"version: expected 3, .* 'pirate' is 2"):
        await made.change("promote", 3)
    assert made.aliases(2) == ("canary",)
    await made.change("promote", 2)
    assert made.aliases(2) == ("champion",)


@pytest.mark.parametrize("arm", ["canary", "shadow"])
async def test_no_version_gets_the_share_that_was_given_for_another(desk: Make, arm: str) -> None:
    """Holds after every write of the change, so also if it breaks off there."""
    versions = (STABLE, adapter(2, arm), adapter(3))
    made = desk(catalog(*versions, **{f"{arm}_weight": "0.9"}))
    shares: list[float] = []

    class Watched(FolderRegistry):
        def set_alias(self, name: str, alias: str, version: int | None) -> None:
            super().set_alias(name, alias, version)
            note()

        def set_setting(self, name: str, key: str, value: str | None) -> None:
            super().set_setting(name, key, value)
            note()

    def note() -> None:
        split = read_traffic(made.registry.snapshot(), {BASE.digest}, {}).splits["pirate"]
        desired = split.canary if arm == "canary" else split.shadow
        assert desired.version is not None
        if desired.version.version == 3:
            shares.append(desired.share)

    watched = Watched(made.registry.folder)
    weights = (0.01, None) if arm == "canary" else (None, 0.01)
    change = CanaryChange("start", "pirate", 3, *weights)
    CanaryCommand(change, watched, watched.snapshot()).run()
    assert set(shares) <= {0.0, 0.01}
    assert shares[-1] == 0.01


async def test_a_canary_that_keeps_taking_its_base_down_is_judged_by_all_its_requests(
    desk: Make,
) -> None:
    far = adapter(2, "canary", base=OTHER_BASE)
    made = desk(catalog(STABLE, far, canary_weight="0.5"))
    known, both = made.registry.snapshot(), {BASE.digest, OTHER_BASE.digest}

    def round_of(num: int) -> CanaryState:
        """Reports 25 good requests and 5 errors, while the base is down for a moment."""
        arms = (
            (key("stable", STABLE), tally(ok=30 * num)),
            (key("canary", far), tally(ok=25 * num, error=5 * num)),
        )
        made.canaries.add_report(IngressReport("one", arms=arms))
        made.canaries.review(known, both, made.looked_s, both)
        return made.canaries.review(known, {BASE.digest}, made.looked_s, both)

    assert not round_of(0).vetoes
    assert any(round_of(num).vetoes for num in range(1, 20))


async def test_a_veto_is_for_one_version(desk: Make) -> None:
    made = desk(catalog(STABLE, CANARY, adapter(3), canary_weight="0.5"))
    assert made.fail().vetoes
    await made.written()
    status = await made.change("start", 3, 0.5)
    assert made.review().vetoes == ()
    assert [(arm.version, arm.weight) for arm in status.arms] == [(1, 0.5), (3, 0.5)]
    assert made.setting("canary_rolled_back") is None


async def test_a_late_roll_back_leaves_the_next_versions_weight_alone(
    desk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    made = desk(catalog(STABLE, CANARY, adapter(3), canary_weight="0.5"))
    file = made.registry.folder / "catalog.json"
    content = file.read_bytes()
    file.unlink()
    assert made.fail().vetoes
    file.write_bytes(content)
    await made.change("start", 3, 0.5)
    await until(lambda: not rollback_tasks())
    assert made.setting("canary_weight") == "0.5"
    assert made.review().vetoes == ()


async def test_the_same_version_may_be_tried_again(desk: Make) -> None:
    made = desk(catalog(canary_weight="0.5"))
    made.fail()
    await made.written()
    with pytest.raises(InvalidRequestError, match="2 was rolled back"):
        await made.change("promote")
    await made.change("start", None, 0.25)
    for _ in range(3):
        assert made.review().vetoes == ()
    assert made.setting("canary_weight") == "0.25"
    await made.change("promote")
    assert made.aliases(2) == ("champion",)


async def test_a_canary_is_started_and_promoted(desk: Make) -> None:
    made = desk(catalog(STABLE, adapter(2, "dev")))
    status = await made.change("start", "dev", 0.3, 1.0)
    assert [(arm.arm, arm.version, arm.weight) for arm in status.arms] == [
        ("stable", 1, 0.7),
        ("canary", 2, 0.3),
        ("shadow", 2, 1.0),
    ]
    assert set(made.aliases(2)) == {"dev", "canary", "shadow"}
    made.review()
    assert made.canaries.statuses()[0].verdict.startswith("too few requests")
    await made.change("promote")
    assert made.aliases(1) == ()
    assert set(made.aliases(2)) == {"dev", "champion"}
    assert made.registry.snapshot().settings == ()
    with pytest.raises(NotFoundError, match="nothing to promote"):
        await made.change("promote")


async def test_a_promotion_that_broke_off_can_be_given_again(desk: Make) -> None:
    made = desk(catalog(adapter(1), adapter(2, "champion", "canary"), canary_weight="0.3"))
    assert not made.review().vetoes
    await made.change("promote")
    assert made.aliases(2) == ("champion",)
    assert made.setting("canary_weight") is None


@pytest.mark.parametrize("kind", ["start", "promote"])
async def test_a_version_that_cannot_be_served_is_neither_started_nor_promoted(
    desk: Make, kind: Literal["start", "promote"]
) -> None:
    """The promoted name would be refused after a restart."""
    bad = replace(adapter(2, "canary"), effect="refused", refused="its rank is too high")
    made = desk(catalog(STABLE, bad, canary_weight="0"))
    before = made.registry.snapshot()
    with pytest.raises(InvalidRequestError, match="version: 2 cannot be served: its rank"):
        await made.change(kind, 2, 0.3 if kind == "start" else None)
    assert made.registry.snapshot() == before


async def test_an_abort_ends_canary_and_shadow(desk: Make) -> None:
    both = adapter(2, "canary", "shadow")
    made = desk(catalog(STABLE, both, canary_weight="0.3", shadow_weight="0.1"))
    await made.change("abort")
    assert made.aliases(2) == ()
    assert made.registry.snapshot().settings == ()
    with pytest.raises(NotFoundError, match="nothing to abort"):
        await made.change("abort")


@pytest.mark.parametrize(
    ("name", "version", "weight", "shadow", "kind", "words"),
    [
        ("pirate", 2, 1.5, None, InvalidRequestError, "weight: must lie in [0, 1], got 1.5"),
        ("pirate", 2, 0.5, -1.0, InvalidRequestError, "shadow: must lie in [0, 1], got -1.0"),
        ("pirate", 2, float("nan"), None, InvalidRequestError, "weight: must lie"),
        ("pirate", 2, None, None, InvalidRequestError, "weight: required"),
        ("pirate", 9, 0.5, None, InvalidRequestError, "version: 9"),
        ("pirate", "nope", 0.5, None, InvalidRequestError, "alias: 'nope'"),
        ("pirate", "v2", 0.5, None, InvalidRequestError, "alias: 'v2'"),
        ("pirate", None, 0.5, None, InvalidRequestError, "no alias 'canary'"),
        ("pirate", 1, 0.5, None, InvalidRequestError, "'pirate' resolves to 1 already"),
        ("base", 1, 0.5, None, InvalidRequestError, "'base' is a base model"),
        ("nobody", 1, 0.5, None, NotFoundError, "nobody"),
        ("pirate@2", 1, 0.5, None, InvalidNameError, "pirate@2"),
    ],
)
async def test_orders_that_mean_nothing_are_refused_and_write_nothing(
    desk: Make,
    name: str,
    version: int | str | None,
    weight: float | None,
    shadow: float | None,
    kind: type[Exception],
    words: str,
) -> None:
    made = desk(catalog(STABLE, adapter(2)))
    before = made.registry.snapshot()
    with pytest.raises(kind) as refused:
        await made.canaries.change(CanaryChange("start", name, version, weight, shadow))
    assert words in str(refused.value)
    assert made.registry.snapshot() == before


async def test_a_version_with_the_files_of_the_stable_one_is_named_as_such(desk: Make) -> None:
    made = desk(catalog(STABLE, replace(adapter(2), digest=STABLE.digest)))
    with pytest.raises(InvalidRequestError) as refused:
        await made.canaries.change(CanaryChange("start", "pirate", 2, 0.5, None))
    words = "version: 'pirate' resolves to 1 already, and 2 has the same files."
    assert str(refused.value) == words


async def test_a_weight_that_is_none_is_logged_once(
    desk: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = desk(catalog(canary_weight="30%"))
    for _ in range(5):
        made.review()
    records = [record for record in caplog.records if "30%" in record.getMessage()]
    assert len(records) == 1
    (status,) = made.canaries.statuses()
    assert "30%" in status.problems[0]


async def test_an_order_before_the_registry_was_read_is_refused_as_unavailable() -> None:
    def unread() -> RegistryReader:
        raise RegistryUnavailableError("it has not been read yet")

    canaries = Canaries(CanaryArgs(), unread, Catalog, lambda: None)
    with pytest.raises(RegistryUnavailableError, match="not been read yet"):
        await canaries.change(CanaryChange("promote", "pirate"))
