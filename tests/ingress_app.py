"""The ingress's whole ASGI application in this process, with no manager and no engine behind it."""

from __future__ import annotations

from typing import Any, cast

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from registry.catalog import Resolution
from registry.entities import AdapterVersion, BaseVersion, WeightedVersion
from serve_app.api.ingress import build_asgi
from serve_app.api.state import IngressState
from serve_app.config import FairnessArgs, IngressArgs
from serve_app.dispatch.gateway import Gateway
from serve_app.observe.observer import RequestObserver
from serve_app.observe.record import RequestRecord
from serve_app.observe.request_metrics import RequestMetrics
from serve_app.tenancy.authentication import Authenticator
from serve_app.text_workers.pool import TextPool


def make_gateway(manager: object = None, ingress_id: str = "i0") -> Gateway:
    handle = cast("DeploymentHandle[object]", manager)
    return Gateway(handle, ingress_id, FairnessArgs(), None, is_proven=False, has_keys=False)


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

    def end(self, record: RequestRecord, error: BaseException | None = None) -> None:
        self.num_open -= not record.end_s
        super().end(record, error)


def make_observer(ingress_id: str = "i0") -> OpenRecords:
    return OpenRecords(RequestMetrics(ingress_id, 50, 50, ()))


def make_app(args: IngressArgs | None = None) -> ASGIApp:
    return build_asgi(make_state(args))


def finished_record(
    base: str, adapter: str, tenant: str, outcome: str = "ok", key_id: str = ""
) -> RequestRecord:
    """Returns the record of a request that had its first token after 0.2 s and ended at 1.5 s."""
    of_base = BaseVersion(base, 1, "b" * 64, "")
    version = AdapterVersion(adapter, 1, "a" * 64, base, of_base.digest, 16, (), "")
    return RequestRecord(
        "/v1/completions",
        0.0,
        tenant=tenant,
        key_id=key_id,
        resolution=Resolution(of_base, (WeightedVersion(version),)),
        first_token_s=0.2,
        end_s=1.5,
        prompt_tokens=10,
        output_tokens=5,
        outcome=outcome,
    )
