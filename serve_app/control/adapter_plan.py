"""What the engines of each base shall do about adapters in memory, and how they hear of it.

Pins: what the default of a pinned name means stays in memory. Retired: a version that an alias or a
default meant earlier in this manager's life and none means now, or that was deleted; it leaves
memory with its last request. The plan is whole and may be sent again and again. `observe` and
`plan_for` are pure; `AdapterArranger` sends, beside the manager's loop, never in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import RegistryError
from serve_app.messages import AdapterPlan
from serve_app.ray_calls import Broadcasts
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

RESEND_S = 3.0  # replicas that are new or did not answer get it then
_TELL_RETIRED_S = 120.0  # then whoever has not heard of it lets it go when room is wanted
_MAX_RETIRED = 4096  # remembered

Key = tuple[str, str]  # digests of the base and of the adapter


@dataclass(frozen=True, slots=True)
class Retirement:
    key: Key
    number: int  # a version that comes back and goes again gets another one
    since_s: float


@dataclass(frozen=True, slots=True)
class Observed:
    """What a manager remembers of all catalogs that it saw."""

    meant: frozenset[Key] = frozenset()  # by an alias or a default, in the newest one
    known: frozenset[Key] = frozenset()
    pins: tuple[AdapterVersion, ...] = ()
    retired: tuple[Retirement, ...] = ()
    num_retirements: int = 0


def observe(old: Observed, catalog: Catalog, now_s: float) -> Observed:
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
    return Observed(meant, known, pins, retired[-_MAX_RETIRED:], old.num_retirements + len(gone))


def plan_for(
    observed: Observed, base_digest: str, incarnation: str, retired_until_s: float
) -> AdapterPlan:
    """`retired_until_s`: what was retired later may still be asked for by an older view."""
    return AdapterPlan(
        incarnation,
        tuple(pin for pin in observed.pins if pin.base_digest == base_digest),
        tuple(
            (one.key[1], one.number)
            for one in observed.retired
            if one.key[0] == base_digest
            and retired_until_s - _TELL_RETIRED_S < one.since_s <= retired_until_s
        ),
    )


Send = Callable[[str, AdapterPlan], Awaitable[int]]


class AdapterArranger:
    """Keeps every engine replica told. One event loop."""

    def __init__(self, incarnation: str, handover_s: float, send: Send | None = None) -> None:
        """`send`: to all replicas of an application; returns how many failed."""
        self._incarnation = incarnation
        self._handover_s = handover_s
        broadcasts = Broadcasts()
        self._send = send or (lambda app, plan: broadcasts.call(app, "arrange", plan))
        self._revision: str | None = None
        self._observed = Observed()
        self._sent: dict[str, tuple[AdapterPlan, float]] = {}  # by application; when
        self._sending: dict[str, asyncio.Task[None]] = {}

    def update(self, catalog: Catalog, running: Mapping[str, str]) -> None:
        """`running`: base digest -> application. Returns at once; called all the time."""
        now_s = asyncio.get_running_loop().time()
        if catalog.revision != self._revision:
            self._observed = observe(self._observed, catalog, now_s)
            self._revision = catalog.revision
        for app_name in self._sent.keys() - set(running.values()):
            del self._sent[app_name]
        for base_digest, app_name in running.items():
            plan = plan_for(
                self._observed, base_digest, self._incarnation, now_s - self._handover_s
            )
            sent_plan, sent_s = self._sent.get(app_name, (None, 0.0))
            is_due = plan != sent_plan or now_s - sent_s > RESEND_S
            if is_due and app_name not in self._sending:
                self._sending[app_name] = spawn(self._tell(app_name, plan), "send-plan")

    async def _tell(self, app_name: str, plan: AdapterPlan) -> None:
        try:
            num_failed = await self._send(app_name, plan)
            if num_failed:
                logger.warning("%d engines of %s took no plan yet", num_failed, app_name)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the engines of %s took no plan yet: %s", app_name, error)
        except Exception:
            logger.exception("the engines of %s took no plan yet", app_name)
        finally:
            self._sent[app_name] = (plan, asyncio.get_running_loop().time())
            del self._sending[app_name]


def _defaults(catalog: Catalog) -> dict[str, AdapterVersion]:
    """By name; without those whose base is gone."""
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
