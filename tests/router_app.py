"""A Serve application for the tests of the router: an ingress that makes many handle calls inside
an HTTP request, and three replicas that return their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_serve_request_context
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.requests import Request

from serve_app.config import RouterArgs
from serve_app.messages import RoutingRequest
from serve_app.ray_calls import call_apart
from serve_app.routing.policy import Ranked
from serve_app.routing.state import routing_state
from serve_app.routing.view import ReplicaView
from serve_app.tasks import share

APP = "fan"
MAX_ONGOING = 3


class Call(msgspec.Struct):
    """The parameters of a handle call."""

    id: str
    only: str | None = None
    avoid: tuple[str, ...] = ()
    adapter: str | None = None
    has_ask: bool = True
    hold_s: float = 0.0
    is_apart: bool = False  # see `call_apart`
    # A file that gets "begun", then "cancelled", or "whole" and the request id at the replica.
    fate: str = ""


class Broken:
    """A user's policy that fails."""

    def rank(
        self, ask: RoutingRequest, replicas: Sequence[ReplicaView], now_s: float
    ) -> list[Ranked]:
        raise RuntimeError("no idea")

    def changed(self, replica_ids: Sequence[str]) -> None:
        raise RuntimeError("no idea either")


class Echo:
    """Fails calls of which more than MAX_ONGOING are there at once."""

    def __init__(self) -> None:
        self._num_open = 0

    async def say(
        self, ask: RoutingRequest | None, hold_s: float, call_id: str, fate: str
    ) -> tuple[str, str]:
        _write(fate, "begun")
        self._num_open += 1
        try:
            assert self._num_open <= MAX_ONGOING
            await asyncio.sleep(hold_s)
        except asyncio.CancelledError:
            _write(fate, "cancelled")
            raise
        finally:
            self._num_open -= 1
        _write(fate, f"whole, {_get_serve_request_context().request_id}")
        return call_id, serve.get_replica_context().replica_id.unique_id


class Fan:
    def __init__(self, echo: DeploymentHandle[object]) -> None:
        self._echo = echo

    async def __call__(self, request: Request) -> dict[str, object]:
        """Makes the calls of the body at once; returns the answers in their order."""
        calls = msgspec.json.decode(await request.body(), type=list[Call])
        answers = await asyncio.gather(*(self._say(call) for call in calls))
        state = routing_state(APP)
        return {
            "answers": answers,
            "replicas": sorted(view.replica_id for view in state.views.replicas),
            "placed": sum(len(view._placed) for view in state.views.replicas),
            "reasons": dict(state.decisions.reasons),
            "policy": state.policy_name,
        }

    async def _say(self, call: Call) -> object:
        ask = None
        if call.has_ask:
            avoid = frozenset(call.avoid)
            ask = RoutingRequest(call.id, 10, adapter=call.adapter, avoid=avoid, only=call.only)
        say, arguments = self._echo.say.remote, (ask, call.hold_s, call.id, call.fate)
        response = call_apart(say, *arguments) if call.is_apart else say(*arguments)
        # A response whose awaiter is cancelled cancels its call.
        return await asyncio.shield(share(_answer(response), "answer"))


async def _answer(response: DeploymentResponse[object]) -> object:
    return await response


def _write(fate: str, words: str) -> None:
    if fate:
        Path(fate).write_text(words)


def fan_application(router: RouterArgs) -> serve.Application:
    echo = serve.deployment(Echo).options(  # type: ignore[attr-defined]
        name="echo",
        num_replicas=3,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(
            request_router_class="serve_app.routing.serve_router:LoraplexRouter",  # type: ignore[arg-type]
            request_router_kwargs=router.model_dump(),
        ),
        graceful_shutdown_timeout_s=0,
    )
    fan = serve.deployment(Fan).options(  # type: ignore[attr-defined]
        name="fan", ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=0
    )
    application: serve.Application = fan.bind(echo.bind())
    return application
