"""The models that an ingress replica serves: the platform's view, and a handle with the text files
of each running base. Resolves names to handles.

Follows the manager by long poll and reports to it; while the manager is away the last view stays.
Handles are kept by application, never by a client's string.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count

import ray
from ray.serve.handle import DeploymentHandle

from engine.errors import InvalidRequestError, UnsupportedModelError
from registry.catalog import Resolution
from registry.entities import AdapterVersion
from registry.errors import NotFoundError, RefusedVersionError, RegistryUnavailableError
from registry.names import parse_model
from serve_app.admission.queue import AdmissionQueues
from serve_app.canary.arm_stats import ArmStats
from serve_app.canary.split import Traffic, read_traffic
from serve_app.config import FairnessArgs
from serve_app.dispatch.activity import Activity, CountsReporter
from serve_app.dispatch.base_handle import (
    BaseHandle,
    Route,
    check_supported,
    open_base,
    unavailable,
)
from serve_app.dispatch.migrations import Migrations
from serve_app.errors import ServiceUnavailableError, UnservableError
from serve_app.messages import REPORT_INTERVAL_S, Backlog, IngressReport
from serve_app.platform_view import PlatformView, ServedBase
from serve_app.ray_calls import RAY_ERRORS
from serve_app.routing import state as routing
from serve_app.routing.connections import EngineConnections
from serve_app.stream.server import StreamServer
from serve_app.tally import ArmKey
from serve_app.tasks import check_running, keep, spawn
from serve_app.text_workers.pool import TextPool

logger = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_RETRY_S = 0.5
_STOPPING_RETRY_S = 5
_COUNTS_EVERY = 3  # reports; an ingress that is killed loses its counts since the last of them


class Gateway:
    def __init__(
        self,
        manager: DeploymentHandle[object],
        ingress_id: str,
        fairness: FairnessArgs,
        texts: TextPool | None,
        *,
        is_proven: bool,
        has_keys: bool,
    ) -> None:
        """`texts` tries the chat templates of new bases; None: this process does. `is_proven`,
        `has_keys`: see `Tenants`."""
        self.manager = manager
        self.queues = queues = AdmissionQueues(
            fairness, ingress_id, is_proven=is_proven, has_keys=has_keys
        )
        self.stream = StreamServer(routing.ViewFeed(queues.wake))
        self.migrations = Migrations(
            self.stream, routing.placed_at, routing.deprioritise, ingress_id
        )
        self.connections = EngineConnections(
            self.stream, queues.placed, self.migrations.replicas_changed
        )
        self.view: PlatformView | None = None
        self.num_ingresses = 1  # share the traffic, this one included
        self.arms = ArmStats()
        self.activity = Activity()
        self.ingress_id = ingress_id
        self._texts = texts
        self._traffic = Traffic()
        self._draw = random.random
        self._changed = asyncio.Event()
        self._revision = ""  # of the last view that arrived
        self._handles: dict[str, BaseHandle] = {}  # by base digest
        self._resting: dict[str, BaseHandle] = {}  # of bases that sleep, or are about to
        self._once_ready: set[str] = set()  # base digests
        self._unusable: dict[str, str] = {}  # base digest -> why its text files cannot be used
        # By application and deployment time.
        self._opening: dict[tuple[str, float], asyncio.Task[None]] = {}
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self, counts: CountsReporter) -> None:
        """Begins to follow the manager and to report to it. `counts` are part of the reports."""
        self.connections.start()
        self.migrations.start()
        report = keep(partial(self._report, counts), "report")
        self._tasks = (keep(self._follow, "follow-manager"), report)

    def check_tasks(self) -> None:
        """Raises RuntimeError if this ingress no longer follows the manager."""
        check_running(*self._tasks)

    @property
    def has_caught_up(self) -> bool:
        """True once every base that runs can be called, or never will be."""
        return self.view is not None and not self._opening

    @property
    def is_ready(self) -> bool:
        view = self.view
        return (
            view is not None
            and view.is_ready
            and all(b.base.digest in self._handles for b in view.bases if b.is_awaited)
        )

    @property
    def obstacles(self) -> list[str]:
        """The reasons why the server is not ready that waiting does not remove."""
        view = self.view
        if view is None:
            return []
        if view.is_draining:
            return ["the server is being stopped"]
        names = {base.base.digest: base.base.name for base in view.bases}
        failed = {b.base.digest: b.message for b in view.bases if b.state == "failed" and b.message}
        return [f"not registered: {name}" for name in view.missing] + [
            f"{names[digest]}: {why}"
            for digest, why in (failed | self._unusable).items()
            if digest in names
        ]

    @property
    def refusals(self) -> list[str]:
        """The obstacles that another start of the same configuration would meet again."""
        bases = () if self.view is None else self.view.bases
        return [f"{b.base.name}: {b.message}" for b in bases if b.is_awaited and b.is_refused]

    @property
    def is_healthy(self) -> bool:
        """True unless an engine that was serving has died or stalled, or this ingress no longer
        follows the manager. Bases that are still loading do not count."""
        view = self.view
        if self.migrations.has_silent_engine or any(task.done() for task in self._tasks):
            return False
        return view is None or all(
            base.is_running
            for base in view.bases
            if base.base.digest in self._once_ready and self.fallback(base.base.digest) is None
        )

    def route(self, model: str, key: str | None) -> Route:
        """Resolves a name and its traffic split, if it has a canary or a shadow; several adapters
        and adapters with a weight are never split. `key` identifies the client: the same key always
        gets the same arm. Raises the errors of `resolve`."""
        if self.view is not None:
            if self.view.is_draining:
                raise ServiceUnavailableError("The server is being stopped.", _STOPPING_RETRY_S)
            with _registry_read(self.view):
                model = self.view.catalog.registered(model)
        split = self._traffic.split_of(model)
        if split is None:
            return Route(*self.resolve(model))
        arm, version = split.choose(key, self._draw)
        missed: ServedBase | None = None
        if arm == "canary" and version.base_digest not in self._handles:
            missed = self.served(version.base_digest)
            arm, version = "stable", split.stable
        of_version = f"{version.name}@{version.version}"
        handle, resolution = self.resolve(model if arm == "stable" else of_version)
        shadow = split.copied_to(version, self._draw)
        key_of_arm = ArmKey(split.name, arm, version.version, version.digest)
        is_asleep = missed is not None and missed.state == "asleep"
        return Route(handle, resolution, key_of_arm, shadow, missed if is_asleep else None)

    def resolve(self, model: str) -> tuple[BaseHandle, Resolution]:
        """Resolves a name by look-ups only. NotFoundError and InvalidNameError are the client's
        fault, other errors the server's."""
        view, resolution = self.find(model)
        digest = resolution.base.digest
        handle = self._handles.get(digest)
        if handle is not None:
            return handle, resolution
        if (why := self._unusable.get(digest)) is not None:
            raise UnservableError(
                f"The base model {resolution.base.name!r} cannot be served: {why}", 60
            )
        old = self.fallback(digest)
        name = view.catalog.registered(model)
        if old and resolution.adapter is None and parse_model(name)[0].version is None:
            return old, Resolution(old.base)
        for base in view.bases:
            if base.base.digest == digest:
                raise unavailable(base)
        raise NotFoundError(
            f"{resolution.base.name!r} version {resolution.base.version} is registered "
            "but not served here"
        )

    def find(self, model: str) -> tuple[PlatformView, Resolution]:
        """Resolves a name in the present view, whether or not its base can be called. Raises as
        `resolve`."""
        view = self.view
        if view is None:
            raise ServiceUnavailableError("The server is starting.", 2)
        with _registry_read(view):
            resolution = view.catalog.resolve_request(model)
        check_supported(resolution)
        return view, resolution

    @property
    def handles(self) -> tuple[BaseHandle, ...]:
        """The handles of all bases that can be called now."""
        return tuple(self._handles.values())

    def fallback(self, digest: str) -> BaseHandle | None:
        """Returns the handle of the previous version while this version of the base starts."""
        assert self.view is not None
        for base in self.view.bases:
            if base.replaced_by == digest:
                return self._handles.get(base.base.digest)
        return None

    def only_model(self) -> str:
        """Returns the name of the base if the server has only one; raises InvalidRequestError if it
        has several."""
        names = set() if self.view is None else {base.base.name for base in self.view.bases}
        if not names:
            raise ServiceUnavailableError("The models are loading.", 2)
        if len(names) > 1:
            raise InvalidRequestError("model: required, more than one base is served.", "model")
        return names.pop()

    def cache_salt(self, tenant: str, client_salt: str | None) -> str:
        """Returns the prefix cache salt of a request whose model is resolved."""
        assert self.view is not None
        key = self.view.cache_salt_key
        return self.queues.tenants.cache_salt(key, tenant, client_salt or "")

    def find_adapter(self, digest: str) -> AdapterVersion | None:
        adapters = () if self.view is None else self.view.catalog.adapters
        return next((adapter for adapter in adapters if adapter.digest == digest), None)

    def served(self, digest: str) -> ServedBase | None:
        bases = () if self.view is None else self.view.bases
        return next((base for base in bases if base.base.digest == digest), None)

    def is_settled(self, digest: str) -> bool:
        """Returns True if the base can be called, or never will be."""
        return digest in self._handles or digest in self._unusable

    async def change(self, timeout_s: float) -> None:
        """Returns at the next change of the bases that can be called, or at the time-out."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def max_model_len(self, base_digest: str) -> int | None:
        """Returns the tokens that a request may use; None until the base has started once."""
        handle = self._handles.get(base_digest) or self._resting.get(base_digest)
        return None if handle is None else handle.description.limits.max_request_tokens

    async def _follow(self) -> None:
        while True:
            try:
                view = await self.manager.view.remote(self._revision, _LONG_POLL_S)
                if view is not None:  # of another revision
                    # If it fails, the same view is fetched again.
                    await self.stream.listen(
                        "127.0.0.1" if view.is_one_node else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
                    )
                    self._revision = view.revision  # even if the view cannot be applied
                    self._apply(view)
            except Exception as error:  # no answer, or of this view: the ingress follows the next
                _log_failure("could not follow the manager", error)
                await asyncio.sleep(_RETRY_S)

    async def _report(self, counts: CountsReporter) -> None:
        for number in count():
            report = IngressReport(
                self.ingress_id,
                self.activity.report(self._backlog),
                tuple(handle.app_name for handle in self.handles),
                self._asleep(),
                self.arms.counts(),
                self.migrations.quarantine.export(),
                self.view is not None and self.view.is_draining,
                None if number % _COUNTS_EVERY else counts.next(),
                counts.figures(),
            )
            try:
                answer = await self.manager.report.remote(report)
                counts.was_taken |= report.counts is not None
                self.num_ingresses = answer.num_ingresses
                self.migrations.quarantine.merge(answer.quarantined)
            except Exception as error:  # retried with the next report
                _log_failure("could not report to the manager", error)
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _backlog(self, digest: str) -> Backlog:
        handle = self._handles.get(digest)
        return Backlog() if handle is None else self.queues.backlog(handle.app_name)

    def _asleep(self) -> tuple[tuple[str, float], ...]:
        bases = () if self.view is None else self.view.bases
        return tuple((one.base.digest, one.sleep_epoch) for one in bases if one.state == "asleep")

    def _apply(self, view: PlatformView) -> None:
        self.view = view
        running = {base.base.digest: base for base in view.bases if base.is_running}
        vetoes = {(name, digest): reason for name, digest, reason in view.canary.vetoes}
        served = {base.base.digest for base in view.bases}
        self._traffic = read_traffic(view.catalog, running, vetoes, served)
        self.arms.retain({(adapter.name, adapter.digest) for adapter in view.catalog.adapters})
        asleep = {b.base.digest for b in view.bases if b.state == "asleep" or b.is_waking}
        self._once_ready -= asleep  # a base without engines is healthy then
        for digest, handle in tuple(self._handles.items()):
            if digest not in running:
                del self._handles[digest]
                self.connections.remove_base(handle.app_name)
                if digest in asleep:
                    self._resting[digest] = handle
                logger.info("%s gets no more requests", handle.app_name)
        for digest in self._resting.keys() - served:
            del self._resting[digest]
        for digest, base in running.items():
            known = self._handles.get(digest) or self._resting.pop(digest, None)
            if known is not None and known.serves(base):
                self._admit(known)
            elif (key := (base.app_name, base.deployed_s)) not in self._opening:
                self._opening[key] = spawn(self._open(base), "open-base")
        self._signal_change()

    def _admit(self, handle: BaseHandle) -> None:
        """Sends requests to this handle from now on, with the migration settings of the view."""
        if (base := self.served(handle.base.digest)) is not None:
            handle = replace(handle, migration=base.model.migration)
        self._handles[handle.base.digest] = handle
        limits = handle.description.limits
        self.connections.add_base(handle.app_name, handle.base.name, handle.handle, limits)
        self._once_ready.add(handle.base.digest)

    def _signal_change(self) -> None:
        self.queues.app_names = {handle.app_name for handle in self.handles}
        self._changed.set()
        self._changed = asyncio.Event()

    async def _open(self, base: ServedBase) -> None:
        """Opens a base: tries until it succeeds or the base is not wanted any more."""
        try:
            while self._wants(base):
                try:
                    handle = await open_base(base, self._texts)
                except UnsupportedModelError as error:  # registered without the checks
                    logger.error("%s cannot be served: %s", base.app_name, error)
                    self._unusable[base.base.digest] = str(error)
                    return
                except Exception as error:  # such as no answer yet, or a killed text worker
                    _log_failure(f"could not open {base.app_name}, retrying", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                if self._wants(base):
                    self._admit(handle)
                    self._signal_change()
                    return
        finally:
            del self._opening[base.app_name, base.deployed_s]

    def _wants(self, base: ServedBase) -> bool:
        assert self.view is not None
        return any(
            b.is_running and (b.app_name, b.deployed_s) == (base.app_name, base.deployed_s)
            for b in self.view.bases
        )


def _log_failure(words: str, error: Exception) -> None:
    """Logs a failure after which work is tried again, with a traceback unless a call failed."""
    is_call = isinstance(error, (*RAY_ERRORS, TimeoutError))
    level, fault = (logging.WARNING, None) if is_call else (logging.ERROR, error)
    logger.log(level, "%s: %s", words, str(error) or repr(error), exc_info=fault)


@contextmanager
def _registry_read(view: PlatformView) -> Iterator[None]:
    """Turns 404 into 503 while the registry cannot be read: an unknown name may be new there."""
    try:
        yield
    except NotFoundError as error:
        if view.registry_error is None or isinstance(error, RefusedVersionError):
            raise
        raise RegistryUnavailableError(str(error)) from None
