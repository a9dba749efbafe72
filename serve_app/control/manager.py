"""The manager: one Serve deployment that knows what should be served and makes it so.

Has the registry watched (the last good catalog stays while it is down), turns the configured
models into one Serve application a base version, named by its content and settings (a new version
comes up beside the old one, which goes once the new one answers), and hands ingresses a
PlatformView by long poll. The model list comes as `user_config`: changing it restarts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import ray
from ray import serve

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import RegistryUnavailableError
from registry.events import Change
from serve_app.cache_salt import kept_key
from serve_app.canary.controller import Canaries
from serve_app.canary.status import CanaryStatus
from serve_app.config import ModelArgs, PlatformArgs, log_format
from serve_app.control.adapter_admin import AdapterAdmin
from serve_app.control.adapter_checks import AdapterChecks
from serve_app.control.adapter_plan import AdapterArranger
from serve_app.control.base_admin import change_base, is_followed
from serve_app.control.base_plan import LastGood, plan
from serve_app.control.fleet import Fleet
from serve_app.control.ingress_totals import IngressTotals
from serve_app.control.named_catalogs import NamedCatalogs
from serve_app.control.registry_metrics import RegistryMetrics, log_changes
from serve_app.control.stored_catalog import StoredCatalog
from serve_app.control.watcher import Watcher
from serve_app.control.webhook_setup import announce
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
    ServedBase,
    Sources,
)
from serve_app.ray_calls import refusing
from serve_app.ray_network import keep_to_loopback, warning_of_cluster
from serve_app.tasks import check_running, failures_text, keep, spawn

logger = logging.getLogger(__name__)

_STATUS_POLL_S = 0.25  # of Serve, not of the registry: 2 ms of the controller each
MAX_RECONCILE_AGE_S = 30.0  # then the manager calls itself unhealthy
_HANDOVER_S = 5.0  # after a view that does not mean a version any more, before it is let go


class Manager:
    """Wrapped by `manager_application`. One replica; ingresses go on without it for a while."""

    async def __init__(self, args: PlatformArgs, sources: Sources) -> None:  # type: ignore[misc]
        install_in_replica(log_format())
        keep_to_loopback()
        if (warning := warning_of_cluster()) is not None:
            logger.warning(warning)
        self._sources = sources
        self._cache_salt_key = kept_key(sources.home)
        self._registry_args = args.registry
        self._registry: RegistryReader | None = None  # until it could be opened
        self._watcher = Watcher(self._look, args.registry.poll_interval_s)
        self._watcher.subscribe(log_changes)
        self._watcher.subscribe(self._publish_names)
        self._registry_metrics = RegistryMetrics(self._watcher, self._reconcile_age_s)
        self._names = NamedCatalogs(args.registry.alias)
        self._models: tuple[ModelArgs, ...] = ()
        self._is_configured = asyncio.Event()  # Serve calls `reconfigure` after this constructor
        self._incarnation = secrets.token_hex(4)
        self._num_views = 0
        self._view: PlatformView | None = None
        self._is_draining = False
        self._arranger = AdapterArranger(self._incarnation, _HANDOVER_S)
        self._adapter_admin = AdapterAdmin()
        self._checks = AdapterChecks()
        self._canaries = Canaries(args.canary)
        self._fleet = Fleet(sources)
        self._last_good = LastGood()
        self._planned: Catalog | None = None  # the one that the last round followed
        self._missing: tuple[str, ...] = ()  # as last logged
        self._stored = StoredCatalog(self._watcher)
        self._complaints: dict[str, str] = {}  # by step of a round: the last error logged
        self._totals = IngressTotals()
        self._changed = asyncio.Condition()
        loop = asyncio.get_running_loop()
        self._round_s = loop.time()  # when a round last ended, however it ended
        self._reconciling = spawn(self._run(), "reconciler")
        self._watching: asyncio.Task[None] | None = None
        self._tasks = {self._reconciling}

    async def check_health(self) -> None:
        """Raises when this manager follows nothing any more; Serve then replaces it.

        Only what a new process may mend counts: a registry that is away does not, and neither does
        a round that fails, for a slow or absent controller of Serve makes every round fail.
        """
        check_running(self._reconciling, self._watching)
        if (age_s := self._reconcile_age_s()) > MAX_RECONCILE_AGE_S:
            raise RuntimeError(f"no round of the manager ended for {age_s:.0f} s")

    def _reconcile_age_s(self) -> float:
        """Since the last round ended, or a call of Serve's controller within one came back."""
        return asyncio.get_running_loop().time() - max(self._round_s, self._fleet.progress_s)

    async def reconfigure(self, user_config: dict[str, object]) -> None:
        self._models = PlatformArgs.model_validate(user_config).models
        self._is_configured.set()

    async def view(self, known_revision: str, timeout_s: float) -> PlatformView | None:
        """The view as soon as its revision is another than the caller's; None at the time-out."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self._view is not None and self._view.revision != known_revision
                )
        except TimeoutError:
            return None
        return self._view

    async def report(self, report: IngressReport) -> ReportAnswer:
        """Each ingress's latest; it says all that counts, so that a lost one does no harm."""
        self._canaries.add_report(report)
        now_s = asyncio.get_running_loop().time()
        self._fleet.sleep.hear(report, now_s)
        if report.counts is not None:
            self._totals.add(report.ingress_id, report.counts, now_s)
        return self._fleet.sleep.answer(report.ingress_id, now_s)

    async def wake_base(self, digest: str) -> None:
        """A request waits for this base."""
        self._fleet.sleep.wake(digest, asyncio.get_running_loop().time())
        self._watcher.news.set()  # the next round begins now

    async def drain(self) -> int | None:
        """From now on every ingress refuses new requests, until the server is gone. The requests
        that are still open; None: not all ingresses have said so yet."""
        if not self._is_draining:
            self._is_draining = True
            if self._view is not None:
                self._show(replace(self._view, is_draining=True))
                await self._tell()
        return self._fleet.sleep.num_open_when_draining(asyncio.get_running_loop().time())

    async def bases(self) -> tuple[BaseLine, ...]:
        return self._fleet.lines

    @refusing
    async def change_base(self, change: BaseChange) -> None:
        """What an operator wants of a base; see `base_admin`."""
        catalog = self._names.latest
        if self._registry is None or catalog is None:
            raise RegistryUnavailableError("the registry was not read yet")
        writes = change.kind in ("add", "remove")
        try:
            if writes:  # the watcher's catalog may be a poll old
                catalog = await asyncio.to_thread(self._read_now)
            await change_base(change, self._models, catalog, self._registry, self._fleet)
        finally:
            self._watcher.wake()
            self._watcher.news.set()
        if writes:
            await is_followed(change, self._changed, lambda: self._planned)

    async def canaries(self) -> tuple[CanaryStatus, ...]:
        return self._canaries.statuses()

    @refusing
    async def change_canary(self, change: CanaryChange) -> CanaryStatus:
        """Applies an operator's change of a canary; see `canary.commands`."""
        try:
            return await self._canaries.change(change)
        finally:  # part of it may have been written
            self._watcher.wake()

    async def wake(self) -> None:
        """Something changed in the registry: look now."""
        self._watcher.wake()

    async def metrics(self, ingress_id: str, counts: IngressCounts) -> bytes:
        """With the sums over all ingresses. `counts`: of the one that asks."""
        now_s = asyncio.get_running_loop().time()
        self._totals.add(ingress_id, counts, now_s)
        bases = self._fleet.starts.text(self._fleet.lines)
        tasks = failures_text({"process": "manager"})
        return join_texts([self._registry_metrics.text(), bases, self._totals.text(now_s), tasks])

    def _look(self) -> Catalog:
        """In a thread."""
        if self._registry is None:
            self._registry = self._sources.open_registry()
        return self._registry.snapshot()

    @refusing
    async def change_adapter(self, change: AdapterChange) -> AdapterVersion | None:
        """What an operator wants of an adapter; see `adapter_admin`."""
        if self._registry is None:
            raise RegistryUnavailableError("the registry was not read yet")
        try:
            return await self._adapter_admin.change(change, self._registry, self._read_now)
        finally:  # part of it may have been written
            self._watcher.wake()

    async def _run(self) -> None:
        # Before it knows its models it would find every base unwanted and itself ready.
        await self._is_configured.wait()
        loop = asyncio.get_running_loop()
        watcher = self._watcher
        self._watching = keep(watcher.run, "watcher")
        self._tasks.add(self._watching)
        while self._registry is None or watcher.catalog is None:
            self._round_s = loop.time()  # there is nothing yet that it could lag behind
            if self._registry is not None:
                with self._enduring("starting without the registry"):
                    await self._stored.start(self._registry)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_POLL_S):
                    await watcher.news.wait()
            watcher.news.clear()
        await self._fleet.meet_ingresses()
        self._canaries.open(self._registry, self._read_now, watcher.wake)
        if (url := self._registry_args.webhook_url) is not None:
            self._tasks.add(spawn(announce(self._registry, url), "announce-webhook"))
        while True:
            watcher.news.clear()
            with self._enduring("reconciling"):  # Serve's controller restarting, say
                await self._reconcile(self._named(watcher.catalog), watcher.error)
            self._round_s = loop.time()
            self._stored.keep(self._registry)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_POLL_S):
                    await watcher.news.wait()

    @contextmanager
    def _enduring(self, step: str) -> Iterator[None]:
        """An error of this step is logged once as long as it lasts, and ends nothing else: the next
        round tries again."""
        try:
            yield
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            if self._complaints.get(step) != words:
                logger.exception("%s failed", step)
            self._complaints[step] = words
        else:
            self._complaints.pop(step, None)

    def _named(self, catalog: Catalog) -> Catalog:
        """With the aliases that count here."""
        return self._names.follow(catalog, self._models)

    def _read_now(self) -> Catalog:
        """In a thread: what the registry says, with the aliases that count here."""
        assert self._registry is not None
        return self._names.named(self._registry.snapshot(), self._models)

    def _publish_names(self, changes: tuple[Change, ...]) -> None:
        """What adapters' names mean, at once: a flip waits for no answer of Serve's controller,
        which may take seconds on a loaded machine."""
        view = self._view
        if view is not None and self._watcher.catalog is not None:
            catalog = self._named(self._watcher.catalog)
            if _about_bases(catalog) == _about_bases(view.catalog):
                self._show(replace(view, catalog=catalog))
                spawn(self._tell(), "tell-view")

    def _show(self, view: PlatformView) -> None:
        """The view from now on, with a revision of its own; `_tell` must follow."""
        self._num_views += 1
        self._view = replace(view, revision=f"{self._incarnation}-{self._num_views}")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _reconcile(self, catalog: Catalog, registry_error: str | None) -> None:
        has_gpu = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
        now_s = asyncio.get_running_loop().time()
        planned = plan(self._models, catalog, has_gpu)
        wanted = self._last_good.complete(planned, self._models, catalog, now_s)
        self._tell_missing(wanted.missing)
        bases = await self._fleet.round(wanted, catalog, now_s)
        if self._planned is not catalog:
            self._planned = catalog
            await self._tell()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        is_one_node = sum(bool(node["Alive"]) for node in nodes) == 1
        latest = self._named(self._watcher.catalog or catalog)
        if _about_bases(latest) != _about_bases(catalog):
            return  # planned with what is old news: the next round comes at once
        running = {base.base.digest: base.app_name for base in bases if base.is_running}
        canary = CanaryState() if self._view is None else self._view.canary
        with self._enduring("judging canaries"):
            served = {base.base.digest for base in bases}
            looked_s = self._watcher.looked_s
            canary = self._canaries.review(latest, running.keys(), looked_s, served)
        await self._publish(latest, bases, wanted.missing, is_one_node, registry_error, canary)
        with self._enduring("arranging adapters"):
            self._arranger.update(latest, running)
        if self._registry is not None and registry_error is None and running:
            with self._enduring("checking adapters"):
                self._check_adapters(latest, self._registry)

    def _check_adapters(self, catalog: Catalog, registry: RegistryReader) -> None:
        if self._registry_args.check_adapters:
            self._checks.update(catalog, registry.check_adapter)

    def _tell_missing(self, missing: tuple[str, ...]) -> None:
        for name in sorted(set(missing) - set(self._missing)):
            logger.error(
                "models: %s is not in the registry: it is served as soon as it is there; "
                "loraplex register base FOLDER --name %s, or loraplex demo",
                name,
                name.partition("@")[0],
            )
        self._missing = missing

    async def _publish(
        self,
        catalog: Catalog,
        bases: tuple[ServedBase, ...],
        missing: tuple[str, ...],
        is_one_node: bool,
        registry_error: str | None,
        canary: CanaryState,
    ) -> None:
        old = self._view
        if old is not None and old.catalog.revision == catalog.revision:
            known = (old.bases, old.missing, old.is_one_node, old.registry_error, old.canary)
            if known == (bases, missing, is_one_node, registry_error, canary):
                return
        self._show(
            PlatformView(
                "",
                catalog,
                bases,
                missing,
                is_one_node,
                registry_error,
                canary,
                self._cache_salt_key,
                self._is_draining,
            )
        )
        await self._tell()


def manager_application(args: PlatformArgs, sources: Sources) -> serve.Application:
    deployment = serve.deployment(Manager).options(  # type: ignore[attr-defined]
        name="manager",
        num_replicas=1,
        max_ongoing_requests=1000,  # each ingress keeps one long poll open
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=1.0,
        logging_config={"enable_access_log": False},  # a line for each report and long poll
        user_config={"models": [model.model_dump(mode="json") for model in args.models]},
    )
    # Without the models: a change there must reach `reconfigure` and nothing else.
    application: serve.Application = deployment.bind(
        args.model_copy(update={"models": ()}), sources
    )
    return application


def _about_bases(catalog: Catalog) -> tuple[object, ...]:
    """What `plan` reads of a catalog. The meaning of a base's name may change though its versions
    are the same: an alias on a version that cannot be served comes or goes."""
    wishes = (one for one in catalog.settings if one.key == "serve")
    return catalog.bases, catalog.default_bases(), *wishes
