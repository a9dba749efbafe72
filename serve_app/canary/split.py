"""The split of an adapter's requests: to the version that its name resolves to, to its canary, and
as copies to a shadow.

Pure: read from a catalog, the running bases and the rollbacks. Only a name without a suffix
(`name` or `base:name`) is ever split: with `@alias` or `@version` a client gets that version.
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
class DesiredArm:
    """A second version of an adapter and the share of requests that the registry asks for."""

    version: AdapterVersion | None  # that has the alias
    weight: float  # 0 to 1, as set in the registry
    problem: str | None = None  # why it is not used, or not as set
    is_waiting: bool = False  # for its base: until that answers, its requests go to stable

    @property
    def share(self) -> float:
        """The weight that is used: 0 while there is a problem."""
        is_used = self.problem is None or self.is_waiting
        return self.weight if self.version is not None and is_used else 0.0


@dataclass(frozen=True, slots=True)
class Split:
    name: str
    stable: AdapterVersion  # that the name resolves to
    canary: DesiredArm
    shadow: DesiredArm

    @property
    def is_active(self) -> bool:
        return self.canary.share > 0 or self.shadow.share > 0

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(arm.problem for arm in (self.canary, self.shadow) if arm.problem)

    def choose(self, key: str | None, draw: Callable[[], float]) -> tuple[Arm, AdapterVersion]:
        """Returns the arm and version of a request. A key always has the same place, so a higher
        weight keeps every key that is in the canary already. Without a key, `draw` decides per
        request."""
        canary = self.canary
        if canary.version is not None and canary.share > 0:
            point = draw() if key is None else place(self.name, key)
            if point < canary.share:
                return "canary", canary.version
        return "stable", self.stable

    def copied_to(self, chosen: AdapterVersion, draw: Callable[[], float]) -> AdapterVersion | None:
        """Returns the shadow's version if this request is in its share, otherwise None. The copy
        has the request's tokens, so the shadow must have exactly the same base."""
        shadow = self.shadow
        if shadow.version is None or shadow.share <= draw():
            return None
        is_readable = shadow.version.base_digest == chosen.base_digest
        return shadow.version if is_readable and shadow.version.digest != chosen.digest else None


@dataclass(frozen=True, slots=True)
class Traffic:
    splits: Mapping[str, Split] = field(default_factory=dict)  # by the adapter's name

    def split_of(self, model: str) -> Split | None:
        """Returns the split of a client's model string; None if the string names a version or base
        of its own, or the adapter is not split."""
        if "@" in model:
            return None
        base, _, name = model.rpartition(":")
        split = self.splits.get(name)
        if split is None or not split.is_active:
            return None
        versions = (split.stable, split.canary.version)
        if base and any(arm is not None and arm.base_name != base for arm in versions):
            return None  # the client names the base, so a canary on another base does not apply
        return split


def read_traffic(
    catalog: Catalog,
    running: Collection[str],
    vetoes: Mapping[tuple[str, str], str],
    served: Collection[str] = (),
) -> Traffic:
    """`running`: digests of the bases that answer. `vetoes`: (name, digest) -> why that canary was
    rolled back; the registry may still ask for it. `served`: digests of all bases that should
    answer, including bases that start, sleep or failed: a canary on such a base keeps its share and
    its trial."""
    desired: dict[str, dict[str, AdapterVersion]] = {}
    for adapter in catalog.adapters:
        for alias in (CANARY, SHADOW):
            if alias in adapter.aliases:
                desired.setdefault(adapter.name, {})[alias] = adapter
    for setting in catalog.settings:
        if setting.key in ("canary_weight", "shadow_weight", "canary_rolled_back"):
            desired.setdefault(setting.name, {})
    splits = {}
    for name, versions in sorted(desired.items()):
        try:
            stable = catalog.resolve(name).adapter
        except RegistryError:
            continue
        if stable is not None:
            canary = _canary(catalog, stable, versions.get(CANARY), running, vetoes, served)
            shadow = _shadow(catalog, stable, versions.get(SHADOW))
            splits[name] = Split(name, stable, canary, shadow)
    return Traffic(splits)


def sticky_key(*candidates: str | None) -> str | None:
    """Returns the first candidate that is not empty."""
    return next((candidate for candidate in candidates if candidate), None)


def place(name: str, key: str) -> float:
    """Returns a key's place among the requests for an adapter, in [0, 1), whatever the version."""
    digest = hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # all that a float can hold


def parse_weight(text: str | None) -> float | None:
    """Returns None if the text is not a number from 0 to 1; no text means 0."""
    try:
        weight = float(text or "0")
    except ValueError:
        return None
    return weight if 0 <= weight <= 1 else None


def _canary(
    catalog: Catalog,
    stable: AdapterVersion,
    version: AdapterVersion | None,
    running: Collection[str],
    vetoes: Mapping[tuple[str, str], str],
    served: Collection[str],
) -> DesiredArm:
    weight, problem = _weight(catalog, stable.name, "canary_weight")
    if version is None or problem is not None:
        return DesiredArm(version, weight, problem)
    is_same_base = version.base_digest == stable.base_digest
    is_waiting = False
    if (reason := vetoes.get((version.name, version.digest))) is not None:
        problem = f"was rolled back: {reason}"
    elif version.refused:
        problem = f"cannot be served: {version.refused}"
    elif version.digest == stable.digest:
        problem = f"is what {stable.name!r} resolves to already"
    elif not is_same_base and version.base_digest not in running:
        is_waiting = version.base_digest in served
        problem = (
            f"waits for its base {version.base_name!r} to answer"
            if is_waiting
            else f"was made for a version of base {version.base_name!r} that is not served here"
        )
    return DesiredArm(version, weight, _with_version(version, problem), is_waiting)


def _shadow(catalog: Catalog, stable: AdapterVersion, version: AdapterVersion | None) -> DesiredArm:
    weight, problem = _weight(catalog, stable.name, "shadow_weight")
    if version is None or problem is not None:
        return DesiredArm(version, weight, problem)
    if version.base_digest != stable.base_digest:
        problem = f"has another base than {stable.name!r}: it cannot shadow it"
    elif version.refused:
        problem = f"cannot be served: {version.refused}"
    return DesiredArm(version, weight, _with_version(version, problem))


def _with_version(version: AdapterVersion, problem: str | None) -> str | None:
    return None if problem is None else f"version {version.version} {problem}"


def _weight(catalog: Catalog, name: str, key: str) -> tuple[float, str | None]:
    text = catalog.setting(name, key)
    weight = parse_weight(text)
    if weight is None:
        return 0.0, f"{key} {text!r:.80} is not a number from 0 to 1, and counts as 0"
    return weight, None
