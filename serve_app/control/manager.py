"""The manager: the Serve deployment that makes the served bases match the registry.

It watches the registry (the last good catalog stays in use while the registry is down), turns the
configured models into one Serve application per base version, named by content and settings (a new
version starts next to the old version, which is removed once the new version answers), and
publishes a PlatformView to the ingresses by long poll. Serve replaces the manager for each changed
file; a change of its `user_config` alone, the models, causes no restart.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import ray
from ray import serve

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import RegistryUnavailableError
from registry.events import Change
from registry.meanings import Meanings
from serve_app.admin_api import SeriesAnswer
from serve_app.cache_salt import kept_key
from serve_app.canary.controller import Canaries
from serve_app.canary.status import CanaryStatus
from serve_app.config import ModelArgs, PlatformArgs, log_format
from serve_app.control.adapter_admin import AdapterAdmin
from serve_app.control.adapter_checks import AdapterChecks
from serve_app.control.adapter_plan import AdapterPlanner, plan_is_due
from serve_app.control.base_admin import change_base, still_served_as, wait_until_planned
from serve_app.control.base_plan import LastGood, plan, with_aliases
from serve_app.control.broadcaster import Broadcaster
from serve_app.control.fleet import Fleet
from serve_app.control.kept_counts import EngineCounters, EngineTexts, IngressTotals
from serve_app.control.key_calls import KeyCalls, open_keys
from serve_app.control.series import Series
from serve_app.control.watcher import StoredCatalog, Watcher, register_webhook
from serve_app.logs import install_in_replica
from serve_app.messages import (
    AdapterChange,
    BaseChange,
    CanaryChange,
    IngressCounts,
    IngressReport,
    ReportAnswer,
)
from serve_app.metrics.exposition import join_texts
from serve_app.platform_view import (
    BaseLine,
    CanaryState,
    PlatformView,
    RegistryReader,
    Sources,
)
from serve_app.ray_calls import refusing
from serve_app.ray_network import keep_to_loopback, warning_of_cluster
from serve_app.tasks import check_running, failures_text, keep, spawn

logger = logging.getLogger(__name__)

# Of Serve, not of the registry. Reading it costs manager and controller milliseconds for each base.
_STATUS_POLL_S = 0.25
_SETTLED_POLL_S = 1.0  # while no base starts or leaves, and no version is on trial
MAX_RECONCILE_AGE_S = 30.0  # then the health check fails
_UNREAD = "the registry has not been read yet; try again"
_HANDOVER_S = 5.0  # from a view that no longer means a version until engines may unload it


class Manager(KeyCalls):
    """Wrapped by `manager_application`. There is one replica; while it is down, ingresses continue
    with their last view."""

    async def __init__(self, args: PlatformArgs, sources: Sources) -> None:  # type: ignore[misc]
        install_in_replica(log_format())
        keep_to_loopback()
        if (warning := warning_of_cluster()) is not None:
            logger.warning(warning)
        self._sources = sources
        self._cache_salt_key = kept_key(sources.home)
        self._keys = open_keys(args.tenancy, sources.home)
        self._registry_args = args.registry
        self._registry: RegistryReader | None = None  # None until it could be opened
        self._watcher = Watcher(self._read, args.registry.poll_interval_s, self._publish_names)
        self._meanings = Meanings()
        self._models: tuple[ModelArgs, ...] = ()
        self._is_configured = asyncio.Event()  # Serve calls `reconfigure` after this constructor
        self._epoch = secrets.token_hex(4)
        self._num_views = 0
        self._view: PlatformView | None = None
        self._is_draining = False
        self._planner = AdapterPlanner(self._epoch, _HANDOVER_S)
        self._plans = Broadcaster("plan", "arrange", plan_is_due)
        self._adapter_admin = AdapterAdmin(self._opened, self._read_now)
        self._checks = AdapterChecks()
        self._canaries = Canaries(args.canary, self._opened, self._read_now, self._watcher.wake)
        self._fleet = Fleet(sources)
        self._last_good = LastGood()
        self._planned: Catalog | None = None  # the catalog that the last round followed
        self._missing: tuple[str, ...] = ()  # as last logged
        self._stored = StoredCatalog(self._watcher)
        self._errors: dict[str, str] = {}  # by step of a round: the last error logged
        self._totals = IngressTotals()
        self._series = Series()
        self._engine_counters = EngineCounters()
        self._changed = asyncio.Condition()
        loop = asyncio.get_running_loop()
        self._round_s = loop.time()  # when a round last ended, by success or failure
        self._reconciling = spawn(self._run(), "reconciler")
        self._watching: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Raises if this manager makes no progress; Serve then replaces it.

        Only faults that a new process may repair count. A registry that is down does not, nor does
        a failed round: every round fails while Serve's controller is slow or absent.
        """
        check_running(self._reconciling, self._watching)
        if (age_s := self._reconcile_age_s()) > MAX_RECONCILE_AGE_S:
            raise RuntimeError(f"no round of the manager has ended for {age_s:.0f} s")

    def _reconcile_age_s(self) -> float:
        """Seconds since a round ended, or a call of Serve's controller within a round returned."""
        return asyncio.get_running_loop().time() - max(self._round_s, self._fleet.progress_s)

    async def reconfigure(self, user_config: dict[str, object]) -> None:
        self._models = PlatformArgs.model_validate(user_config).models
        self._is_configured.set()

    async def view(self, known_revision: str, timeout_s: float) -> PlatformView | None:
        """Returns the view once its revision differs from the caller's, or None at the time-out."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self._view is not None and self._view.revision != known_revision
                )
        except TimeoutError:
            return None
        return self._view

    async def report(self, report: IngressReport) -> ReportAnswer:
        self._canaries.add_report(report)
        now_s = asyncio.get_running_loop().time()
        self._fleet.sleep.add_report(report, now_s)
        self._series.add(report.ingress_id, report.figures, time.time())
        if report.counts is not None:
            self._totals.add(report.ingress_id, report.counts, now_s)
        return self._fleet.sleep.answer(report.ingress_id, now_s)

    async def series(self) -> SeriesAnswer:
        return self._series.answer(time.time())

    async def wake_base(self, digest: str) -> None:
        """Wakes a base for which a request waits."""
        self._fleet.sleep.wake(digest, asyncio.get_running_loop().time())
        self._watcher.changed.set()  # starts the next round now

    async def drain(self) -> int | None:
        """Has every ingress refuse new requests until the server is gone. Returns the number of
        requests that are still open, or None until all ingresses have confirmed."""
        if not self._is_draining:
            self._is_draining = True
            if self._view is not None:
                self._set_view(replace(self._view, is_draining=True))
                await self._notify()
        return self._fleet.sleep.num_open_when_draining(asyncio.get_running_loop().time())

    async def bases(self) -> tuple[BaseLine, ...]:
        return self._fleet.lines

    @refusing
    async def change_base(self, change: BaseChange) -> str | None:
        """Returns the name of the base that still serves the files of one that is removed."""
        registry, catalog = self._opened(), self._meanings.latest
        if catalog is None:
            raise RegistryUnavailableError(_UNREAD)
        writes = change.kind in ("add", "remove")
        try:
            if writes:  # the watcher's catalog may be a poll interval old
                catalog = await asyncio.to_thread(self._read_now)
            await change_base(change, self._models, catalog, registry, self._fleet)
        finally:
            self._watcher.wake()
            self._watcher.changed.set()
        if writes:
            await wait_until_planned(change, self._changed, lambda: self._planned)
        removes = change.kind == "remove"
        return still_served_as(change.name, catalog, self._fleet.lines) if removes else None

    async def canaries(self) -> tuple[CanaryStatus, ...]:
        return self._canaries.statuses()

    @refusing
    async def change_canary(self, change: CanaryChange) -> CanaryStatus:
        try:
            return await self._canaries.change(change)
        finally:  # part of it may have been written
            self._watcher.wake()

    async def wake(self) -> None:
        self._watcher.wake()

    async def metrics(self, ingress_id: str, counts: IngressCounts, engines: EngineTexts) -> bytes:
        """The metrics of the manager, the sums over all ingresses, and the last counters of engines
        that sleep. `counts`: of the ingress that calls; `engines`: as it found them."""
        now_s = asyncio.get_running_loop().time()
        self._totals.add(ingress_id, counts, now_s)
        registry = self._watcher.metrics(self._reconcile_age_s())
        bases = self._fleet.starts.text(self._fleet.lines)
        tasks = failures_text({"process": "manager"})
        self._engine_counters.add(engines)
        lines = self._fleet.lines
        asleep = {one.digest for one in lines if one.state != "running"} - engines.keys()
        sleeping = self._engine_counters.text(asleep, {one.digest for one in lines})
        budgets = b"" if self._keys is None else self._keys.text()
        return join_texts([registry, bases, self._totals.text(now_s), sleeping, tasks, budgets])

    def _read(self) -> Catalog:
        """Reads the registry, and opens it at first. Blocks: the watcher calls it in a thread."""
        if self._registry is None:
            self._registry = self._sources.open_registry()
        return self._registry.snapshot()

    @refusing
    async def change_adapter(self, change: AdapterChange) -> AdapterVersion | None:
        try:
            return await self._adapter_admin.change(change)
        finally:  # part of it may have been written
            self._watcher.wake()

    async def _run(self) -> None:
        # Without its models every base would be unwanted, and the server ready.
        await self._is_configured.wait()
        loop = asyncio.get_running_loop()
        watcher = self._watcher
        self._watching = keep(watcher.run, "watcher")
        while self._registry is None or watcher.catalog is None:
            self._round_s = loop.time()  # without a catalog there is no round yet
            if self._registry is not None:
                with self._log_error("starting without the registry"):
                    await self._stored.start(self._registry)
            await watcher.wait_for_change(_STATUS_POLL_S)
        await self._fleet.restore_sleep()
        if (url := self._registry_args.webhook_url) is not None:
            spawn(register_webhook(self._registry, url), "announce-webhook")
        while True:
            with self._log_error("reconciling"):  # e.g. while Serve's controller restarts
                await self._reconcile(self._named(watcher.catalog), watcher.error)
            self._round_s = loop.time()
            self._stored.keep(self._registry)
            changes = self._missing or self._canaries.statuses() or not self._fleet.is_settled
            await watcher.wait_for_change(_STATUS_POLL_S if changes else _SETTLED_POLL_S)

    @contextmanager
    def _log_error(self, step: str) -> Iterator[None]:
        """Logs an error of this step, once while it stays the same. It ends no other step: the next
        round tries again."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self._errors.get(step) != text:
                logger.exception("%s failed; the next round tries again", step)
            self._errors[step] = text
        else:
            self._errors.pop(step, None)

    def _named(self, catalog: Catalog) -> Catalog:
        """The watcher's catalog with the meaning of bare names on this server."""
        return self._meanings.follow(self._with_aliases(catalog))

    def _read_now(self) -> Catalog:
        """The registry's catalog now, with the default aliases of this server. Blocks."""
        return self._meanings.hold(self._with_aliases(self._opened().snapshot()))

    def _opened(self) -> RegistryReader:
        """Raises RegistryUnavailableError until the registry could be opened."""
        if self._registry is None:
            raise RegistryUnavailableError(_UNREAD)
        return self._registry

    def _with_aliases(self, catalog: Catalog) -> Catalog:
        return with_aliases(catalog, self._registry_args.alias, self._models)

    def _publish_names(self, changes: tuple[Change, ...]) -> None:
        """Publishes new meanings of adapters' names at once: a flip does not wait for Serve's
        controller, which may need seconds on a loaded machine."""
        view = self._view
        if view is not None and self._watcher.catalog is not None:
            catalog = self._named(self._watcher.catalog)
            if _planning_input(catalog) == _planning_input(view.catalog):
                self._set_view(replace(view, catalog=catalog))
                spawn(self._notify(), "notify-ingresses")

    def _set_view(self, view: PlatformView) -> None:
        """Replaces the view, under a new revision; `_notify` must follow."""
        self._num_views += 1
        self._view = replace(view, revision=f"{self._epoch}-{self._num_views}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _reconcile(self, catalog: Catalog, registry_error: str | None) -> None:
        has_gpu = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
        now_s = asyncio.get_running_loop().time()
        planned = plan(self._models, catalog, has_gpu)
        wanted = self._last_good.complete(planned, self._models, catalog, now_s)
        self._log_missing(wanted.missing)
        bases = await self._fleet.round(wanted, catalog, now_s)
        if self._planned is not catalog:
            self._planned = catalog
            await self._notify()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        is_one_node = sum(bool(node["Alive"]) for node in nodes) == 1
        latest = self._named(self._watcher.catalog or catalog)
        if _planning_input(latest) != _planning_input(catalog):
            return  # planned with an old catalog: the next round follows at once
        running = {base.base.digest: base.app_name for base in bases if base.is_running}
        canary = CanaryState() if self._view is None else self._view.canary
        with self._log_error("judging canaries"):
            served = {base.base.digest for base in bases}
            read_s = self._watcher.read_began_s
            canary = self._canaries.review(latest, running.keys(), read_s, served)
        await self._publish(
            PlatformView("", latest, bases, wanted.missing, is_one_node, registry_error, canary)
        )
        with self._log_error("planning adapters"):
            self._plans.publish(self._planner.plans(latest, running, now_s))
        checks = self._registry_args.check_adapters and registry_error is None and running
        if checks:
            with self._log_error("checking adapters"):
                self._checks.update(latest, self._opened().check_adapter)

    def _log_missing(self, missing: tuple[str, ...]) -> None:
        for name in sorted(set(missing) - set(self._missing)):
            logger.error(
                "models: %s is not in the registry; it is served once it is registered with "
                "loraplex register base FOLDER --name %s, or by loraplex demo",
                name,
                name.partition("@")[0],
            )
        self._missing = missing

    async def _publish(self, view: PlatformView) -> None:
        """Publishes a view, completed by the parts that no round changes, if it is new."""
        view = replace(view, cache_salt_key=self._cache_salt_key, is_draining=self._is_draining)
        if self._view is None or replace(self._view, revision="") != view:
            self._set_view(view)
            await self._notify()


def manager_application(args: PlatformArgs, sources: Sources) -> serve.Application:
    deployment = serve.deployment(Manager).options(  # type: ignore[attr-defined]
        name="manager",
        num_replicas=1,
        max_ongoing_requests=1000,  # each ingress keeps a long poll open
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,  # at Serve's default of 2 s it would always be killed
        logging_config={"enable_access_log": False},  # a line per report and long poll
        user_config={"models": [model.model_dump(mode="json") for model in args.models]},
    )
    # Without the models: a change of `user_config` must reach `reconfigure` without a restart.
    application: serve.Application = deployment.bind(
        args.model_copy(update={"models": ()}), sources
    )
    return application


def _planning_input(catalog: Catalog) -> tuple[object, ...]:
    """The parts of a catalog that `plan` reads. The meaning of a base's name may change while its
    versions stay the same: an alias is set on a version that cannot be served, or removed."""
    settings = (setting for setting in catalog.settings if setting.key == "serve")
    return catalog.bases, catalog.default_bases(), *settings
