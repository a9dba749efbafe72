"""Ray Serve without Ray: its real handle, responses and router, over the replicas of a fleet."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

from ray.exceptions import ActorDiedError
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.handle_options import DynamicHandleOptions, InitHandleOptions
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.router import AsyncioRouter, RouterMetricsManager, SingletonThreadRouter
from ray.serve.handle import DeploymentHandle
from ray.util import metrics

from serve_app.messages import ENGINE
from serve_app.routing.serve_router import LoraplexRouter
from tests.fleet_actor import Process
from tests.fleet_calls import WAY_S, Call, ServeReplica
from tests.virtual_loop import VirtualLoop

_TAGS = ("deployment", "application", "handle", "actor_id")


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
        await asyncio.sleep(self._loop.random.uniform(*WAY_S))
        if self._replica.is_dead:
            raise ActorDiedError()
        return len(self._replica.calls)

    def try_send_request(self, pending: PendingRequest, with_rejection: bool) -> Call:
        return Call(self._loop, self._replica, pending, with_rejection)


class _Router(AsyncioRouter):
    """Has no long poll of the controller: `ServeRouter.update` sets the replicas."""

    def __init__(self, loop: VirtualLoop, deployment: DeploymentID, queued: int) -> None:
        source = DeploymentHandleSource.REPLICA
        self.deployment_id = deployment
        self._event_loop = loop
        self._enable_strict_max_ongoing_requests = True
        self._deployment_available = True
        self._request_router_class = None
        self._request_router_initialized = asyncio.Event()
        self._request_router_initialized.set()
        self._request_router = LoraplexRouter(deployment, source, use_replica_queue_len_cache=True)
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
    """The part of Serve's DeploymentConfig that a router reads."""

    autoscaling_config = None

    def __init__(self, max_queued_requests: int) -> None:
        self.max_queued_requests = max_queued_requests
        self.backpressure_config = self
        self.status_code, self.retry_after_s = 503, None


class _Unseen:
    def observe(self, value: float) -> None:
        pass


class ServeRouter(SingletonThreadRouter):
    """The router of an ingress process for an application; its thread is the fleet's."""

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
        """The open calls of each replica, as Serve counts them."""
        sent = self._asyncio_router._metrics_manager.num_requests_sent_to_replicas
        return +Counter({one.unique_id: count for one, count in sent.items()})

    def update(self, replicas: list[ServeReplica]) -> None:
        """Sets the replicas, as an update from the controller does."""
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
        """Runs its tasks in the contexts of this process, whatever the caller's is."""
        return self._process.run(
            lambda: super(ServeRouter, self).assign_request(request_meta, *args, **kwargs)
        )


async def _nothing(*_: object) -> None:
    """Resolves no argument: none is the response of another call."""
