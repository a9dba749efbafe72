"""Plans of the adapters that the engines of each base keep in memory and unload.

Pins: the version that the default of a pinned name means stays in memory. Retired: a version that
an alias or a default meant earlier in this manager's life and none means now, or that was deleted;
it leaves memory with its last request. A plan is complete, so it may be sent any number of times.
Pure: time comes in; `Broadcaster` sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import RegistryError
from serve_app.messages import AdapterPlan

RESEND_S = 3.0  # replicas that are new or did not answer receive the plan then
_RETIRED_FOR_S = 120.0  # then it is left out: engines evict the version when they need the memory
_MAX_RETIRED = 4096  # remembered

Key = tuple[str, str]  # digests of the base and of the adapter


@dataclass(frozen=True, slots=True)
class Retirement:
    key: Key
    number: int  # a version that comes back and is retired again gets another number
    since_s: float


@dataclass(frozen=True, slots=True)
class CatalogHistory:
    """A manager's summary of all the catalogs that it has read."""

    meant: frozenset[Key] = frozenset()  # by an alias or a default, in the newest catalog
    known: frozenset[Key] = frozenset()
    pins: tuple[AdapterVersion, ...] = ()
    retired: tuple[Retirement, ...] = ()
    num_retirements: int = 0


def extend(old: CatalogHistory, catalog: Catalog, now_s: float) -> CatalogHistory:
    """The history with `catalog` as its newest."""
    defaults = _defaults(catalog)
    known = frozenset(_key(adapter) for adapter in catalog.adapters)
    meant = frozenset(_key(adapter) for adapter in catalog.adapters if adapter.aliases)
    meant |= {_key(adapter) for adapter in defaults.values()}
    gone = sorted((old.meant - meant) | (old.known - known))
    retired = tuple(one for one in old.retired if one.key not in meant and one.key not in gone)
    retired += tuple(
        Retirement(key, old.num_retirements + i, now_s) for i, key in enumerate(gone, start=1)
    )
    pins = tuple(
        adapter
        for name, adapter in sorted(defaults.items())
        if catalog.setting(name, "pin") == "true"
    )
    num_retirements = old.num_retirements + len(gone)
    return CatalogHistory(meant, known, pins, retired[-_MAX_RETIRED:], num_retirements)


def plan_for(
    history: CatalogHistory, base_digest: str, epoch: str, retired_until_s: float
) -> AdapterPlan:
    """The plan of a base. It leaves out versions that were retired after `retired_until_s`:
    ingresses with an older view may still send requests for them."""
    return AdapterPlan(
        epoch,
        tuple(pin for pin in history.pins if pin.base_digest == base_digest),
        tuple(
            (one.key[1], one.number)
            for one in history.retired
            if one.key[0] == base_digest
            and retired_until_s - _RETIRED_FOR_S < one.since_s <= retired_until_s
        ),
    )


def plan_is_due(plan: AdapterPlan, last: AdapterPlan | None, age_s: float) -> bool:
    return plan != last or age_s > RESEND_S


class AdapterPlanner:
    """Turns each round's catalog into plans."""

    def __init__(self, epoch: str, handover_s: float) -> None:
        """`epoch`: of this manager. `handover_s`: how long an ingress may have an older view."""
        self._epoch = epoch
        self._handover_s = handover_s
        self._revision: str | None = None
        self._history = CatalogHistory()

    def plans(
        self, catalog: Catalog, running: Mapping[str, str], now_s: float
    ) -> dict[str, AdapterPlan]:
        """Returns the plans by application. `running`: base digest -> application."""
        if catalog.revision != self._revision:
            self._history = extend(self._history, catalog, now_s)
            self._revision = catalog.revision
        retired_until_s = now_s - self._handover_s
        return {
            app_name: plan_for(self._history, base_digest, self._epoch, retired_until_s)
            for base_digest, app_name in running.items()
        }


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


def _key(adapter: AdapterVersion) -> Key:
    return adapter.base_digest, adapter.digest
