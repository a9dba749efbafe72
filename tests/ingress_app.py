"""The ingress's whole ASGI application in this process, with no manager and no engine behind it."""

from __future__ import annotations

from typing import Any, cast

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from serve_app.api import ingress
from serve_app.api.ingress import build_asgi
from serve_app.api.state import IngressState
from serve_app.config import FairnessArgs, IngressArgs
from serve_app.dispatch.gateway import Gateway
from serve_app.metrics.requests import RequestMetrics
from serve_app.observe.observer import RequestObserver
from serve_app.observe.record import RequestRecord
from serve_app.tenancy.authentication import Authenticator
from serve_app.text_workers.pool import TextPool


def make_gateway(manager: object = None, ingress_id: str = "i0") -> Gateway:
    handle = cast("DeploymentHandle[object]", manager)
    return ingress.make_gateway(handle, ingress_id, FairnessArgs(), None, is_proven=False)


def make_state(
    args: IngressArgs | None = None,
    manager: object = None,
    authenticator: Authenticator | None = None,
) -> IngressState:
    # The host name that Starlette's test client uses.
    update = {"allowed_hosts": ("testserver",), "max_shadow_requests": 0}
    args = (args or IngressArgs()).model_copy(update=update)
    return IngressState(args, make_gateway(manager), TextPool(1), make_observer(), authenticator)


class OpenRecords(RequestObserver):
    """Counts the records that have begun and not ended."""

    num_open = 0

    def begin(self, *request: Any) -> RequestRecord:
        self.num_open += 1
        return super().begin(*request)

    def _count(self, record: RequestRecord) -> None:
        self.num_open -= 1
        super()._count(record)


def make_observer(ingress_id: str = "i0") -> OpenRecords:
    return OpenRecords(RequestMetrics(ingress_id, 50, 50, ()))


def make_app(args: IngressArgs | None = None) -> ASGIApp:
    return build_asgi(make_state(args))
