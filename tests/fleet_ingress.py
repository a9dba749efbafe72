"""An ingress process of a fleet: the whole ASGI application with its gateway, queues, router and
side stream, and a manager that only reports the platform. `leftovers` names everything that an
ingress without a request must not have.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import ray.serve.context
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from engine.admission import EngineLimits
from engine.types import EngineLoad
from serve_app.admission.queue import AdmissionQueue
from serve_app.api.ingress import ConcurrencyLimitMiddleware, build_asgi
from serve_app.api.state import IngressState, make_accounts
from serve_app.config import FairnessArgs, IngressArgs
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.dispatch.warm_ups import WarmUps
from serve_app.messages import Backlog, BaseDescription
from serve_app.openai.json_body import parse_body
from serve_app.platform_view import ServedBase
from serve_app.routing import state as routing
from serve_app.routing.view import ReplicaView
from serve_app.tally import OUTCOMES, ArmKey
from serve_app.tenancy.limits import Accounts
from serve_app.text.base_text import BaseText
from serve_app.text_workers.pool import INLINE_BODY_BYTES, TextPool
from tests.fleet_actor import PROCESS, Process
from tests.fleet_manager import Manager
from tests.fleet_node import EngineNode
from tests.fleet_serve import ServeRouter
from tests.ingress_app import make_observer
from tests.virtual_loop import VirtualLoop


class _PerProcess:
    """Replaces the states of the process in `routing.state`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(PROCESS.get().states, name)


class _ConnectedPerProcess:
    def __getattr__(self, name: str) -> Any:
        return getattr(PROCESS.get().states.connected, name)


