"""Routes for operators: liveness, health, readiness, metrics and the version. About models they
reveal only the names and the reasons why they are not ready.
"""

from __future__ import annotations

import time
from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from serve_app.api.state import state_of
from serve_app.dispatch.gateway import Gateway
from serve_app.dispatch.shadow import Shadows
from serve_app.http.asgi import json_response
from serve_app.metrics.exposition import join_texts
from serve_app.metrics.ingress import IngressMetrics
from serve_app.observe.observer import RequestObserver
from serve_app.routing.decisions import decisions_text
from serve_app.tasks import failures_text
from serve_app.tenancy.accounts import Accounts
from serve_app.tenancy.authentication import Authenticator

router = APIRouter()
_METHODS = ["GET", "HEAD"]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.api_route("/live", methods=_METHODS)
async def live() -> Response:
    """Succeeds as long as this process responds."""
    return _status(True, "alive")


@router.api_route("/health", methods=_METHODS)
async def health(request: Request) -> Response:
    """Fails when an engine that was serving has died or stalled."""
    is_healthy = state_of(request).gateway.is_healthy
    return _status(is_healthy, "healthy" if is_healthy else "an engine is down")


@router.api_route("/ready", methods=_METHODS)
async def ready(request: Request) -> Response:
    """Succeeds when every base model of the configuration file answers or sleeps. Bases added at
    run time do not count."""
    gateway = state_of(request).gateway
    if gateway.is_ready:
        return _status(True, "ready")
    refused = "; ".join(gateway.refusals)
    return _status(False, "; ".join(gateway.obstacles) or "models are loading", refused)


@router.api_route("/metrics", methods=_METHODS)
async def metrics(request: Request) -> Response:
    """Returns the metrics of all ingresses, engines and the manager, in Prometheus' text format."""
    state = state_of(request)
    text = await state.scrape.text(state.args.metrics_max_age_s)
    return Response(text, media_type=_METRICS_TYPE)


@router.get("/version")
async def get_version() -> Response:
    return json_response({"version": version("loraplex")})


def own_metrics(
    metrics: IngressMetrics,
    gateway: Gateway,
    shadows: Shadows,
    observer: RequestObserver,
    authenticator: Authenticator | None = None,
    accounts: Accounts | None = None,
) -> bytes:
    """Returns the metrics of this ingress replica."""
    own = metrics.text(gateway.stream.num_open)
    bases = gateway.connections.bases.values()
    routed = decisions_text(((one.name, one.state.decisions) for one in bases), metrics.ingress)
    num_rollbacks = () if gateway.view is None else gateway.view.canary.num_rollbacks
    num_shadows = shadows.num_open, shadows.num_dropped
    arms = gateway.arms.text(metrics.ingress, num_rollbacks, *num_shadows)
    tasks = failures_text({"process": "ingress", "ingress": metrics.ingress})
    migrations, queues = gateway.migrations.metrics.text(), gateway.queues.stats.text()
    requests = observer.metrics.text(time.monotonic())
    log = b"" if observer.log is None else observer.log.text()
    keys = b"" if authenticator is None else authenticator.text(metrics.ingress)
    limits = b"" if accounts is None else accounts.limits.text()
    return join_texts((own, routed, migrations, arms, queues, requests, log, tasks, keys, limits))


def _status(is_good: bool, word: str, refused: str = "") -> Response:
    """`refused`: the part of the reason for which waiting is of no use."""
    response = json_response({"status": word, **({"refused": refused} if refused else {})})
    if not is_good:
        response.status_code = 503
        response.headers["retry-after"] = "1"
    return response
