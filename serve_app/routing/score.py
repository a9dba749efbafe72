"""The expected time to the first token of a request on a replica, term by term. Pure.

    queue:   the step under way, then whatever takes longest: the prompt tokens that wait there, a
             row in the batch, or room in the KV cache, which come when running sequences end
    adapter: from the tier that it is in there; runs beside the queue, so only what is left counts
    prefill: the tokens that the prefix cache there lacks
    way:     to the engine, and of the token back: what the latest ones took beyond the other
             terms, about their median; the same for all replicas, so it decides nothing

A step takes `step_fixed_s + step_token_s * prompt tokens + step_sequence_s * decoding sequences`
(`EngineLoad`), so that n tokens take ceil(n / budget) steps of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from serve_app.messages import RoutingRequest
from serve_app.routing.view import ReplicaView

# Until an engine has measured its own steps and loads; of the first requests after a start only.
_UNKNOWN_STEP_S = 0.01
_UNKNOWN_TOKEN_S = 0.0001
_UNKNOWN_HOST_S, _UNKNOWN_DISK_S, _UNKNOWN_REGISTRY_S = 0.01, 0.2, 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds."""

    queue_s: float
    adapter_s: float
    prefill_s: float
    way_s: float = 0.0

    @property
    def there_s(self) -> float:
        """In which replicas differ."""
        return self.queue_s + self.adapter_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return self.there_s + self.way_s


def expected_ttft(ask: RoutingRequest, replica: ReplicaView) -> Terms:
    limits, (_, token_s, _) = replica.limits, _steps(replica)
    num_sequences, queued = replica.num_sequences, replica.queued_tokens
    decode_s = decode_step_s(replica)
    budget = max(1, limits.max_num_batched_tokens)
    queue_s = queued * token_s + queued // budget * decode_s
    num_steps = _steps_until_there_is_room(ask, replica, queued, num_sequences)
    if num_steps:
        queue_s = max(queue_s, num_steps * decode_s)
    if num_sequences:
        queue_s += decode_s / 2  # a step is under way, half of it on average
    missing = max(1, ask.num_tokens - replica.num_cached_tokens(ask.prefixes))
    prefill_s = missing * token_s + ceil(missing / budget) * decode_s
    adapter_s = max(0.0, adapter_load_s(ask.adapter, replica) - queue_s)
    return Terms(queue_s, adapter_s, prefill_s, replica.usual.way_s)


def decode_step_s(replica: ReplicaView) -> float:
    """A step without prompt tokens, as long as it is now."""
    fixed_s, _, sequence_s = _steps(replica)
    return fixed_s + sequence_s * min(replica.num_sequences, replica.limits.max_num_seqs)


def prompt_token_s(replica: ReplicaView) -> float:
    """What a prompt token adds to a step."""
    return _steps(replica)[1]


def work_s(ask: RoutingRequest, replica: ReplicaView) -> float:
    """What a request takes of a replica's time, in batches that are half full."""
    missing = max(1, ask.num_tokens - replica.num_cached_tokens(ask.prefixes))
    fixed_s, token_s, sequence_s = _steps(replica)
    step_share_s = fixed_s / max(1, replica.limits.max_num_seqs // 2) + sequence_s
    return missing * token_s + ask.num_sequences * replica.output_tokens * step_share_s


def adapter_load_s(adapter: str | None, replica: ReplicaView) -> float:
    """Until it can be used there, from the tier that holds it."""
    if adapter is None or adapter in replica.on_device:
        return 0.0
    usual, own = replica.usual.load_s, replica.load_s
    host_s = usual.host or own.host or _UNKNOWN_HOST_S
    if adapter in replica.on_host:
        return host_s
    if adapter in replica.on_disk:
        fetch_s = usual.disk or own.disk or _UNKNOWN_DISK_S
    else:
        fetch_s = usual.registry or own.registry or _UNKNOWN_REGISTRY_S
    return host_s + (fetch_s / 2 if replica.is_loading(adapter) else fetch_s)


def _steps(replica: ReplicaView) -> tuple[float, float, float]:
    """Seconds of a step, of a prompt token and of a decoding sequence in it."""
    load, usual = replica.load, replica.usual
    if load.step_fixed_s or load.step_token_s:
        return load.step_fixed_s, load.step_token_s, load.step_sequence_s
    if usual.step_fixed_s or usual.step_token_s:
        return usual.step_fixed_s, usual.step_token_s, usual.step_sequence_s
    return _UNKNOWN_STEP_S, _UNKNOWN_TOKEN_S, 0.0


def _steps_until_there_is_room(
    ask: RoutingRequest, replica: ReplicaView, queued: int, num_sequences: int
) -> float:
    """Of decoding: rows and KV blocks come back as running sequences end, evenly over their
    length."""
    limits, steps = replica.limits, 0.0
    rows_lacking = num_sequences + 1 - limits.max_num_seqs
    if rows_lacking > 0:
        steps = rows_lacking * replica.output_tokens / max(1, limits.max_num_seqs)
    free = replica.free_kv_tokens
    lacking = min(ask.num_tokens + queued, limits.max_kv_tokens) - free
    if lacking > 0 and (used := limits.max_kv_tokens - free) > 0:
        steps = max(steps, lacking * replica.output_tokens / used)
    return steps
