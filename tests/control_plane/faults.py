"""Faults of calls: to the registry, to Serve's controller, to the manager.

Every injected fault contains the word "injected": any other log line or error is the product's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, TEMPORARILY_UNAVAILABLE
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException

from tests.control_plane.clock import VirtualLoop

WRITES = ("set_", "delete_", "create_", "update_", "finalize_", "rename_")
START_S, DRAIN_S = 2.0, 3.0  # of an engine


@dataclass(slots=True)
class RegistryFaults:
    """The faults of a process's calls to the registry."""

    is_away: bool = False
    is_unlistable: bool = False  # listings fail, everything else works
    is_read_only: bool = False
    late_s: float = 0.0  # delay of the answer of a read
    # The n-th write from now on fails, with or without its effect; 1: the next one.
    failing_write: int = 0
    has_effect: bool = False
    between_pages: Callable[[], None] | None = None  # called once, when a second page is requested

    def heal(self) -> None:
        self.is_away = self.is_unlistable = self.is_read_only = False
        self.late_s, self.failing_write, self.between_pages = 0.0, 0, None


class FaultyClient:
    """An MlflowClient whose calls fail according to the faults."""

    def __init__(self, client: Any, faults: RegistryFaults, on_write: Callable[[], None]) -> None:
        """`on_write` is called after each write that took effect."""
        self._client = client
        self._faults = faults
        self._on_write = on_write

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not callable(method):
            return method
        is_write = name.startswith(WRITES)

        def call(*arguments: Any, **options: Any) -> Any:
            faults = self._faults
            if faults.is_away or (faults.is_unlistable and name.startswith("search_")):
                raise _unavailable()
            if is_write and faults.is_read_only:
                raise MlflowException("injected: read only", PERMISSION_DENIED)
            if options.get("page_token") and faults.between_pages is not None:
                change, faults.between_pages = faults.between_pages, None
                change()
            is_failing = False
            if is_write and faults.failing_write:
                faults.failing_write -= 1
                is_failing = not faults.failing_write
            if is_failing and not faults.has_effect:
                raise _unavailable()
            result = method(*arguments, **options)
            if is_write:
                self._on_write()
            if is_failing:
                raise _unavailable()
            return result

        return call


def _unavailable() -> MlflowException:
    return MlflowException("injected: the registry does not answer", TEMPORARILY_UNAVAILABLE)


class ServeAwayError(RayServeException):
    pass


@dataclass(slots=True)
class App:
    deployed_s: float
    runs_at_s: float
    status: str = "DEPLOYING"
    gone_at_s: float | None = None


@dataclass
class FakeServe:
    """Serve's controller as a fleet calls it. An application runs after `START_S`; a deleted
    application drains for `DRAIN_S`."""

    loop: VirtualLoop
    on_delete: Callable[[str], None]
    apps: dict[str, App] = field(default_factory=dict)
    is_away: bool = False
    num_failing_starts: int = 0
    is_refusing: bool = False  # refuses new applications

    RunTarget = staticmethod(lambda **fields: SimpleNamespace(**fields))

    def heal(self) -> None:
        self.is_away = self.is_refusing = False
        self.num_failing_starts = 0

    def status(self) -> SimpleNamespace:
        self._check()
        return SimpleNamespace(applications={n: self._overview(a) for n, a in self.apps.items()})

    def run_many(self, targets: list[Any], wait_for_applications_running: bool) -> None:
        self._check()
        for target in targets:
            target.target._bound_deployment._deployment_config.to_proto_bytes()
            if self.is_refusing:
                raise RayTaskError("deploy", "injected", ValueError("injected: refused"))
            now_s = self.loop.time()
            app = App(now_s, now_s + START_S)
            if self.num_failing_starts:
                self.num_failing_starts -= 1
                app.status = "DEPLOY_FAILED"
            self.apps[target.name] = app

    def delete(self, name: str, _blocking: bool) -> None:
        self._check()
        self.on_delete(name)
        self.apps[name].status = "DELETING"
        self.apps[name].gone_at_s = self.loop.time() + DRAIN_S

    def scale(self, name: str, num_replicas: int) -> None:
        self._check()
        if name not in self.apps:
            raise RayTaskError("scale", "injected", ValueError(f"{name} is not found"))

    def runs(self, name: str) -> bool:
        self._pass()
        app = self.apps.get(name)
        if app is None or app.status in ("DEPLOY_FAILED", "DELETING"):
            return False
        return self.loop.time() >= app.runs_at_s

    def kill_engines(self, name: str) -> None:
        """Kills an application's engines; they return after the time of a start."""
        self.apps[name].runs_at_s = self.loop.time() + START_S

    def _check(self) -> None:
        self._pass()
        if self.is_away:
            raise ServeAwayError("injected: the controller does not answer")

    def _pass(self) -> None:
        now_s = self.loop.time()
        for name, app in tuple(self.apps.items()):
            if app.gone_at_s is not None and now_s >= app.gone_at_s:
                del self.apps[name]

    def _overview(self, app: App) -> SimpleNamespace:
        runs = self.loop.time() >= app.runs_at_s and app.status != "DEPLOY_FAILED"
        states = {"STOPPING" if app.status == "DELETING" else "RUNNING" if runs else "STARTING": 1}
        status = "RUNNING" if runs and app.status == "DEPLOYING" else app.status
        return SimpleNamespace(
            status=status,
            message="",
            last_deployed_time_s=app.deployed_s,
            deployments={"engine": SimpleNamespace(replica_states=states, message="")},
        )
