"""Which version of an adapter a request goes to: what its name means, its canary, or a shadow too.

Pure: read from a catalog, the bases that run and what was rolled back. Only a name without a suffix
(`name` or `base:name`) is ever split: who writes `@alias` or `@version` gets that version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import RegistryError
from serve_app.tally import Arm

CANARY = "canary"  # both are aliases, too
SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class Wish:
    """A second version of an adapter and the share of requests that it shall see."""

    version: AdapterVersion | None  # the one with the alias
    weight: float  # 0 to 1, as the setting says
    problem: str | None = None  # why it is not used, or not as the setting says
    is_waiting: bool = False  # for its base: until that answers, its requests go to stable

    @property
    def share(self) -> float:
        is_used = self.problem is None or self.is_waiting
        return self.weight if self.version is not None and is_used else 0.0


@dataclass(frozen=True, slots=True)
class Split:
    name: str
    stable: AdapterVersion  # what the name means
    canary: Wish
    shadow: Wish

    @property
    def is_active(self) -> bool:
        return self.canary.share > 0 or self.shadow.share > 0

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(wish.problem for wish in (self.canary, self.shadow) if wish.problem)

    def choose(self, key: str | None, draw: Callable[[], float]) -> tuple[Arm, AdapterVersion]:
        """One key always has the same place, so a higher weight takes nobody out of the canary.
        Without a key every request draws for itself."""
        canary = self.canary
        if canary.version is not None and canary.share > 0:
            point = draw() if key is None else place(self.name, key)
            if point < canary.share:
                return "canary", canary.version
        return "stable", self.stable

    def copied_to(self, chosen: AdapterVersion, draw: Callable[[], float]) -> AdapterVersion | None:
        """The shadow, where this request is in its share. It gets the tokens of the request, so
        only the very same base can read them."""
        shadow = self.shadow
        if shadow.version is None or shadow.share <= draw():
            return None
        is_readable = shadow.version.base_digest == chosen.base_digest
        return shadow.version if is_readable and shadow.version.digest != chosen.digest else None


@dataclass(frozen=True, slots=True)
class Traffic:
    splits: Mapping[str, Split] = field(default_factory=dict)  # by the adapter's name

    def split_of(self, model: str) -> Split | None:
        """The split of what a client asks for; None: its model string says all."""
        if "@" in model:
            return None
        base, _, name = model.rpartition(":")
        split = self.splits.get(name)
        if split is None or not split.is_active:
            return None
        versions = (split.stable, split.canary.version)
        if base and any(one is not None and one.base_name != base for one in versions):
            return None  # the client names the base: a canary of another one is not meant
        return split


def read_traffic(
    catalog: Catalog,
    running: Collection[str],
    vetoes: Mapping[tuple[str, str], str],
    served: Collection[str] = (),
) -> Traffic:
    """`running`: digests of the bases that answer. `vetoes`: (name, digest) -> why that canary was
    rolled back, for those that the registry may still wish. `served`: digests of the bases that are
    to answer, among them those that start, sleep or failed: a canary on one of these keeps its
    share and its trial."""
    wished: dict[str, dict[str, AdapterVersion]] = {}
    for adapter in catalog.adapters:
        for alias in (CANARY, SHADOW):
            if alias in adapter.aliases:
                wished.setdefault(adapter.name, {})[alias] = adapter
    for setting in catalog.settings:
        if setting.key in ("canary_weight", "shadow_weight", "canary_rolled_back"):
            wished.setdefault(setting.name, {})
    splits = {}
    for name, versions in sorted(wished.items()):
        stable = _stable(catalog, name)
        if stable is not None:
            canary = _canary(catalog, stable, versions.get(CANARY), running, vetoes, served)
            shadow = _shadow(catalog, stable, versions.get(SHADOW))
            splits[name] = Split(name, stable, canary, shadow)
    return Traffic(splits)


def sticky_key(*candidates: str | None) -> str | None:
    """The first that says anything."""
    return next((one for one in candidates if one), None)


def place(name: str, key: str) -> float:
    """Of a key among the requests for an adapter, in [0, 1). The version is no part of it."""
    digest = hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # all that a float can hold


def parse_weight(text: str | None) -> float | None:
    """None: not a number from 0 to 1."""
    try:
        weight = float(text or "0")
    except ValueError:
        return None
    return weight if 0 <= weight <= 1 else None


def _stable(catalog: Catalog, name: str) -> AdapterVersion | None:
    try:
        return catalog.resolve(name).adapter
    except RegistryError:
        return None


def _canary(
    catalog: Catalog,
    stable: AdapterVersion,
    version: AdapterVersion | None,
    running: Collection[str],
    vetoes: Mapping[tuple[str, str], str],
    served: Collection[str],
) -> Wish:
    weight, problem = _weight(catalog, stable.name, "canary_weight")
    if version is None or problem is not None:
        return Wish(version, weight, problem)
    if (reason := vetoes.get((version.name, version.digest))) is not None:
        return Wish(version, weight, f"version {version.version} was rolled back: {reason}")
    if version.refused:
        return Wish(version, weight, _cannot_be_served(version))
    if version.digest == stable.digest:
        return Wish(version, weight, f"version {version.version} is what the name means already")
    if version.base_digest != stable.base_digest and version.base_digest not in running:
        if version.base_digest in served:
            words = f"version {version.version} waits for its base {version.base_name!r} to answer"
            return Wish(version, weight, words, is_waiting=True)
        return Wish(
            version,
            weight,
            f"version {version.version} was made for a version of base {version.base_name!r} "
            "that is not served here",
        )
    return Wish(version, weight)


def _shadow(catalog: Catalog, stable: AdapterVersion, version: AdapterVersion | None) -> Wish:
    weight, problem = _weight(catalog, stable.name, "shadow_weight")
    if version is not None and problem is None and version.base_digest != stable.base_digest:
        problem = f"version {version.version} has another base than the name: it cannot shadow it"
    if version is not None and problem is None and version.refused:
        problem = _cannot_be_served(version)
    return Wish(version, weight, problem)


def _cannot_be_served(version: AdapterVersion) -> str:
    return f"version {version.version} cannot be served: {version.refused}"


def _weight(catalog: Catalog, name: str, key: str) -> tuple[float, str | None]:
    text = catalog.setting(name, key)
    weight = parse_weight(text)
    if weight is None:
        return 0.0, f"{key} {text!r:.80} is not a number from 0 to 1, and counts as 0"
    return weight, None
