"""The ingress's whole ASGI application in this process, with no manager and no engine behind it."""

from __future__ import annotations

from typing import cast

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from serve_app.api.ingress import build_asgi
from serve_app.api.state import IngressState
from serve_app.config import FairnessArgs, IngressArgs
from serve_app.dispatch.cold_start import ColdStarts
from serve_app.dispatch.gateway import Gateway
from serve_app.dispatch.queues import AdmissionQueues
from serve_app.dispatch.shadow import Shadows
from serve_app.metrics.ingress import IngressMetrics
from serve_app.metrics.queue import QueueStats
from serve_app.routing import state as routing_state
from serve_app.text_workers.pool import TextPool


def make_state(args: IngressArgs | None = None, manager: object = None) -> IngressState:
    gateway = Gateway(cast("DeploymentHandle[object]", manager), "i0")
    stats = QueueStats("i0", ())
    return IngressState(
        # The name by which Starlette's test client calls.
        (args or IngressArgs()).model_copy(update={"allowed_hosts": ("testserver",)}),
        gateway,
        IngressMetrics("i0"),
        ColdStarts(gateway),
        Shadows(gateway.migrations, gateway.arms, 0),
        AdmissionQueues(gateway, FairnessArgs(), stats, routing_state.of, is_proven=False),
        TextPool(1),
    )


def make_app(args: IngressArgs | None = None) -> ASGIApp:
    return build_asgi(make_state(args))
