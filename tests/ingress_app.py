"""The ingress's whole ASGI application in this process, with no manager and no engine behind it."""

from __future__ import annotations

from typing import cast

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from serve_app.cold_start import ColdStarts
from serve_app.config import FairnessArgs, IngressArgs
from serve_app.gateway import Gateway
from serve_app.ingress import build_asgi
from serve_app.ingress_metrics import IngressMetrics
from serve_app.queue_stats import QueueStats
from serve_app.routing import views_registry
from serve_app.routing.queues import AdmissionQueues
from serve_app.shadow import Shadows
from serve_app.state import IngressState
from serve_app.text_pool import TextPool


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
        AdmissionQueues(gateway, FairnessArgs(), stats, views_registry.of, is_proven=False),
        TextPool(1),
    )


def make_app(args: IngressArgs | None = None) -> ASGIApp:
    return build_asgi(make_state(args))
