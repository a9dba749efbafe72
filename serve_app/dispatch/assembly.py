"""Constructs the gateway of an ingress process from the bottom up."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle

from serve_app.config import FairnessArgs
from serve_app.dispatch.gateway import Gateway
from serve_app.dispatch.migrations import Migrations
from serve_app.dispatch.queues import AdmissionQueues
from serve_app.metrics.queue import QueueStats
from serve_app.routing import state as routing
from serve_app.routing.connections import EngineConnections
from serve_app.routing.view_feed import ViewFeed
from serve_app.stream.server import StreamServer
from serve_app.text_workers.pool import TextPool


def make_gateway(
    manager: DeploymentHandle[object],
    ingress_id: str,
    fairness: FairnessArgs,
    texts: TextPool | None,
    *,
    is_proven: bool,
) -> Gateway:
    """`is_proven`: a trusted gateway sets the tenant header. `texts`: see `Gateway`."""
    stats = QueueStats(ingress_id, fairness.weights)
    queues = AdmissionQueues(fairness, stats, routing.views_of, is_proven=is_proven)
    stream = StreamServer(ViewFeed(queues.wake))
    migrations = Migrations(stream, routing, ingress_id)
    connections = EngineConnections(stream, queues.placed, migrations.replicas_changed)
    return Gateway(manager, ingress_id, stream, migrations, queues, connections, texts)
