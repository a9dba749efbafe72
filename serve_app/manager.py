"""The manager: one Serve deployment that knows what should be served and makes it so.

Polls the registry (the last good snapshot survives while it is down), turns the configured models
into one Serve application a base version, named by its content and settings (a new version comes
up beside the old one, which goes once the new one answers), and hands ingresses a PlatformView by
long poll. The model list comes as `user_config`: changing it restarts nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.schema import ApplicationStatusOverview, ServeStatus

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import (
    InvalidNameError,
    NotFoundError,
    RegistryError,
    RegistryUnavailableError,
)
from serve_app.adapter_admin import AdapterAdmin, AdapterChange
from serve_app.adapter_plan import AdapterArranger
from serve_app.config import ModelArgs, PlatformArgs
from serve_app.replica import base_application
from serve_app.reports import IngressReport
from serve_app.topology import BaseSpec, PlatformView, RegistryReader, ServedBase, Sources

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
        settings = hashlib.sha256(model.model_dump_json().encode() + device.encode()).hexdigest()
        name = re.sub(r"[^A-Za-z0-9._-]", "-", base.name)
        app_name = f"{APP_PREFIX}{name}--{base.digest[:12]}-{settings[:8]}"
        specs[base.digest] = BaseSpec(base, model, device, app_name)
    return Plan(tuple(specs.values()), tuple(missing))


class Manager:
    """Wrapped by `manager_application`. One replica; ingresses go on without it for a while."""

    async def __init__(self, args: PlatformArgs, sources: Sources) -> None:  # type: ignore[misc]
        self._poll_interval_s = args.registry.poll_interval_s
        self._sources = sources
        self._models: tuple[ModelArgs, ...] = ()
        self._is_configured = asyncio.Event()  # Serve calls `reconfigure` after this constructor
        self._incarnation = secrets.token_hex(4)
        self._num_views = 0
        self._view: PlatformView | None = None
        self._arranger = AdapterArranger(self._incarnation, _HANDOVER_S)
        self._adapter_admin = AdapterAdmin()
        self._registry: RegistryReader | None = None
        self._has_changed_registry = False  # by us: it is looked at before the next poll
        self._reports: dict[str, IngressReport] = {}  # the latest, by ingress
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

    async def change_adapter(self, change: AdapterChange) -> AdapterVersion | None:
        """What an operator wants of an adapter; see `adapter_admin`."""
        if self._registry is None:
            raise RegistryUnavailableError("the registry was not read yet")
        adapter = await self._adapter_admin.change(change, self._registry)
        self._has_changed_registry = True
        return adapter

    async def _run(self) -> None:
        # Before it knows its models it would find every base unwanted and itself ready.
        await self._is_configured.wait()
        self._registry = await asyncio.to_thread(self._sources.open_registry)
        loop = asyncio.get_running_loop()
        next_snapshot_s = 0.0
        catalog: Catalog | None = None
        error: str | None = None
        while True:
            if loop.time() >= next_snapshot_s or self._has_changed_registry:
                self._has_changed_registry = False
                catalog, error = await _refresh(self._registry, catalog)
                next_snapshot_s = loop.time() + self._poll_interval_s
            if catalog is not None:
                try:
                    await self._reconcile(catalog, error)
                except Exception:  # Serve's controller restarting, say: the next round tries again
                    logger.exception("reconciling failed")
            await asyncio.sleep(_STATUS_POLL_S)

    async def _reconcile(self, catalog: Catalog, registry_error: str | None) -> None:
        has_gpu = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
        wanted = plan(self._models, catalog, has_gpu)
        status: ServeStatus = await asyncio.to_thread(serve.status)
        await self._create(wanted.specs, status)
        bases = tuple(_served(spec, status) for spec in wanted.specs)
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        is_one_node = sum(bool(node["Alive"]) for node in nodes) == 1
        await self._publish(catalog, bases, wanted.missing, is_one_node, registry_error)
        running = {base.base.digest: base.app_name for base in bases if base.is_running}
        self._arranger.update(catalog, running)
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
    ) -> None:
        old = self._view
        if old is not None and old.catalog.revision == catalog.revision:
            known = (old.bases, old.missing, old.is_one_node, old.registry_error)
            if known == (bases, missing, is_one_node, registry_error):
                return
        self._num_views += 1
        revision = f"{self._incarnation}-{self._num_views}"
        async with self._changed:
            self._view = PlatformView(
                revision, catalog, bases, missing, is_one_node, registry_error
            )
            self._changed.notify_all()

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


async def _refresh(
    registry: RegistryReader, known: Catalog | None
) -> tuple[Catalog | None, str | None]:
    try:
        return await asyncio.to_thread(registry.snapshot), None
    except RegistryError as error:
        logger.warning("registry not readable, going on with what is known: %s", error)
        return known, str(error)


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
