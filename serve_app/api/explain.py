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

from fastapi import Request

from serve_app.api.admin_auth import is_admin
from serve_app.dispatch.completion import PreparedRequest
from serve_app.routing.decisions import Decision
from serve_app.routing.state import routing_state

HEADER = "x-loraplex-explain"


def measured(
    decision: Decision, arrival_s: float, fair_s: float, first_s: float
) -> dict[str, float]:
    """Splits the time from `arrival_s` to `first_s`, when the response had its first token, into
    the seconds of each part.

    The engine reports durations only, so that the clocks of two machines are never compared.
    """
    arrived_s = min(decision.first_token_s or first_s, first_s)
    adapter_s, queue_s = decision.adapter_wait_s, decision.engine_queue_s
    return {
        "prepare": decision.asked_s - arrival_s - fair_s,
        "fair": fair_s,
        "route": decision.chosen_s - decision.asked_s,
        "adapter": adapter_s,
        "queue": queue_s,
        "prefill": arrived_s - decision.chosen_s - adapter_s - queue_s,
        "deliver": first_s - arrived_s,
    }


def explain_headers(
    http: Request, prepared: PreparedRequest, arrival_s: float, fair_s: float, first_s: float
) -> dict[str, str]:
    """Returns no headers if the client wants none, and if the decision was forgotten, as it may be
    after a long whole answer.

    `arrival_s`, `first_s`: time.time() of the request and of its first token (0: none); `fair_s`:
    its seconds in the fair queue.
    """
    if http.headers.get(HEADER) != "1":
        return {}
    if not is_admin(http):
        return {HEADER: "needs the admin token"}
    app_name, call_id = prepared.handle.app_name, prepared.routing.call_id
    decision = routing_state(app_name).decisions.get(call_id)
    if decision is None or not first_s:
        return {}
    parts = measured(decision, arrival_s, fair_s, first_s)
    times = [*parts.items(), ("total", sum(parts.values()))]
    if (expected := decision.expected) is not None:
        names = ("queue", "adapter", "prefill", "way")
        times += [(f"expected-{name}", getattr(expected, f"{name}_s")) for name in names]
    return {
        "x-loraplex-replica": decision.replica_id,
        "x-loraplex-router": f"{decision.policy}; reason={decision.reason}",
        "server-timing": ", ".join(f"{name};dur={1000 * s:.2f}" for name, s in times),
    }
