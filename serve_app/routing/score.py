"""The expected time to the first token of a request on a replica, term by term. Pure.

    queue:   the rest of the step that the device had begun when the newest frame was sent; the step
             that was planned then, without this request; and the steps of the prompt tokens before
             this request's; or longer, until a row of the batch and space in the KV cache are free.
             Rows and space come back when running sequences end. Sequences that wait for room for
             their adapter are overtaken and do not count
    adapter: the load from the tier that holds it, and the usual wait for room on the device while
             others wait for room; runs while the request queues, so only the rest counts
    prefill: the tokens that the replica's prefix cache lacks
    way:     the overhead, mostly of the network: the time that recent first tokens needed beyond
             the other terms, about the median; equal for all replicas, so it decides no choice

A step lasts `step_fixed_s + step_token_s * prompt tokens + step_sequence_s * decoding sequences`
(`EngineLoad`), so n tokens need ceil(n / step_prompt_tokens) such steps while sequences decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from engine.types import key_digests
from serve_app.messages import RoutingRequest
from serve_app.routing.view import ReplicaView

# Used until an engine has measured its own steps and loads: for the first requests only.
_UNKNOWN_STEPS_S = (0.01, 0.0001, 0.0)
_UNKNOWN_HOST_S, _UNKNOWN_DISK_S, _UNKNOWN_REGISTRY_S = 0.01, 0.2, 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms in seconds. Admin routes return them under these names."""

    queue_s: float
    adapter_s: float
    prefill_s: float
    way_s: float = 0.0  # `BaseEstimates.overhead_s`

    @property
    def there_s(self) -> float:
        """The part in which replicas differ."""
        return self.queue_s + self.adapter_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return self.there_s + self.way_s


def expected_ttft(
    request: RoutingRequest, replica: ReplicaView, now_s: float | None = None
) -> Terms:
    """Returns the terms in about 2 us. `now_s`: on the clock of `replica.updated_s`; without it
    the newest frame counts as new."""
    limits, load, (_, token_s, _) = replica.limits, replica.load, _steps(replica)
    decode_s = decode_step_s(replica)
    most = load.step_prompt_tokens or max(1, limits.max_num_batched_tokens)
    is_blocked = _is_blocked(request, replica)
    queued = load.queued_tokens - (0 if is_blocked else load.queued_tokens_for_adapter)
    passed_s = 0.0 if now_s is None else max(0.0, now_s - replica.updated_s)
    queue_s = max(0.0, load.in_flight_s - passed_s)
    if load.num_running or queued:
        # The step that was planned when the frame was sent: this request is not in it.
        planned = min(queued, most)
        queued -= planned
        planned_s = planned * token_s + decode_s
        queue_s += planned_s if load.in_flight_s else max(0.0, planned_s - passed_s)
    queued += replica.placed_tokens
    num_steps = queued // most
    queue_s += queued * token_s + num_steps * decode_s
    until_free = _steps_until_free(request, replica, queued)
    if until_free:
        queue_s = max(queue_s, until_free * decode_s)
    missing = max(1, request.num_tokens - replica.num_cached_tokens(request.prefixes))
    prefill_s = missing * token_s + (ceil((queued + missing) / most) - num_steps) * decode_s
    adapter_s = max(0.0, adapter_load_s(request.adapter, replica) - queue_s)
    if is_blocked:
        adapter_s = max(adapter_s, load.adapter_room_s - queue_s)
    return Terms(queue_s, adapter_s, prefill_s, replica.estimates.overhead_s)


def decode_step_s(replica: ReplicaView) -> float:
    """Returns the seconds of a step with the present sequences and no prompt tokens."""
    fixed_s, _, sequence_s = _steps(replica)
    return fixed_s + sequence_s * min(_num_ahead(replica), replica.limits.max_num_seqs)


def _num_ahead(replica: ReplicaView) -> int:
    """Returns the sequences that run or will before a new request, adapters permitting."""
    return replica.num_sequences - replica.load.num_waiting_for_adapter


def prompt_token_s(replica: ReplicaView) -> float:
    """Returns the seconds that a prompt token adds to a step."""
    return _steps(replica)[1]


def work_s(request: RoutingRequest, replica: ReplicaView) -> float:
    """Returns the seconds of a replica's time that a request uses, in half full batches."""
    missing = max(1, request.num_tokens - replica.num_cached_tokens(request.prefixes))
    fixed_s, token_s, sequence_s = _steps(replica)
    step_share_s = fixed_s / max(1, replica.limits.max_num_seqs // 2) + sequence_s
    return missing * token_s + request.num_sequences * replica.output_tokens * step_share_s


def adapter_load_s(adapter: str | None, replica: ReplicaView) -> float:
    """Returns the seconds until the replica can use all adapters of the key, by the tiers that hold
    them. They are loaded at the same time."""
    return max((_load_s(digest, replica) for digest in key_digests(adapter)), default=0.0)


def _load_s(adapter: str, replica: ReplicaView) -> float:
    if adapter in replica.on_device:
        return 0.0
    of_base, own = replica.estimates.load_s, replica.load_s
    host_s = of_base.host or own.host or _UNKNOWN_HOST_S
    if adapter in replica.on_host:
        return host_s
    if adapter in replica.on_disk:
        fetch_s = of_base.disk or own.disk or _UNKNOWN_DISK_S
    else:
        fetch_s = of_base.registry or own.registry or _UNKNOWN_REGISTRY_S
    return host_s + (fetch_s / 2 if replica.is_loading(adapter) else fetch_s)


def _steps(replica: ReplicaView) -> tuple[float, float, float]:
    """Returns the seconds of a step itself, of a prompt token and of a decoding sequence in it."""
    load = replica.load
    if load.step_fixed_s or load.step_token_s:
        return load.step_fixed_s, load.step_token_s, load.step_sequence_s
    return replica.estimates.steps_s or _UNKNOWN_STEPS_S


def _is_blocked(request: RoutingRequest, replica: ReplicaView) -> bool:
    """Returns True if an adapter is probably refused room on the device: it is not there, and
    others wait for room."""
    return replica.load.num_waiting_for_adapter > 0 and any(
        digest not in replica.on_device for digest in key_digests(request.adapter)
    )


def _steps_until_free(request: RoutingRequest, replica: ReplicaView, queued: int) -> float:
    """Returns the decoding steps until a row and enough KV blocks are free, if the running
    sequences end evenly over their length."""
    limits, steps = replica.limits, 0.0
    rows_lacking = _num_ahead(replica) + 1 - limits.max_num_seqs
    if rows_lacking > 0:
        steps = rows_lacking * replica.output_tokens / max(1, limits.max_num_seqs)
    free = replica.free_kv_tokens
    lacking = min(request.num_tokens + queued, limits.max_kv_tokens) - free
    if lacking > 0 and (used := limits.max_kv_tokens - free) > 0:
        steps = max(steps, lacking * replica.output_tokens / used)
    return steps
