"""Plans of the adapters that the engines of each base keep in memory and unload.

Pins: the version that the default of a pinned name means stays in memory. Retired: a version that
an alias or a default meant earlier in this manager's life and none means now, or that was deleted;
it leaves memory with its last request. A plan is complete, so it may be sent any number of times.
Pure: time comes in; `Broadcaster` sends.
"""

from __future__ import annotations

from collections.abc import Mapping

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import RegistryError
from serve_app.messages import PIN, AdapterPlan

RESEND_S = 3.0  # replicas that are new or did not answer receive the plan then
_RETIRED_FOR_S = 120.0  # then it is left out: engines evict the version when they need the memory
_MAX_RETIRED = 4096  # remembered

Key = tuple[str, str]  # digests of the base and of the adapter


def plan_is_due(plan: AdapterPlan, last: AdapterPlan | None, age_s: float) -> bool:
    return plan != last or age_s > RESEND_S


class AdapterPlanner:
    """Turns each round's catalog into plans, by all the catalogs that it has read."""

    def __init__(self, epoch: str, handover_s: float) -> None:
        """`epoch`: of this manager. `handover_s`: how long an ingress may have an older view."""
        self._epoch = epoch
        self._handover_s = handover_s
        self._revision: str | None = None
        self._meant: set[Key] = set()  # by an alias or a default, in the newest catalog
        self._known: set[Key] = set()
        self._pins: list[AdapterVersion] = []
        # When each version was retired, and a number, which is another one if it is retired again.
        self._retired: dict[Key, tuple[int, float]] = {}
        self._num_retirements = 0

    def plans(
        self, catalog: Catalog, running: Mapping[str, str], now_s: float
    ) -> dict[str, AdapterPlan]:
        """Returns the plans by application. `running`: base digest -> application."""
        if catalog.revision != self._revision:
            self.read(catalog, now_s)
            self._revision = catalog.revision
        retired_until_s = now_s - self._handover_s
        return {
            app_name: self.plan_for(base_digest, retired_until_s)
            for base_digest, app_name in running.items()
        }

    def read(self, catalog: Catalog, now_s: float) -> None:
        """Adds the newest catalog."""
        defaults = _defaults(catalog)
        known = {key_of(adapter) for adapter in catalog.adapters}
        meant = {key_of(adapter) for adapter in catalog.adapters if adapter.aliases}
        meant |= {key_of(adapter) for adapter in defaults.values()}
        gone = sorted((self._meant - meant) | (self._known - known))
        for key in meant.union(gone):
            self._retired.pop(key, None)
        for key in gone:
            self._num_retirements += 1
            self._retired[key] = self._num_retirements, now_s
        for key in tuple(self._retired)[:-_MAX_RETIRED]:
            del self._retired[key]
        self._meant, self._known = meant, known
        pinned = (name for name in sorted(defaults) if catalog.setting(name, PIN) == "true")
        self._pins = [defaults[name] for name in pinned]

    def plan_for(self, base_digest: str, retired_until_s: float) -> AdapterPlan:
        """Returns the plan of a base. It leaves out versions that were retired after
        `retired_until_s`: ingresses with an older view may still send requests for them."""
        since_s = retired_until_s - _RETIRED_FOR_S
        retired = (
            (digest, number)
            for (base, digest), (number, at_s) in self._retired.items()
            if base == base_digest and since_s < at_s <= retired_until_s
        )
        pins = (pin for pin in self._pins if pin.base_digest == base_digest)
        return AdapterPlan(self._epoch, tuple(pins), tuple(retired))


def _defaults(catalog: Catalog) -> dict[str, AdapterVersion]:
    """The default version of each name whose base is registered."""
    found: dict[str, AdapterVersion] = {}
    for name in {adapter.name for adapter in catalog.adapters}:
        try:
            adapter = catalog.resolve(name).adapter
        except RegistryError:
            continue
        if adapter is not None and not adapter.refused:
            found[name] = adapter
    return found


def key_of(adapter: AdapterVersion) -> Key:
    return adapter.base_digest, adapter.digest
