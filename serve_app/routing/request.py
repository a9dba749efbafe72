"""The routing view of a submit call."""

from __future__ import annotations

from collections.abc import Sequence

from engine.activation import find_activation
from engine.admission import EngineLimits
from engine.prefix_digests import prefix_digests
from engine.types import Request, adapter_key
from registry.entities import WeightedVersion
from serve_app.messages import RoutingRequest


def make_routing_request(
    requests: Sequence[Request],
    adapters: Sequence[WeightedVersion],
    limits: EngineLimits,
    session: str | None = None,
    avoid: frozenset[str] = frozenset(),
    *,
    tenant: str = "",
    priority: int = 0,
) -> RoutingRequest:
    """Returns the routing request of a submit call. `requests`: one for each prompt; without any,
    while the prompts are not known, sizes are 0. `tenant` and `priority`: see `Tenants.account`."""
    key = adapter_key(adapters)
    # The engine finds the place by the adapter's own file: these names are a hint.
    invocation = adapters[0].version.invocation if adapters else ()
    places = [
        find_activation(r.prompt_token_ids, invocation) if invocation else 0 for r in requests
    ]
    num_base_tokens = sum(
        len(r.prompt_token_ids) if place is None else place
        for r, place in zip(requests, places, strict=True)
    )
    prefixes: tuple[int, ...] = ()
    if requests:
        first, place = requests[0], places[0]
        prefixes = prefix_digests(
            first.prompt_token_ids,
            None if place is None else key,
            first.cache_salt,
            limits.prefix_chunk,
            active_from=place if invocation else None,
        )
    return RoutingRequest(
        requests[0].request_id if requests else "",
        num_tokens=sum(request.num_tokens for request in requests),
        num_sequences=sum(len(r.resumed) or r.params.n for r in requests),
        adapter=key,
        adapter_rank=sum(one.version.rank for one in adapters),
        num_base_tokens=num_base_tokens,
        adapter_name=adapters[0].version.name if adapters else "",
        tenant=tenant,
        priority=priority,
        prefixes=prefixes,
        session=session,
        avoid=avoid,
    )
