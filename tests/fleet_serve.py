"""Ray Serve without Ray: its handle, responses and router as they are, over replicas in this process.

What Serve would do with actors and the controller is here: a call takes time both ways, a replica
accepts it or turns it away, a cancellation travels to it, and what its process owes is lost when
the process ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from ray.exceptions import ActorDiedError, TaskCancelledError
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    ReplicaQueueLengthInfo,
    RequestMetadata,
)
from ray.serve._private.handle_options import DynamicHandleOptions, InitHandleOptions
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.router import AsyncioRouter, RouterMetricsManager, SingletonThreadRouter
from ray.serve.handle import DeploymentHandle
from ray.util import metrics

from serve_app.routing.router import LoraplexRouter
from serve_app.topology import ENGINE
from tests.fleet_engine import Process, was_read
from tests.virtual_loop import VirtualLoop

_WAY_S = (0.0005, 0.01)  # between an ingress and a replica
_TAGS = ("deployment", "application", "handle", "actor_id")


class ServeReplica:
    """Serve's part of a replica's process. `target`: the user's object."""

    def __init__(
        self, loop: VirtualLoop, process: Process, engine_id: str, target: Any, max_ongoing: int
    ) -> None:
        self.is_dead = False
        self.max_ongoing = max_ongoing
        self.engine_id = engine_id
        self.calls: dict[Call, asyncio.Task[Any]] = {}
        self._loop = loop
        self._process = process
        self._target = target
        self._frozen: list[Callable[[], None]] | None = None

    def freeze(self) -> None:
        self._frozen = []

    def thaw(self) -> None:
        frozen, self._frozen = self._frozen or [], None
        for step in frozen:
            step()

    def kill(self) -> None:
        self.is_dead = True
        self.thaw()
        calls, self.calls = self.calls, {}
        for call, task in calls.items():
            task.cancel()
            call.reply(error=ActorDiedError())

    def take(self, call: Call) -> None:
        if self._frozen is not None:
            self._frozen.append(lambda: self.take(call))
        elif self.is_dead:
            call.reply(error=ActorDiedError())
        elif call.is_cancelled:
            call.reply(error=TaskCancelledError())
        elif call.with_rejection and len(self.calls) >= self.max_ongoing:
            call.inform(ReplicaQueueLengthInfo(False, len(self.calls)))
            call.reply(None)
        else:
            pending = call.pending
            method = getattr(self._target, pending.metadata.call_method)
            task = self._process.task(method(*pending.args, **pending.kwargs))
            self.calls[call] = task
            task.add_done_callback(lambda task: self._ended(call, task))
            call.inform(ReplicaQueueLengthInfo(True, len(self.calls)))

    def cancel(self, call: Call) -> None:
        if self._frozen is not None:
            self._frozen.append(lambda: self.cancel(call))
        elif (task := self.calls.get(call)) is not None:
            task.cancel()

    def _ended(self, call: Call, task: asyncio.Task[Any]) -> None:
        if self.calls.pop(call, None) is None:  # the process died
            was_read(task)
        elif task.cancelled():
            call.reply(error=TaskCancelledError())
        elif (error := task.exception()) is not None:
            call.reply(error=error)
        else:
            call.reply(task.result())


class Call(ReplicaResult):
    """As Ray's ActorReplicaResult."""

    def __init__(
        self, loop: VirtualLoop, replica: ServeReplica, pending: PendingRequest, rejection: bool
    ) -> None:
        self.pending = pending
        self.with_rejection = rejection
        self.is_cancelled = False
        self._loop = loop
        self._replica = replica
        self._info: asyncio.Future[ReplicaQueueLengthInfo] = loop.create_future()
        self._done: asyncio.Future[Any] = loop.create_future()
        self._info.add_done_callback(was_read)
        self._done.add_done_callback(was_read)
        self._later(lambda: replica.take(self))

    def inform(self, info: ReplicaQueueLengthInfo) -> None:
        self._later(lambda: self._info.done() or self._info.set_result(info))

    def reply(self, result: object = None, error: BaseException | None = None) -> None:
        def end() -> None:
            if self._done.done():
                return
            if error is None:
                self._done.set_result(result)
                return
            if not self._info.done():
                self._info.set_exception(error)
            self._done.set_exception(error)

        self._later(end, least_s=_WAY_S[1])

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo | None:
        try:
            return await asyncio.shield(self._info)
        except asyncio.CancelledError:
            self.cancel()
            raise
        except TaskCancelledError:
            raise asyncio.CancelledError from None

    async def get_async(self) -> Any:
        try:
            return await asyncio.shield(self._done)
        except TaskCancelledError:
            raise asyncio.CancelledError from None

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        def told(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            callback(done.result() if error is None else error)

        self._done.add_done_callback(told)

    def cancel(self) -> None:
        self.is_cancelled = True
        self._later(lambda: self._replica.cancel(self))

    def _later(self, step: Callable[[], object], least_s: float = 0.0) -> None:
        self._loop.call_later(least_s + self._loop.random.uniform(*_WAY_S), step)

    def get(self, timeout_s: float | None) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        raise NotImplementedError

    async def __anext__(self) -> Any:
        raise NotImplementedError

    def to_object_ref(self) -> Any:
        raise NotImplementedError

    async def to_object_ref_async(self) -> Any:
        raise NotImplementedError

    def to_object_ref_gen(self) -> Any:
        raise NotImplementedError


class _RunningReplica:
    """Implements Serve's RunningReplica."""

    is_cross_language = False
    node_id, availability_zone, actor_id = "node", None, None
    multiplexed_model_ids: frozenset[str] = frozenset()
    routing_stats: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, loop: VirtualLoop, replica: ServeReplica, deployment: DeploymentID) -> None:
        self.replica_id = ReplicaID(replica.engine_id, deployment)
        self.max_ongoing_requests = replica.max_ongoing
        self._loop = loop
        self._replica = replica

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(self._loop.random.uniform(*_WAY_S))
        if self._replica.is_dead:
            raise ActorDiedError()
        return len(self._replica.calls)

    def try_send_request(self, pending: PendingRequest, with_rejection: bool) -> Call:
        return Call(self._loop, self._replica, pending, with_rejection)


