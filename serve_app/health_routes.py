"""Routes for whoever operates the server: liveness, readiness, metrics. They tell nothing about
models beyond their names and what keeps them from being ready.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import msgspec
from fastapi import APIRouter, Request, Response

from serve_app.ingress_metrics import join_texts
from serve_app.state import state_of

router = APIRouter()
_METHODS = ["GET", "HEAD"]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.api_route("/live", methods=_METHODS)
async def live() -> Response:
    """This process answers."""
    return _status(True, "alive")


@router.api_route("/health", methods=_METHODS)
async def health(request: Request) -> Response:
    """No engine that worked is gone or stuck."""
    is_healthy = state_of(request).gateway.is_healthy
    return _status(is_healthy, "healthy" if is_healthy else "an engine is down")


@router.api_route("/ready", methods=_METHODS)
async def ready(request: Request) -> Response:
    """Every base model of the file answers, or sleeps. What is added later holds up nobody."""
    gateway = state_of(request).gateway
    if gateway.is_ready:
        return _status(True, "ready")
    return _status(False, "; ".join(gateway.obstacles) or "models are loading")


@router.api_route("/metrics", methods=_METHODS)
async def metrics(request: Request) -> Response:
    """Of this ingress replica and of all engines, Prometheus' text format."""
    state = state_of(request)
    engines, bases = await asyncio.gather(
        state.gateway.engine_metrics(), state.gateway.base_metrics()
    )
    own = state.metrics.text(state.gateway.stream.num_open)
    return Response(join_texts([*engines, bases, own]), media_type=_METRICS_TYPE)


@router.get("/version")
async def get_version() -> Response:
    return _json({"version": version("loraplex")})


def _status(is_good: bool, word: str) -> Response:
    response = _json({"status": word})
    if not is_good:
        response.status_code = 503
        response.headers["retry-after"] = "1"
    return response


def _json(value: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
