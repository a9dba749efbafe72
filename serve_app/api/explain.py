"""The parts of a request's time to first token, in headers, with the router's expectation of them.

Only for clients with the admin token, because replicas, queues and cache contents are not public.

    prepare  reading, resolving the model, tokenizing
    fair     in the fair queue
    route    in Serve's router, until a replica was chosen
    adapter  until the adapter was in the engine's memory
    queue    in the engine, until its first step
    prefill  its steps to the first token, and the network to the engine and back
    deliver  from the token's arrival here to the response
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from serve_app.api.admin_auth import is_admin
from serve_app.dispatch.completion import PreparedRequest
from serve_app.routing.decisions import Decision
from serve_app.routing.state import routing_state

HEADER = "x-loraplex-explain"
_UNAUTHORIZED = {HEADER: "needs the admin token"}


@dataclass(frozen=True, slots=True)
class Parts:
    """The seconds of each part; their sum is the time to first token."""

    prepare: float
    fair: float
    route: float
    adapter: float
    queue: float
    prefill: float
    deliver: float

    @property
    def total_s(self) -> float:
        return sum(s for _, s in self.items())

    def items(self) -> tuple[tuple[str, float], ...]:
        return tuple((name, getattr(self, name)) for name in self.__slots__)


def measured(decision: Decision, arrival_s: float, fair_s: float, first_s: float) -> Parts:
    """Splits the time from `arrival_s` to `first_s`, when the response had its first token.

    The engine reports durations only, so that the clocks of two machines are never compared.
    """
    arrived_s = min(decision.first_token_s or first_s, first_s)
    adapter_s, queue_s = decision.adapter_wait_s, decision.engine_queue_s
    return Parts(
        prepare=decision.asked_s - arrival_s - fair_s,
        fair=fair_s,
        route=decision.chosen_s - decision.asked_s,
        adapter=adapter_s,
        queue=queue_s,
        prefill=arrived_s - decision.chosen_s - adapter_s - queue_s,
        deliver=first_s - arrived_s,
    )


def is_wanted(http: Request) -> bool:
    return http.headers.get(HEADER) == "1"


def explain_headers(
    http: Request, prepared: PreparedRequest, arrival_s: float, fair_s: float, first_s: float
) -> dict[str, str]:
    """Returns no headers if the decision was forgotten, as it may be after a long whole answer.

    `arrival_s`, `first_s`: time.time() of the request and of its first token (0: none); `fair_s`:
    its seconds in the fair queue.
    """
    if not is_admin(http):
        return _UNAUTHORIZED
    app_name, call_id = prepared.parameters.app_name, prepared.routing.call_id
    decision = routing_state(app_name).decisions.get(call_id)
    if decision is None or not first_s:
        return {}
    parts = measured(decision, arrival_s, fair_s, first_s)
    times = [*parts.items(), ("total", parts.total_s)]
    if (expected := decision.expected) is not None:
        times += [
            ("expected-queue", expected.queue_s),
            ("expected-adapter", expected.adapter_s),
            ("expected-prefill", expected.prefill_s),
            ("expected-way", expected.way_s),
        ]
    return {
        "x-loraplex-replica": decision.replica_id,
        "x-loraplex-router": f"{decision.policy}; reason={decision.reason}",
        "server-timing": ", ".join(f"{name};dur={1000 * s:.2f}" for name, s in times),
    }
