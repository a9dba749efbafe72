"""The ingress deployment: FastAPI on Serve. Constructs the parts of an ingress process and its ASGI
application; the routes are in the other files of this folder.

Every response, including errors for malformed requests, has OpenAI's shape.
"""

from __future__ import annotations

import logging
from functools import partial

from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api import (
    admin_adapters,
    admin_bases,
    admin_canaries,
    admin_routing,
    admin_status,
    completions,
    health,
    lora,
    models,
    openapi,
    tokenize,
    webhook,
)
from serve_app.api.scrape import Scrape, collect
from serve_app.api.state import IngressState
from serve_app.autoscaling.options import ingress_scaling
from serve_app.config import FairnessArgs, IngressArgs, log_format
from serve_app.dispatch.activity import CountsReporter
from serve_app.dispatch.assembly import make_gateway
from serve_app.dispatch.cold_start import ColdStarts
from serve_app.dispatch.gateway import Gateway
from serve_app.dispatch.shadow import Shadows
from serve_app.dispatch.warm_ups import WarmUps
from serve_app.errors import SHOULD_RETRY, OverloadedError, should_retry_of
from serve_app.http.arrivals import Arrivals, check_header_size
from serve_app.http.asgi import (
    CLIENT_CLOSED_REQUEST,
    HeadAsGet,
    error_response,
    install_error_handlers,
)
from serve_app.http.browsers import with_browser_checks
from serve_app.logs import install_in_replica
from serve_app.metrics.ingress import IngressMetrics
from serve_app.metrics.queue import QueueStats
from serve_app.ray_network import keep_to_loopback
from serve_app.text_workers.pool import TextPool

logger = logging.getLogger(__name__)

# Headroom for health, metrics, admin calls and 429 responses.
_RESERVED_REQUESTS = 128
_BOUNDED_PATHS = frozenset((*completions.PATHS, *tokenize.PATHS))


class MetricsMiddleware:
    """The outermost middleware: counts responses by route and clients that leave, and turns every
    exception into a response."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        is_whole = False

        async def counting_send(message: Message) -> None:
            nonlocal status, is_whole
            if status is None and message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:
                    _add_retry_header(message)
                route = scope.get("route")  # the pattern, because clients' paths are unbounded
                self._metrics.answered(getattr(route, "path", "unknown"), status)
            elif not message.get("more_body"):
                is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        except Exception as error:
            # Starlette re-raises an exception that its last handler answered.
            if status is None:
                await error_response(error)(scope, receive, counting_send)
        finally:
            # Also if Serve cancels this coroutine, its way to report that the client left.
            if not is_whole or status == CLIENT_CLOSED_REQUEST:
                self._metrics.disconnected()


def _add_retry_header(message: Message) -> None:
    headers = MutableHeaders(raw=message["headers"])
    if SHOULD_RETRY not in headers:
        headers[SHOULD_RETRY] = "true" if should_retry_of(message["status"]) else "false"


class ConcurrencyLimitMiddleware:
    """Caps concurrent generation requests; excess gets 429, before its body is read if the limit is
    reached by then. Lets a request in when its header has an acceptable size and its body is
    complete. Serve's own limit is higher so that health checks still get through."""

    def __init__(self, app: ASGIApp, args: IngressArgs, stats: QueueStats) -> None:
        self._app = app
        self._limit = args.max_ongoing_requests
        self._max_header_bytes = args.max_header_bytes
        self._arrivals = Arrivals(args)
        self._stats = stats
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        check_header_size(scope["headers"], self._max_header_bytes)
        is_bounded = scope["path"] in _BOUNDED_PATHS
        if is_bounded:
            self._check_capacity()
        receive = await self._arrivals.receive_body(scope, receive)
        try:
            if not is_bounded:
                await self._app(scope, receive, send)
                return
            self._check_capacity()
            self._num_open += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._num_open -= 1
        finally:
            self._arrivals.release_body(receive)

    def _check_capacity(self) -> None:
        if self._num_open >= self._limit:
            self._stats.num_turned_away += 1
            raise OverloadedError("Too many requests are open here.")


def build_asgi(state: IngressState) -> ASGIApp:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.ingress = state
    for routes in (
        completions,
        models,
        tokenize,
        health,
        openapi,
        admin_status,
        admin_routing,
        admin_adapters,
        admin_bases,
        admin_canaries,
        lora,
        webhook,
    ):
        app.include_router(routes.router)
    install_error_handlers(app)
    bounded = ConcurrencyLimitMiddleware(HeadAsGet(app), state.args, state.queues.stats)
    return MetricsMiddleware(with_browser_checks(bounded, state.args), state.metrics)


def make_state(args: IngressArgs, gateway: Gateway, texts: TextPool) -> IngressState:
    metrics = IngressMetrics(gateway.ingress_id)
    shadows = Shadows(gateway.migrations, gateway.arms, args.max_shadow_requests)
    render = partial(health.own_metrics, metrics, gateway, shadows)
    counts = CountsReporter(gateway.ingress_id, render)
    scrape = Scrape(partial(collect, gateway, counts))
    cold_starts = ColdStarts(gateway)
    return IngressState(
        args, gateway, metrics, cold_starts, shadows, gateway.queues, texts, counts, scrape
    )


@serve.ingress()
class Ingress:
    """An ingress process. `ingress_application` makes the deployment."""

    async def __init__(  # type: ignore[misc]
        self, args: IngressArgs, fairness: FairnessArgs, manager: DeploymentHandle[object]
    ) -> None:
        install_in_replica(log_format())
        keep_to_loopback()
        replica_id = serve.get_replica_context().replica_id.unique_id
        texts = TextPool(args.tokenizer_threads)
        is_proven = args.trusted_gateway is not None
        self._gateway = make_gateway(manager, replica_id, fairness, texts, is_proven=is_proven)
        self._state = make_state(args, self._gateway, texts)
        self._warm_ups = WarmUps(self._gateway)
        self._gateway.start(self._state.counts)
        self._warm_ups.start()

    async def check_health(self) -> None:
        """Raises if this ingress no longer follows the manager, so that Serve replaces it."""
        self._gateway.check_tasks()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_asgi(self._state)


def ingress_application(
    args: IngressArgs, fairness: FairnessArgs, manager: serve.Application
) -> serve.Application:
    scaling = ingress_scaling(args)
    deployment = serve.deployment(Ingress).options(  # type: ignore[attr-defined]
        name="ingress",
        num_replicas=args.replicas if scaling is None else None,
        autoscaling_config=scaling,
        max_ongoing_requests=(
            args.max_ongoing_requests + args.max_arriving_requests + _RESERVED_REQUESTS
        ),
        max_queued_requests=args.max_queued_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=args.graceful_shutdown_timeout_s,
    )
    application: serve.Application = deployment.bind(args, fairness, manager)
    return application
