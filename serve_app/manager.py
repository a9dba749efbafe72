"""The manager: one Serve deployment that knows what should be served and makes it so.

Has the registry watched (the last good catalog stays while it is down), turns the configured
models into one Serve application a base version, named by its content and settings (a new version
comes up beside the old one, which goes once the new one answers), and hands ingresses a
PlatformView by long poll. The model list comes as `user_config`: changing it restarts nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import ray
from ray import serve
from ray.serve.schema import ApplicationStatusOverview, ServeStatus

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import InvalidNameError, NotFoundError, RegistryUnavailableError
from registry.events import Change
from serve_app.adapter_admin import AdapterAdmin, AdapterChange
from serve_app.adapter_plan import AdapterArranger
from serve_app.canaries import Canaries
from serve_app.canary_status import CanaryStatus
from serve_app.config import ModelArgs, PlatformArgs, default_aliases
from serve_app.registry_metrics import RegistryMetrics, log_changes
from serve_app.replica import base_application
from serve_app.reports import IngressReport
from serve_app.topology import (
    BaseSpec,
    CanaryState,
    PlatformView,
    RegistryReader,
    ServedBase,
    Sources,
)
from serve_app.watcher import Watcher
from serve_app.webhook_setup import announce

logger = logging.getLogger(__name__)

APP_PREFIX = "base--"
_STATUS_POLL_S = 0.25  # of Serve, not of the registry: 2 ms of the controller each
_RETRY_FAILED_S = 30.0
_HANDOVER_S = 5.0  # after a view without an old base version, before that version is drained


@dataclass(frozen=True, slots=True)
class Plan:
    specs: tuple[BaseSpec, ...]
    missing: tuple[str, ...]


def plan(models: Sequence[ModelArgs], catalog: Catalog, cluster_has_gpu: bool) -> Plan:
    """Which applications the configured models mean, given what the registry holds."""
    specs: dict[str, BaseSpec] = {}
    missing: list[str] = []
    for model in models:
        try:
            base = catalog.resolve_base(model.name)
        except (NotFoundError, InvalidNameError):
            missing.append(model.name)
            continue
        if base.digest in specs:
            logger.error("model %s is %s, which is already served", model.name, base.name)
            continue
        device = model.engine.device
        if device == "auto":
            device = "cuda" if cluster_has_gpu else "cpu"
        # The alias is of names only: no reason for another application.
        dumped = model.model_dump_json(exclude={"alias"})
        settings = hashlib.sha256(dumped.encode() + device.encode()).hexdigest()
        name = re.sub(r"[^A-Za-z0-9._-]", "-", base.name)
        app_name = f"{APP_PREFIX}{name}--{base.digest[:12]}-{settings[:8]}"
        specs[base.digest] = BaseSpec(base, model, device, app_name)
    return Plan(tuple(specs.values()), tuple(missing))


class Manager:
    """Wrapped by `manager_application`. One replica; ingresses go on without it for a while."""

    async def __init__(self, args: PlatformArgs, sources: Sources) -> None:  # type: ignore[misc]
        self._sources = sources
        self._registry_args = args.registry
        self._registry: RegistryReader | None = None  # until it could be opened
        self._watcher = Watcher(self._look, args.registry.poll_interval_s)
        self._watcher.subscribe(log_changes)
        self._watcher.subscribe(self._publish_names)
        self._registry_metrics = RegistryMetrics(self._watcher)
        self._watched: Catalog | None = None  # the watcher's, of which `_catalog` was made
        self._catalog: Catalog | None = None  # the same with what bare names mean here
        self._models: tuple[ModelArgs, ...] = ()
        self._is_configured = asyncio.Event()  # Serve calls `reconfigure` after this constructor
        self._incarnation = secrets.token_hex(4)
        self._num_views = 0
        self._view: PlatformView | None = None
        self._arranger = AdapterArranger(self._incarnation, _HANDOVER_S)
        self._adapter_admin = AdapterAdmin()
        self._reports: dict[str, IngressReport] = {}  # the latest, by ingress
        self._canaries = Canaries(args.canary)
        self._changed = asyncio.Condition()
        self._failed_s: dict[str, float] = {}  # when an application was last seen failed
        self._unwanted_s: dict[str, float] = {}  # since when an application is replaced
        self._deleting: set[str] = set()
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._run())}

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

    async def report(self, report: IngressReport) -> None:
        """Each ingress's latest; it says all that counts, so that a lost one does no harm."""
        self._reports[report.ingress_id] = report
        self._canaries.take(report)

    async def canaries(self) -> tuple[CanaryStatus, ...]:
        return self._canaries.statuses()

    async def start_canary(
        self,
        name: str,
        version: int | str | None,
        weight: float | None,
        shadow_weight: float | None,
    ) -> CanaryStatus:
        return await self._ordered(self._canaries.start(name, version, weight, shadow_weight))

    async def promote_canary(self, name: str) -> CanaryStatus:
        return await self._ordered(self._canaries.promote(name))

    async def abort_canary(self, name: str) -> CanaryStatus:
        return await self._ordered(self._canaries.abort(name))

    async def _ordered(self, order: Coroutine[None, None, CanaryStatus]) -> CanaryStatus:
        try:
            return await order
        finally:  # part of it may have been written
            self._watcher.wake()

    async def wake(self) -> None:
        """Something changed in the registry: look now."""
        self._watcher.wake()

    async def metrics(self) -> bytes:
        return self._registry_metrics.text()

    def _look(self) -> Catalog:
        """In a thread."""
        if self._registry is None:
            self._registry = self._sources.open_registry()
        return self._registry.snapshot()

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
        self._tasks.add(loop.create_task(watcher.run()))
        while self._registry is None or watcher.catalog is None:
            await watcher.news.wait()
            watcher.news.clear()
        self._canaries.open(self._registry, self._read_now)
        if (url := self._registry_args.webhook_url) is not None:
            self._tasks.add(loop.create_task(announce(self._registry, url)))
        while True:
            watcher.news.clear()
            catalog = self._named(watcher.catalog)
            try:
                await self._reconcile(catalog, watcher.error)
            except Exception:  # Serve's controller restarting, say: the next round tries again
                logger.exception("reconciling failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_POLL_S):
                    await watcher.news.wait()

    def _named(self, catalog: Catalog) -> Catalog:
        """With the aliases that count here; the same object as long as nothing changed, for its
        indices' and its revision's sake."""
        aliases = default_aliases(self._registry_args.alias, self._models)
        known = self._catalog
        if known is None or known.default_aliases != aliases or self._watched is not catalog:
            self._watched = catalog
            self._catalog = known = replace(catalog, default_aliases=aliases)
        return known

    def _read_now(self) -> Catalog:
        """In a thread: what the registry says, with the aliases that count here."""
        assert self._registry is not None
        aliases = default_aliases(self._registry_args.alias, self._models)
        return replace(self._registry.snapshot(), default_aliases=aliases)

    def _publish_names(self, changes: tuple[Change, ...]) -> None:
        """What adapters' names mean, at once: a flip waits for no answer of Serve's controller,
        which may take seconds on a loaded machine."""
        view = self._view
        if view is not None and self._watcher.catalog is not None:
            catalog = self._named(self._watcher.catalog)
            if _about_bases(catalog) == _about_bases(view.catalog):
                self._show(replace(view, catalog=catalog))
                task = asyncio.get_running_loop().create_task(self._tell())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _show(self, view: PlatformView) -> None:
        """The view from now on, with a revision of its own; `_tell` must follow."""
        self._num_views += 1
        self._view = replace(view, revision=f"{self._incarnation}-{self._num_views}")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _reconcile(self, catalog: Catalog, registry_error: str | None) -> None:
        has_gpu = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
        wanted = plan(self._models, catalog, has_gpu)
        status: ServeStatus = await asyncio.to_thread(serve.status)
        await self._create(wanted.specs, status)
        bases = tuple(_served(spec, status) for spec in wanted.specs)
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        is_one_node = sum(bool(node["Alive"]) for node in nodes) == 1
        latest = self._named(self._watcher.catalog or catalog)
        if _about_bases(latest) != _about_bases(catalog):
            return  # planned with what is old news: the next round comes at once
        running = {base.base.digest: base.app_name for base in bases if base.is_running}
        canary = self._canaries.review(latest, running.keys())
        await self._publish(latest, bases, wanted.missing, is_one_node, registry_error, canary)
        self._arranger.update(latest, running)
        if all(base.is_running for base in bases):
            self._remove_unwanted({spec.app_name for spec in wanted.specs}, status)

    async def _create(self, specs: Sequence[BaseSpec], status: ServeStatus) -> None:
        now_s = asyncio.get_running_loop().time()
        targets: list[serve.RunTarget] = []
        for spec in specs:
            app = status.applications.get(spec.app_name)
            if app is not None and app.status == "DEPLOY_FAILED":
                if now_s - self._failed_s.setdefault(spec.app_name, now_s) < _RETRY_FAILED_S:
                    continue
                del self._failed_s[spec.app_name]
            elif app is not None:
                continue
            logger.info("starting %s", spec.app_name)
            target = base_application(spec, self._sources)
            targets.append(serve.RunTarget(target=target, name=spec.app_name, route_prefix=None))
        if targets:
            await asyncio.to_thread(serve.run_many, targets, wait_for_applications_running=False)

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
        self._show(PlatformView("", catalog, bases, missing, is_one_node, registry_error, canary))
        await self._tell()

    def _remove_unwanted(self, wanted: set[str], status: ServeStatus) -> None:
        """Called when every wanted application answers, so nothing is removed too early."""
        now_s = asyncio.get_running_loop().time()
        for name in status.applications:
            if not name.startswith(APP_PREFIX) or name in wanted or name in self._deleting:
                self._unwanted_s.pop(name, None)
            elif now_s - self._unwanted_s.setdefault(name, now_s) > _HANDOVER_S:
                logger.info("draining and removing %s", name)
                self._deleting.add(name)
                task = asyncio.get_running_loop().create_task(self._delete(name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _delete(self, name: str) -> None:
        try:
            await asyncio.to_thread(serve.delete, name)  # drains first: minutes
        finally:
            self._deleting.discard(name)


def manager_application(args: PlatformArgs, sources: Sources) -> serve.Application:
    deployment = serve.deployment(Manager).options(  # type: ignore[attr-defined]
        name="manager",
        num_replicas=1,
        max_ongoing_requests=1000,  # each ingress keeps one long poll open
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=1.0,
        user_config={"models": [model.model_dump(mode="json") for model in args.models]},
    )
    # Without the models: a change there must reach `reconfigure` and nothing else.
    application: serve.Application = deployment.bind(
        args.model_copy(update={"models": ()}), sources
    )
    return application


def _about_bases(catalog: Catalog) -> tuple[object, ...]:
    """What `plan` reads of a catalog."""
    return catalog.bases, *(one for one in catalog.settings if one.key == "serve")


def _served(spec: BaseSpec, status: ServeStatus) -> ServedBase:
    app = status.applications.get(spec.app_name)
    return ServedBase(
        spec.base, spec.app_name, _is_running(app), "" if app is None else app.message
    )


def _is_running(app: ApplicationStatusOverview | None) -> bool:
    if app is None or app.status == "DELETING":
        return False
    states = [deployment.replica_states for deployment in app.deployments.values()]
    return any(count > 0 for state in states for name, count in state.items() if name == "RUNNING")
