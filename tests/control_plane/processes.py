"""The processes of the control plane, each killed and restarted as a whole: the manager with its
registry reader, the ingresses, and the engines that receive the manager's plans."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.serve.exceptions import RayServeException

from registry.catalog import Catalog
from registry.client import Registry
from registry.entities import AdapterVersion
from registry.errors import RegistryError
from serve_app.config import PlatformArgs
from serve_app.control.cached_registry import CachedRegistry
from serve_app.control.manager import Manager
from serve_app.dispatch.activity import Activity, CountsReporter
from serve_app.dispatch.base_handle import BaseAsleepError, BaseHandle
from serve_app.messages import AdapterPlan
from serve_app.platform_view import ServedBase, Sources
from serve_app.tally import ArmKey
from tests.control_plane.clock import VirtualLoop, owned_by
from tests.control_plane.faults import FakeServe, FaultyClient, RegistryFaults
from tests.control_plane.store import Database
from tests.ingress_app import make_gateway
from tests.registry_helpers import ADAPTER_FACTS


class DeadError(RayServeException):
    """Raised by calls to a process that has ended."""


class Reader(CachedRegistry):
    """The registry as a manager or an engine reads it, with its checks in this process: in a
    process of their own they would last seconds each."""

    def __init__(
        self, loop: VirtualLoop, uri: str, cache: Path, client: Any, faults: RegistryFaults
    ) -> None:
        super().__init__(uri, cache)
        self._loop, self._faults = loop, faults
        use_client(self._registry, client, loop)
        quarantine: Any = self._cache._quarantine
        quarantine._now_s = loop.wall_time

    def snapshot(self) -> Catalog:
        try:
            return super().snapshot()
        finally:
            self._registry._adoption.wait()  # its thread is real: one seed, one run
            self._loop.late_s = self._faults.late_s

    def register_adapter(self, folder: Path, name: str, base: str, *_: object) -> None:
        self._registry.register_adapter(folder, name, base=base, facts=ADAPTER_FACTS)

    def check_adapter(self, version: AdapterVersion) -> None:
        raise RegistryError("injected: nothing is checked here")


def use_client(registry: Registry, client: Any, loop: VirtualLoop) -> None:
    registry._store.__dict__["_client"] = client
    quarantine = registry._adoption._quarantine
    quarantine._now_s, quarantine._random_share = loop.wall_time, lambda: 0.5


class Opener:
    """Opens a manager's reader in this process. The copy that Serve would pickle for an engine
    opens none."""

    def __init__(self, open_reader: Callable[[], Reader]) -> None:
        self._open_reader = open_reader

    def __call__(self) -> Reader:
        return self._open_reader()

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()


@dataclass
class Engines:
    """The newest plan by application."""

    plans: dict[str, AdapterPlan] = field(default_factory=dict)
    is_away: bool = False

    async def arrange(self, app_name: str, plan: AdapterPlan) -> int:
        if self.is_away:
            raise RayServeException("injected: no engine answers")
        self.plans[app_name] = plan
        return 0


class Managers:
    """Runs at most one manager at a time; `remote` is Serve's handle of it."""

    def __init__(
        self, loop: VirtualLoop, args: PlatformArgs, open_reader: Callable[[], Reader]
    ) -> None:
        self._loop, self._args, self._opener = loop, args, Opener(open_reader)
        self._numbers = itertools.count()
        self.current: Manager | None = None
        self.engines = Engines()
        self.num_lost_reports = 0  # of the next ones
        self._owner = ""

    async def start(self) -> None:
        self._owner = f"manager {next(self._numbers)}"
        with owned_by(self._owner):
            made = Manager.__new__(Manager)
            await made.__init__(self._args, Sources(self._opener, "no:engine"))  # type: ignore[misc]
            made._plans._send = self.engines.arrange
            models = [model.model_dump(mode="json") for model in self._args.models]
            await made.reconfigure({"models": models})
        self.current = made

    async def kill(self) -> None:
        self.current = None
        self._loop.kill(self._owner)
        await asyncio.sleep(0)

    def counts(self, ingress_id: str) -> bool:
        """True if later counts of this ingress are judged: its first report to a manager only sets
        the starting point."""
        return self.current is not None and ingress_id in self.current._canaries._trials._seen

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, *arguments))

    async def _call(self, name: str, *arguments: Any) -> Any:
        made = self.current
        if made is None:
            raise DeadError("injected: no manager")
        if name == "report" and self.num_lost_reports:
            self.num_lost_reports -= 1
            raise DeadError("injected: the report is lost")
        with owned_by(self._owner):
            task = asyncio.ensure_future(getattr(made, name)(*arguments))
        try:
            return await task
        except asyncio.CancelledError:
            if self.current is made:
                raise
            raise DeadError("injected: the manager died") from None


@dataclass(frozen=True, slots=True)
class Answer:
    """The base to which an ingress sent a request, or the error."""

    name: str
    version: int | None = None
    digest: str = ""
    arm: ArmKey | None = None
    app_name: str = ""
    error: Exception | None = None


class Ingress:
    """The gateway of an ingress, without HTTP and without the side stream."""

    def __init__(
        self,
        name: str,
        managers: Managers,
        loop: VirtualLoop,
        on_view: Callable[[Ingress], None],
    ) -> None:
        self.name = name
        self._managers = managers
        self._tasks: set[asyncio.Task[None]] = set()
        handle: Any = managers
        with owned_by(name):
            self.gateway = make_gateway(handle, name)
            gateway: Any = self.gateway
            gateway.activity = Activity(loop.time)
            gateway.stream.listen = _do_nothing
            gateway.connections = SimpleNamespace(
                start=_nothing, add_base=_nothing, remove_base=_nothing
            )
            gateway.migrations.start = _nothing
            apply = gateway._apply
            gateway._apply = lambda view: (apply(view), on_view(self))
            self.gateway.start(CountsReporter(name, lambda: b""))

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        return self.gateway._tasks

    def ask(self, name: str, key: str | None = None) -> Answer:
        """Routes as a request does; a request for a sleeping base wakes it."""
        try:
            route = self.gateway.route(name, key)
        except BaseAsleepError as error:
            with owned_by(self.name):
                task = asyncio.ensure_future(self._wake(error.base.base.digest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return Answer(name, error=error)
        except Exception as error:
            return Answer(name, error=error)
        self.gateway.activity.enter(route.handle.base.digest)()
        version = route.resolution.adapter or route.resolution.base
        return Answer(name, version.version, version.digest, route.arm, route.handle.app_name)

    async def _wake(self, digest: str) -> None:
        try:
            await self._managers.wake_base.remote(digest)
        except RayServeException:
            return


def opener(serve: FakeServe) -> Any:
    """Replaces `open_base`: the text files of a base are no part of the control plane."""

    async def open_base(base: ServedBase, _: object) -> BaseHandle:
        if not serve.runs(base.app_name):
            raise RayServeException("injected: no engine answers")
        described: Any = SimpleNamespace(limits=None)
        nothing: Any = None
        return BaseHandle(base.base, base.app_name, nothing, described, nothing, base.deployed_s)

    return open_base


def reader_of(
    database: Database,
    loop: VirtualLoop,
    cache: Path,
    faults: RegistryFaults,
    on_write: Callable[[], None],
) -> Reader:
    client = FaultyClient(database.client, faults, on_write)
    return Reader(loop, database.uri, cache, client, faults)


async def _do_nothing(*_: object) -> None:
    return None


def _nothing(*_: object) -> None:
    return None
