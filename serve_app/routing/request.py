"""The routing view of a submit call."""

from __future__ import annotations

from collections.abc import Sequence

from engine.admission import EngineLimits
from engine.prefix_digests import prefix_digests
from engine.types import Request
from registry.entities import AdapterVersion
from serve_app.messages import RoutingRequest


def make_routing_request(
    requests: Sequence[Request],
    adapter: AdapterVersion | None,
    limits: EngineLimits,
    session: str | None = None,
    avoid: frozenset[str] = frozenset(),
    *,
    tenant: str = "",
    priority: int = 0,
) -> RoutingRequest:
    """Returns the routing request of a submit call. `requests`: one for each prompt; without any,
    while the prompts are not known, sizes are 0. `tenant` and `priority`: see `Tenants.account`."""
    name, digest, rank = "", None, 0
    if adapter is not None:
        name, digest, rank = adapter.name, adapter.digest, adapter.rank
    call_id = ""
    prefixes: tuple[int, ...] = ()
    if requests:
        first = requests[0]
        call_id = first.request_id
        prefixes = prefix_digests(
            first.prompt_token_ids, digest, first.cache_salt, limits.prefix_chunk
        )
    return RoutingRequest(
        call_id,
        num_tokens=sum(request.num_tokens for request in requests),
        num_sequences=sum(len(r.resumed) or r.params.n for r in requests),
        adapter=digest,
        adapter_rank=rank,
        adapter_name=name,
        tenant=tenant,
        priority=priority,
        prefixes=prefixes,
        session=session,
        avoid=avoid,
    )
