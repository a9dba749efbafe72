"""The ingress deployment: FastAPI on Serve. Constructs the parts of an ingress process and its ASGI
application; the routes are in the other files of this folder.

Every response, including errors for malformed requests, has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from contextlib import suppress
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
    admin_keys,
    admin_routing,
    admin_status,
    admin_usage,
    completions,
    console_login,
    health,
    lora,
    models,
    openapi,
    tokenize,
    webhook,
)
from serve_app.api.state import IngressState
from serve_app.autoscaling.options import ingress_scaling
from serve_app.config import ADMIN_TOKEN, FairnessArgs, IngressArgs, TenancyArgs, log_format, secret
from serve_app.console import pages
from serve_app.console.cookie import ConsoleCookie
from serve_app.dispatch.gateway import Gateway
from serve_app.dispatch.warm_ups import WarmUps
from serve_app.errors import (
    SHOULD_RETRY,
    ApiError,
    ClientGoneError,
    OverloadedError,
    ServiceUnavailableError,
    should_retry_of,
)
from serve_app.http.arrivals import Arrivals
from serve_app.http.asgi import (
    CLIENT_CLOSED_REQUEST,
    HeadAsGet,
    error_response,
    install_error_handlers,
)
from serve_app.http.browsers import with_browser_checks
from serve_app.logs import install_in_replica
from serve_app.metrics.ingress import IngressMetrics, QueueStats
from serve_app.observe.observer import ObserveArgs, open_observer
from serve_app.ray_calls import RAY_ERRORS
from serve_app.ray_network import keep_to_loopback
from serve_app.tasks import spawn
from serve_app.tenancy.authentication import AuthenticationMiddleware, Authenticator
from serve_app.tenancy.orders import Act
from serve_app.tenancy.table import KeyTable, follow
from serve_app.text_workers.pool import TextPool

logger = logging.getLogger(__name__)

# Headroom for health, metrics, admin calls and 429 responses.
_RESERVED_REQUESTS = 128
# For an ingress that joins others. A server that starts answers /live after so long at the latest.
_CATCH_UP_S = 5.0
_CATCH_UP_POLL_S = 0.1
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
                    should_retry = "true" if should_retry_of(status) else "false"
                    MutableHeaders(raw=message["headers"]).setdefault(SHOULD_RETRY, should_retry)
                route = scope.get("route")  # the pattern, because clients' paths are unbounded
                path = getattr(route, "path", "unknown")
                self._metrics.answered(path, status, scope["method"])
            elif not message.get("more_body"):
                is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        except Exception as error:
            # Starlette re-raises an exception that its last handler answered.
            if status is None:
                await error_response(error, scope)(scope, receive, counting_send)
        finally:
            # Also if Serve cancels this coroutine, its way to report that the client left.
            if not is_whole or status == CLIENT_CLOSED_REQUEST:
                self._metrics.num_disconnects += 1


class ConcurrencyLimitMiddleware:
    """Caps concurrent generation requests; excess gets 429, before its body is read if the limit is
    reached by then. Lets a request in when its header has an acceptable size and its body is
    complete. Serve's own limit is higher so that health checks still get through."""

    def __init__(self, app: ASGIApp, args: IngressArgs, stats: QueueStats) -> None:
        self._app = app
        self._limit = args.max_ongoing_requests
        self._arrivals = Arrivals(args)
        self._stats = stats
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_bounded = scope["path"] in _BOUNDED_PATHS
        try:
            self._arrivals.check_header(scope)
            if is_bounded:
                self._check_capacity()
            receive = await self._arrivals.receive_body(scope, receive)
            if is_bounded:
                self._check_capacity()
        except (ApiError, ClientGoneError, OverloadedError) as error:
            self._arrivals.release_body(receive)
            await error_response(error, scope)(scope, receive, send)
            return
        self._num_open += is_bounded
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= is_bounded
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
        admin_keys,
        admin_usage,
        lora,
        webhook,
        console_login,
        pages,
    ):
        app.include_router(routes.router)
    install_error_handlers(app)
    layers: ASGIApp = ConcurrencyLimitMiddleware(HeadAsGet(app), state.args, state.queues.stats)
    has_keys = state.authenticator is not None
    if state.authenticator is not None:
        note = partial(_note_act, state.gateway.manager)
        layers = AuthenticationMiddleware(layers, state.authenticator, note)
    layers = with_browser_checks(ConsoleCookie(layers), state.args, has_keys=has_keys)
    return MetricsMiddleware(layers, state.metrics)


