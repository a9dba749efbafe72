"""From a submit call's requests to what a router reckons with."""

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
) -> RoutingRequest:
    """`requests`: of one submit call, one for each prompt."""
    first = requests[0]
    digest = None if adapter is None else adapter.digest
    return RoutingRequest(
        call_id=first.request_id,
        num_tokens=sum(request.num_tokens for request in requests),
        num_sequences=sum(len(r.resumed) or r.params.n for r in requests),
        adapter=digest,
        adapter_rank=0 if adapter is None else adapter.rank,
        prefixes=prefix_digests(
            first.prompt_token_ids, digest, first.cache_salt, limits.prefix_chunk
        ),
        session=session,
        avoid=avoid,
    )