class _Router(AsyncioRouter):
    """Without the controller's long poll: `ServeRouter.update` says what there is."""

    def __init__(self, loop: VirtualLoop, deployment: DeploymentID, queued: int) -> None:
        source = DeploymentHandleSource.REPLICA
        self.deployment_id = deployment
        self._event_loop = loop
        self._enable_strict_max_ongoing_requests = True
        self._deployment_available = True
        self._request_router_class = None
        self._request_router_initialized = asyncio.Event()
        self._request_router_initialized.set()
        self._request_router = LoraplexRouter(
            deployment, source, use_replica_queue_len_cache=True
        )
        self._metrics_manager = RouterMetricsManager(
            deployment,
            "handle",
            "actor",
            source,
            cast(Any, None),
            metrics.Counter("calls", tag_keys=(*_TAGS, "route")),
            metrics.Gauge("queued", tag_keys=_TAGS),
            metrics.Gauge("running", tag_keys=_TAGS),
            loop,
        )
        self._metrics_manager._deployment_config = cast(Any, _Limits(queued))
        self._objref_resolution_latency_ms = cast(Any, _Unseen())
        self._resolve_request_arg_func = _nothing


class _Limits:
    """Of Serve's DeploymentConfig, what a router reads."""

    autoscaling_config = None

    def __init__(self, max_queued_requests: int) -> None:
        self.max_queued_requests = max_queued_requests
        self.backpressure_config = self
        self.status_code, self.retry_after_s = 503, None


class _Unseen:
    def observe(self, value: float) -> None:
        pass


class ServeRouter(SingletonThreadRouter):
    """Of one ingress process and one application; its thread is the fleet's."""

    def __init__(
        self, loop: VirtualLoop, process: Process, app: str, policy: str, max_queued: int
    ) -> None:
        self._asyncio_loop = loop
        self._deployment = DeploymentID(ENGINE, app)
        self._process = process
        self._known: dict[str, _RunningReplica] = {}
        self._asyncio_router = process.run(_Router, loop, self._deployment, max_queued)
        process.run(lambda: self.requests.initialize_state(policy=policy, options={"seed": 0}))

    @property
    def requests(self) -> LoraplexRouter:
        return cast(LoraplexRouter, self._asyncio_router._request_router)

    @property
    def num_queued(self) -> int:
        return self._asyncio_router._metrics_manager.num_queued_requests

    @property
    def num_sent(self) -> Counter[str]:
        """By replica: sent there and not ended, as Serve counts them."""
        sent = self._asyncio_router._metrics_manager.num_requests_sent_to_replicas
        return +Counter({one.unique_id: count for one, count in sent.items()})

    def update(self, replicas: list[ServeReplica]) -> None:
        """As the controller's news."""
        loop = cast(VirtualLoop, self._asyncio_loop)
        for one in replicas:
            if one.engine_id not in self._known:
                self._known[one.engine_id] = _RunningReplica(loop, one, self._deployment)
        running = [self._known[one.engine_id] for one in replicas]
        self._process.run(self.requests.update_replicas, running)

    def handle(self) -> DeploymentHandle[object]:
        return DeploymentHandle(
            ENGINE,
            self._deployment.app_name,
            init_options=InitHandleOptions(),
            handle_options=DynamicHandleOptions(),
            _router=self,
        )

    def assign_request(self, request_meta: RequestMetadata, *args: Any, **kwargs: Any) -> Any:
        """Its tasks run in the contexts of this process, whatever the caller's is."""
        return self._process.run(lambda: super(ServeRouter, self).assign_request(
            request_meta, *args, **kwargs
        ))


async def _nothing(*_: object) -> None:
    """No argument of a call is a response of another one."""