def _note_act(manager: DeploymentHandle[object], actor: str, method: str, path: str) -> None:
    """Sends an act to the manager's audit log. The order itself does not wait for it."""

    async def send() -> None:
        try:
            await manager.note_act.remote(Act(actor, f"{method} {path}"[:128], path[:512]))
        except (*RAY_ERRORS, ServiceUnavailableError) as error:
            logger.error("the audit log misses %s %s of %s: %s", method, path, actor, error)

    spawn(send(), "note-act")


async def catch_up(gateway: Gateway, keys: KeyTable | None, timeout_s: float = _CATCH_UP_S) -> None:
    """Waits until this ingress can answer requests as the others do, or for the time-out: Serve
    sends requests here from then on. Without it, an ingress in the place of a killed one answered
    503 for some tenths of a second."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not gateway.has_caught_up or not (keys is None or keys.is_known):
                await gateway.change(_CATCH_UP_POLL_S)


def make_authenticator(tenancy: TenancyArgs) -> Authenticator | None:
    if not tenancy.enabled:
        return None
    if tenancy.oidc is None:
        return Authenticator(KeyTable(), secret(ADMIN_TOKEN))
    from serve_app.tenancy.oidc import TokenVerifier  # needs libraries that the others do not

    return Authenticator(KeyTable(), secret(ADMIN_TOKEN), TokenVerifier(tenancy.oidc))


@serve.ingress()
class Ingress:
    """An ingress process. `ingress_application` makes the deployment."""

    async def __init__(  # type: ignore[misc]
        self,
        args: IngressArgs,
        fairness: FairnessArgs,
        tenancy: TenancyArgs,
        manager: DeploymentHandle[object],
        observe: ObserveArgs,
    ) -> None:
        install_in_replica(log_format())
        keep_to_loopback()
        replica_id = serve.get_replica_context().replica_id.unique_id
        texts = TextPool(args.tokenizer_threads)
        self._gateway = Gateway(
            *(manager, replica_id, fairness, texts),
            is_proven=args.trusted_gateway is not None,
            has_keys=tenancy.enabled,
        )
        self._observer = open_observer(observe, replica_id, fairness.weights)
        authenticator = make_authenticator(tenancy)
        self._state = IngressState(args, self._gateway, texts, self._observer, authenticator)
        self._warm_ups = WarmUps(self._gateway)
        self._gateway.start(self._state.counts)
        self._warm_ups.start()
        if authenticator is not None:
            follow(authenticator.table, manager.key_delta.remote)
        if self._state.accounts is not None:
            self._state.accounts.start()
        # Modules and routes stay for good: a collection that visits them holds up every stream.
        gc.collect()
        gc.freeze()
        await catch_up(self._gateway, None if authenticator is None else authenticator.table)

    async def check_health(self) -> None:
        """Raises if this ingress no longer follows the manager, so that Serve replaces it."""
        self._gateway.check_tasks()
        if self._state.accounts is not None:
            self._state.accounts.check_tasks()

    async def __del__(self) -> None:  # Serve awaits it, after draining
        if hasattr(self, "_observer"):
            await asyncio.to_thread(self._observer.close)
        if hasattr(self, "_state") and self._state.accounts is not None:
            await self._state.accounts.close()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_asgi(self._state)


def ingress_application(
    args: IngressArgs,
    fairness: FairnessArgs,
    tenancy: TenancyArgs,
    manager: serve.Application,
    observe: ObserveArgs,
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
        graceful_shutdown_wait_loop_s=0.5,  # an idle ingress ends after it; Serve's default is 2 s
        # Each change of the file replaces the ingresses. By default Serve stops the old ones first,
        # and nothing answers until the new ones have started, which takes seconds.
        max_surge_percent=100,
    )
    application: serve.Application = deployment.bind(args, fairness, tenancy, manager, observe)
    return application
