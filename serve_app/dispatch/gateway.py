"""What an ingress replica knows and holds, apart from HTTP: the platform's view, a handle and the
text files of each running base, and its end of the side stream.

Follows the manager by long poll; while the manager is away the last view stays. Handles are kept
by application, never by a client's string.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from engine.errors import InvalidRequestError, UnsupportedModelError
from registry.catalog import Resolution
from registry.entities import AdapterVersion
from registry.errors import NotFoundError, RegistryUnavailableError
from registry.names import parse_model
from serve_app.canary.arm_stats import ArmStats
from serve_app.canary.split import Traffic, read_traffic
from serve_app.dispatch.activity import Activity, CountsReporter
from serve_app.dispatch.base_handle import BaseHandle, Route, check_supported, not_yet, open_front
from serve_app.dispatch.generation import STAY, CallParameters
from serve_app.dispatch.migrations import Migrations
from serve_app.errors import ServiceUnavailableError, UnservableError
from serve_app.messages import REPORT_INTERVAL_S, IngressReport
from serve_app.platform_view import PlatformView, ServedBase
from serve_app.routing import state as routing_state
from serve_app.routing.connections import EngineConnections
from serve_app.stream.server import StreamServer
from serve_app.tally import ArmKey
from serve_app.tasks import check_running, keep, spawn
from serve_app.text_workers.pool import TextPool

logger = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_RETRY_S = 0.5
_STOPPING_RETRY_S = 5
_COUNTS_EVERY = 3  # reports: an ingress that is killed takes with it what it counted since


class Gateway:
    def __init__(self, manager: DeploymentHandle[object], ingress_id: str) -> None:
        self.stream = StreamServer()
        self.attendance = EngineConnections(self.stream, self._find_adapter)
        self.migrations = Migrations(self.stream, routing_state, ingress_id)
        self.attendance.on_replicas = self.migrations.replicas_changed
        self.view: PlatformView | None = None
        self.manager = manager
        self.arms = ArmStats()
        self._traffic = Traffic()
        self._draw = random.random
        self._ingress_id = ingress_id
        self.activity = Activity()
        self.texts: TextPool | None = None  # set by the ingress; tries the templates of new bases
        self.counts = CountsReporter(ingress_id)
        self._changed = asyncio.Event()
        self._revision = ""  # of the last view that came
        self._fronts: dict[str, BaseHandle] = {}  # by base digest
        self._resting: dict[str, BaseHandle] = {}  # of bases that sleep, or are about to
        self._once_ready: set[str] = set()  # base digests
        self._unusable: dict[str, str] = {}  # base digest -> why its text files cannot be used
        # By application and deployment.
        self._opening: dict[tuple[str, float], asyncio.Task[None]] = {}
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        self.attendance.start()
        self.migrations.start()
        self._tasks = (keep(self._follow, "follow-manager"), keep(self._report, "report"))

    def check_tasks(self) -> None:
        """Raises RuntimeError where this ingress does not follow the manager any more."""
        check_running(*self._tasks)

    @property
    def is_ready(self) -> bool:
        view = self.view
        return (
            view is not None
            and view.is_ready
            and all(b.base.digest in self._fronts for b in view.bases if b.is_awaited)
        )

    @property
    def obstacles(self) -> list[str]:
        """What keeps the server from being ready and will not pass by waiting."""
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
    def is_healthy(self) -> bool:
        """No engine that worked is gone or stuck, and the manager is followed. A base that still
        loads is no illness."""
        view = self.view
        if self.migrations.has_silent_engine or any(task.done() for task in self._tasks):
            return False
        return view is None or all(
            base.is_running
            for base in view.bases
            if base.base.digest in self._once_ready and self.stand_in(base.base.digest) is None
        )

    def route(self, model: str, key: str | None) -> Route:
        """As `resolve`, with the split of a name that has a canary or a shadow. `key`: who asks;
        the same one always sees the same arm."""
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
        if arm == "canary" and version.base_digest not in self._fronts:
            missed = self.served(version.base_digest)
            arm, version = "stable", split.stable
        of_version = f"{version.name}@{version.version}"
        front, resolution = self.resolve(model if arm == "stable" else of_version)
        shadow = split.copied_to(version, self._draw)
        key_of_arm = ArmKey(split.name, arm, version.version, version.digest)
        is_asleep = missed is not None and missed.state == "asleep"
        return Route(front, resolution, key_of_arm, shadow, missed if is_asleep else None)

    def resolve(self, model: str) -> tuple[BaseHandle, Resolution]:
        """Pure look-ups. NotFoundError or InvalidNameError is the client's, the others are ours."""
        view = self.view
        if view is None:
            raise ServiceUnavailableError("The server is starting.", 2)
        with _registry_read(view):
            model = view.catalog.registered(model)
            resolution = view.catalog.resolve(model)
        check_supported(resolution)
        digest = resolution.base.digest
        front = self._fronts.get(digest)
        if front is not None:
            return front, resolution
        if (why := self._unusable.get(digest)) is not None:
            raise UnservableError(
                f"The base model {resolution.base.name!r} cannot be served: {why}", 60
            )
        old = self.stand_in(digest)
        if old and resolution.adapter is None and parse_model(model)[0].version is None:
            return old, Resolution(old.base)
        for base in view.bases:
            if base.base.digest == digest:
                raise not_yet(base)
        raise NotFoundError(
            f"{resolution.base.name!r} version {resolution.base.version} is registered "
            "but not served here"
        )

    @property
    def fronts(self) -> tuple[BaseHandle, ...]:
        """Of all bases that can be called now."""
        return tuple(self._fronts.values())

    def lane(self, front: BaseHandle) -> CallParameters:
        base = self.served(front.base.digest)
        return CallParameters(
            self.stream,
            front.handle,
            front.description.limits,
            front.app_name,
            front.base.name,
            STAY if base is None else base.model.migration,
        )

    def stand_in(self, digest: str) -> BaseHandle | None:
        """The front of the version before, while this one only starts."""
        assert self.view is not None
        for base in self.view.bases:
            if base.replaced_by == digest:
                return self._fronts.get(base.base.digest)
        return None

    def only_model(self) -> str:
        """The base of a server with one base."""
        names = set() if self.view is None else {base.base.name for base in self.view.bases}
        if not names:
            raise ServiceUnavailableError("The models are loading.", 2)
        if len(names) > 1:
            raise InvalidRequestError("model: required, more than one base is served.", "model")
        return names.pop()

    def _find_adapter(self, digest: str) -> AdapterVersion | None:
        adapters = () if self.view is None else self.view.catalog.adapters
        return next((one for one in adapters if one.digest == digest), None)

    def served(self, digest: str) -> ServedBase | None:
        bases = () if self.view is None else self.view.bases
        return next((base for base in bases if base.base.digest == digest), None)

    def is_settled(self, digest: str) -> bool:
        """Whether it can be called, or never will."""
        return digest in self._fronts or digest in self._unusable

    async def change(self, timeout_s: float) -> None:
        """Returns at the next change of what can be called, or at the time-out."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def max_model_len(self, base_digest: str) -> int | None:
        """In tokens, as a request may use it; None: not known before the base has started."""
        front = self._fronts.get(base_digest) or self._resting.get(base_digest)
        return None if front is None else front.description.limits.max_request_tokens

    async def _follow(self) -> None:
        while True:
            try:
                await self._follow_once()
            except (RayError, RayServeException) as error:
                logger.warning("the manager does not answer: %s", error)
                await asyncio.sleep(_RETRY_S)
            except Exception:  # of one view; the ingress follows the next one
                logger.exception("a view was not taken")
                await asyncio.sleep(_RETRY_S)

    async def _follow_once(self) -> None:
        """Waits for a view of another revision and takes it."""
        view = await self.manager.view.remote(self._revision, _LONG_POLL_S)
        if view is None:
            return
        await self.stream.listen(  # where that fails, the same view is asked for again
            "127.0.0.1" if view.is_one_node else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        )
        self._revision = view.revision  # also of a view that cannot be taken: the next one comes
        self._take(view)

    async def _report(self) -> None:
        for number in count():
            fronts = tuple(front.app_name for front in self._fronts.values())
            report = IngressReport(
                self._ingress_id,
                self.activity.report(),
                fronts,
                self._asleep(),
                self.arms.tallies(),
                self.migrations.quarantine.told(),
                self.view is not None and self.view.is_draining,
                None if number % _COUNTS_EVERY else self.counts.next(),
            )
            try:
                answer = await self.manager.report.remote(report)
                self.counts.was_taken |= report.counts is not None
                self.attendance.num_ingresses = answer.num_ingresses
                self.migrations.quarantine.learn(answer.quarantined)
            except (RayError, RayServeException) as error:  # the next one tells it anew
                logger.warning("the manager took no report: %s", error)
            except Exception:
                logger.exception("a report failed")
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _asleep(self) -> tuple[tuple[str, float], ...]:
        bases = () if self.view is None else self.view.bases
        return tuple((one.base.digest, one.sleep_epoch) for one in bases if one.state == "asleep")

    def _take(self, view: PlatformView) -> None:
        self.view = view
        running = {base.base.digest: base for base in view.bases if base.is_running}
        vetoes = {(name, digest): reason for name, digest, reason in view.canary.vetoes}
        served = {base.base.digest for base in view.bases}
        self._traffic = read_traffic(view.catalog, running, vetoes, served)
        self.arms.keep({(one.name, one.digest) for one in view.catalog.adapters})
        asleep = {b.base.digest for b in view.bases if b.state == "asleep" or b.is_waking}
        self._once_ready -= asleep  # that nothing answers there is no illness
        for digest, front in tuple(self._fronts.items()):
            if digest not in running:
                del self._fronts[digest]
                self.attendance.leave(front.app_name)
                if digest in asleep:
                    self._resting[digest] = front
                logger.info("%s gets no more requests", front.app_name)
        for digest in self._resting.keys() - {base.base.digest for base in view.bases}:
            del self._resting[digest]
        for digest, base in running.items():
            known = self._fronts.get(digest) or self._resting.pop(digest, None)
            if known is not None and known.is_of(base):
                self._admit(known)
            elif (key := (base.app_name, base.deployed_s)) not in self._opening:
                self._opening[key] = spawn(self._open(base), "open-base")
        self._tell()

    def _admit(self, front: BaseHandle) -> None:
        self._fronts[front.base.digest] = front
        limits = front.description.limits
        self.attendance.enter(front.app_name, front.base.name, front.handle, limits)
        self._once_ready.add(front.base.digest)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _open(self, base: ServedBase) -> None:
        """Until it works or the base is not wanted any more."""
        try:
            while self._wants(base):
                try:
                    front = await open_front(base, self.texts)
                except (RayError, RayServeException) as error:
                    logger.warning("%s does not answer yet: %s", base.app_name, error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                except UnsupportedModelError as error:  # registered around our checks
                    logger.error("%s cannot be served: %s", base.app_name, error)
                    self._unusable[base.base.digest] = str(error)
                    return
                except Exception:  # such as a worker that was killed while it tried the template
                    logger.exception("%s could not be opened; it is tried again", base.app_name)
                    await asyncio.sleep(_RETRY_S)
                    continue
                if self._wants(base):
                    self._admit(front)
                    self._tell()
                    return
        finally:
            del self._opening[base.app_name, base.deployed_s]

    def _wants(self, base: ServedBase) -> bool:
        assert self.view is not None
        return any(
            b.is_running and (b.app_name, b.deployed_s) == (base.app_name, base.deployed_s)
            for b in self.view.bases
        )


@contextmanager
def _registry_read(view: PlatformView) -> Iterator[None]:
    """A name that is unknown while the registry cannot be read may be new in it: 503, not 404."""
    try:
        yield
    except NotFoundError as error:
        if view.registry_error is None:
            raise
        raise RegistryUnavailableError(str(error)) from None