@contextmanager
def processes() -> Iterator[None]:
    """Gives the contexts of different processes different states in `routing.state`."""
    names = {"_states": _PerProcess(), "connected": _ConnectedPerProcess()}
    before = {name: getattr(routing, name) for name in names}
    for name, value in names.items():
        setattr(routing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(routing, name, value)


class _Texts(TextPool):
    """Reads long bodies without its processes, whose time is real."""

    async def parse(self, kind: Any, raw: bytes) -> Any:
        if len(raw) > INLINE_BODY_BYTES:
            await asyncio.sleep(0.02)
        return parse_body(kind, raw)

    async def run(
        self, function: Any, body: Any, raw: bytes, text: BaseText, description: BaseDescription
    ) -> Any:
        if len(raw) > INLINE_BODY_BYTES:
            await asyncio.sleep(0.02)
        return function(body, text, description.limits)


class FleetIngress:
    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        manager: Manager,
        front: Callable[[DeploymentHandle[object]], BaseHandle],
        args: IngressArgs,
        fairness: FairnessArgs,
        policy: str,
        max_queued: int,
    ) -> None:
        self.name = name
        self.process = Process(loop, name)
        self.app_name = manager.platform.bases[0].app_name
        self.router = ServeRouter(loop, self.process, self.app_name, policy, max_queued)
        self.watched: list[tuple[ArmKey, str]] = []  # and the request; empty: of a shadow copy
        self.process.run(self._open, manager, front(self.router.handle()), args, fairness)

    def _open(
        self, manager: Manager, front: BaseHandle, args: IngressArgs, fairness: FairnessArgs
    ) -> None:
        """Constructs the same parts as `Ingress.__init__`."""
        handle = cast("DeploymentHandle[object]", manager)
        self.gateway = gateway = Gateway(
            handle, self.name, fairness, None, is_proven=True, has_keys=False
        )
        self._records = make_observer(self.name)
        self.state = IngressState(args, gateway, _Texts(1), self._records)
        self.state.accounts = make_accounts(gateway)
        gateway._resting[front.base.digest] = front  # else it would be looked for in Ray
        self._count_watches()
        self.app: ASGIApp = build_asgi(self.state)
        gateway.start(self.state.counts)
        self.accounts.start()
        self._warm_ups = WarmUps(gateway)
        self._warm_ups.start()

    def _count_watches(self) -> None:
        watch = self.gateway.arms.begin

        def counted(key: Any) -> Any:
            context = ray.serve.context._get_serve_request_context()
            self.watched.append((key, context.request_id))
            return watch(key)

        self.gateway.arms.begin = counted  # type: ignore[method-assign]

    @property
    def accounts(self) -> Accounts:
        assert self.state.accounts is not None
        return self.state.accounts

    @property
    def bounded(self) -> ConcurrencyLimitMiddleware:
        app: Any = self.app
        while not isinstance(app, ConcurrencyLimitMiddleware):
            app = app._app
        return app

    @property
    def queues(self) -> Iterable[AdmissionQueue]:
        return self.state.queues._queues.values()

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        replicas: tuple[ReplicaView, ...] = self.process.run(
            lambda: routing.routing_state(self.app_name).views.replicas
        )
        return replicas

    def leftovers(self) -> list[str]:
        """Names everything that remains although no request is open."""
        gateway, bounded, requests = self.gateway, self.bounded, self.router.requests
        counts: dict[str, object] = {
            "open HTTP requests": bounded._num_open,
            "records without an end": self._records.num_open,
            "bodies on their way": len(bounded._arrivals._arriving),
            "bytes of bodies": bounded._arrivals.num_bytes,
            "streams": gateway.stream.num_open,
            "attempts": sum(map(len, gateway.migrations._attempts.values())),
            "suspects that wait": sum(
                len(one._turns[1:]) for one in gateway.migrations._suspects.values()
            ),
            "suspects on their turn": sum(
                bool(one._turns) for one in gateway.migrations._suspects.values()
            ),
            "visits": sum(one.num_open for one in gateway.activity.report(lambda _: Backlog())),
            "requests that wait for a base": sum(self.state.cold_starts._num_waiting.values()),
            "shadows": self.state.shadows.num_open,
            "charges": sum(not one.is_idle for one in self.accounts.limits._leases.values()),
            "use that is not recorded": len(self.accounts.meter._sums),
            "pending requests of Serve's router": len(requests._by_metadata),
            "requests to fulfil": sum(
                not one.future.done() for one in requests._pending_requests_to_fulfill
            ),
            "routing tasks": len(requests._routing_tasks),
            "queued at Serve": self.router.num_queued,
            "sent, as Serve counts": self.router.num_sent.total(),
        }
        for queue in self.queues:
            controller = queue._controller
            counts |= {
                "queued requests": controller.num_open,
                "waiting": len(controller),
                "waiting tokens": controller.num_waiting_tokens,
                "running cost": controller._running_cost,
                "coroutines that wait": len(queue._turns),
                "calls under way": len(queue._under_way),
                "waiting gauge": queue._base_stats.num_waiting,
            }
        for view in self.views:
            counts |= {
                f"sequences placed at {view.replica_id}": view.placed_sequences,
                f"tokens placed at {view.replica_id}": view.placed_tokens,
                f"calls placed at {view.replica_id}": len(view._placed),
            }
        return [f"{self.name}: {what}: {count}" for what, count in counts.items() if count]

    def misjudged(self, nodes: Iterable[EngineNode]) -> list[str]:
        """Views that differ from the engines, some seconds after the last change."""
        found, views = [], {view.replica_id: view for view in self.views}
        connected = self.process.states.connected
        for node in nodes:
            view = views.get(node.engine_id)
            if view is None or not view.is_connected:
                found.append(f"{self.name}: {node.engine_id} is not connected")
                continue
            if connected.get(node.engine_id) is not view:
                found.append(f"{self.name}: two views of {node.engine_id}")
            if _work(view.load) != _work(node.engine.load()):
                found.append(f"{self.name}: the load of {node.engine_id} is not the engine's")
            if lacks := len(node.engine.prefixes - view.prefixes):
                found.append(f"{self.name}: {lacks} prefixes of {node.engine_id} are not known")
            if more := len(view.prefixes - node.engine.prefixes):
                found.append(f"{self.name}: {more} prefixes of {node.engine_id} are gone")
        return found

    @property
    def outcomes(self) -> dict[ArmKey, Counter[str]]:
        return {
            key: +Counter(dict(zip(OUTCOMES, tally.outcomes, strict=True)))
            for key, tally in self.gateway.arms.counts()
        }


def _work(load: EngineLoad) -> tuple[int, int, int]:
    """Leaves out the adapters, which may be loaded ahead of requests at any time."""
    return load.num_running, load.num_waiting, load.queued_tokens


def make_front(
    base: ServedBase, files: dict[str, bytes], limits: EngineLimits, text: BaseText
) -> Callable[[DeploymentHandle[object]], BaseHandle]:
    description = BaseDescription(files, limits)

    def front(handle: DeploymentHandle[object]) -> BaseHandle:
        return BaseHandle(base.base, base.app_name, handle, description, text, base.deployed_s)

    return front
