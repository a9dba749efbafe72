"""Adapters in two versions, and counts of them as an ingress reports them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, Setting
from serve_app.messages import IngressReport
from serve_app.tally import ARM_SECONDS, OUTCOMES, Arm, ArmCounts, ArmKey

BASE = BaseVersion("base", 1, "b" * 64, "")
OTHER_BASE = BaseVersion("other", 1, "o" * 64, "")


def adapter(
    version: int, *aliases: str, name: str = "pirate", base: BaseVersion = BASE
) -> AdapterVersion:
    digest = f"{name}{version}".ljust(64, "0")
    return AdapterVersion(name, version, digest, base.name, base.digest, 8, (), "", aliases)


STABLE = adapter(1, "champion")
CANARY = adapter(2, "canary")


def catalog(*adapters: AdapterVersion, **settings: str) -> Catalog:
    """`settings`: of the adapter `pirate`."""
    wished = tuple(Setting("pirate", key, value) for key, value in settings.items())
    return Catalog((BASE, OTHER_BASE), adapters or (STABLE, CANARY), settings=wished)


def tally(first_token_s: float = 0.05, **outcomes: int) -> ArmCounts:
    """All requests have the same time to first token, and their adapter on the device."""
    assert outcomes.keys() <= set(OUTCOMES)
    seconds = [0] * (len(ARM_SECONDS) + 1)
    seconds[bisect_left(ARM_SECONDS, first_token_s)] = sum(outcomes.values())
    counts = tuple(outcomes.get(outcome, 0) for outcome in OUTCOMES)
    return replace(
        ArmCounts(),
        outcomes=counts,
        first_token=tuple(seconds),
        warm_first_token=tuple(seconds),
        num_warm_left=outcomes.get("left", 0),
    )


def key(arm: Arm, version: AdapterVersion) -> ArmKey:
    return ArmKey(version.name, arm, version.version, version.digest)


def report(ingress: str = "one", **arms: ArmCounts) -> IngressReport:
    """Returns an ingress's report; `arms`: the counts of `stable` and `canary`."""
    versions: dict[str, tuple[Arm, AdapterVersion]] = {
        "stable": ("stable", STABLE),
        "canary": ("canary", CANARY),
    }
    counted = tuple((key(*versions[arm]), counts) for arm, counts in arms.items())
    return IngressReport(ingress, arms=counted)
