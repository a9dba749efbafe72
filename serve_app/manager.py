"""The manager: one Serve deployment that knows what should be served and makes it so.

Polls the registry (the last good snapshot survives while it is down), turns the configured models
into one Serve application a base version, named by its content and settings (a new version comes
up beside the old one, which goes once the new one answers), and hands ingresses a PlatformView by
long poll. The model list comes as `user_config`: changing it restarts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress

import ray
from ray import serve

from registry.catalog import Catalog
from registry.errors import RegistryError, RegistryUnavailableError
from serve_app.base_admin import BaseChange, change_base
from serve_app.base_plan import plan
from serve_app.config import ModelArgs, PlatformArgs
from serve_app.fleet import Fleet
from serve_app.reports import IngressReport
from serve_app.topology import BaseLine, PlatformView, RegistryReader, ServedBase, Sources

logger = logging.getLogger(__name__)

_STATUS_POLL_S = 0.25  # of Serve, not of the registry: 2 ms of the controller each


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
        self._reports: dict[str, IngressReport] = {}  # the latest, by ingress
        self._changed = asyncio.Condition()
        loop = asyncio.get_running_loop()
        self._fleet = Fleet(sources)
        self._registry: RegistryReader | None = None
        self._catalog: Catalog | None = None  # the last good one
        self._has_changed_registry = False
        self._wish = asyncio.Event()  # something is to be done before the next poll
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
        self._fleet.sleep.hear(report, asyncio.get_running_loop().time())

    async def wake_base(self, digest: str) -> None:
        """A request waits for this base."""
        self._fleet.sleep.wake(digest, asyncio.get_running_loop().time())
        self._wish.set()

    async def bases(self) -> tuple[BaseLine, ...]:
        return self._fleet.lines

    async def base_metrics(self) -> bytes:
        return self._fleet.starts.text(self._fleet.lines)

    async def change_base(self, change: BaseChange) -> None:
        """What an operator wants of a base; see `base_admin`."""
        if self._registry is None or self._catalog is None:
            raise RegistryUnavailableError("the registry was not read yet")
        await change_base(change, self._models, self._catalog, self._registry, self._fleet)
        self._has_changed_registry = True
        self._wish.set()

    async def _run(self) -> None:
        # Before it knows its models it would find every base unwanted and itself ready.
        await self._is_configured.wait()
        self._registry = await asyncio.to_thread(self._sources.open_registry)
        await self._fleet.meet_ingresses()
        loop = asyncio.get_running_loop()
        next_snapshot_s = 0.0
        error: str | None = None
        while True:
            self._wish.clear()
            if loop.time() >= next_snapshot_s or self._has_changed_registry:
                self._has_changed_registry = False
                self._catalog, error = await _refresh(self._registry, self._catalog)
                next_snapshot_s = loop.time() + self._poll_interval_s
            if self._catalog is not None:
                try:
                    await self._reconcile(self._catalog, error)
                except Exception:  # Serve's controller restarting, say: the next round tries again
                    logger.exception("reconciling failed")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wish.wait(), _STATUS_POLL_S)

    async def _reconcile(self, catalog: Catalog, registry_error: str | None) -> None:
        has_gpu = ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
        wanted = plan(self._models, catalog, has_gpu)
        bases = await self._fleet.round(wanted, catalog, asyncio.get_running_loop().time())
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        is_one_node = sum(bool(node["Alive"]) for node in nodes) == 1
        await self._publish(catalog, bases, wanted.missing, is_one_node, registry_error)

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
