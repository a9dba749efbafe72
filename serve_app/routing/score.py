"""The expected time to the first token of a request on a replica, term by term. Pure.

    queue:   the step under way, and the prompt tokens that wait there before this request
    adapter: from the tier that it is in there; runs beside the queue, so only what is left counts
    prefill: the tokens that the prefix cache there lacks

A step takes `step_fixed_s + step_token_s * prompt tokens + step_sequence_s * decoding sequences`
(`EngineLoad`), so that n tokens take ceil(n / budget) steps of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from serve_app.routing.view import Ask, ReplicaView

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

    @property
    def total_s(self) -> float:
        return self.queue_s + self.adapter_s + self.prefill_s


def expected_ttft(ask: Ask, replica: ReplicaView) -> Terms:
    load, limits = replica.load, replica.limits
    fixed_s = load.step_fixed_s or _UNKNOWN_STEP_S
    token_s = load.step_token_s or _UNKNOWN_TOKEN_S
    num_sequences = replica.num_sequences
    running = min(num_sequences, limits.max_num_seqs)
    decode_s = fixed_s + load.step_sequence_s * running
    queued = replica.queued_tokens
    missing = max(1, ask.num_tokens - replica.num_cached_tokens(ask.prefixes))
    busy_s = decode_s / 2 if num_sequences else 0.0  # a step is under way, half of it on average
    queue_s = busy_s + queued * token_s
    queue_s += queued // limits.max_num_batched_tokens * decode_s
    if num_sequences >= limits.max_num_seqs:  # no row is free until one ends
        queue_s += (num_sequences - limits.max_num_seqs + 1) * decode_s
    num_steps = ceil(missing / limits.max_num_batched_tokens)
    prefill_s = missing * token_s + num_steps * decode_s
    adapter_s = max(0.0, adapter_load_s(ask.adapter, replica) - queue_s)
    return Terms(queue_s, adapter_s, prefill_s)


def adapter_load_s(adapter: str | None, replica: ReplicaView) -> float:
    """Until it can be used there, from the tier that holds it."""
    measured = replica.load_s
    if adapter is None or adapter in replica.on_device:
        return 0.0
    from_host = measured.host or _UNKNOWN_HOST_S
    if adapter in replica.on_host:
        return from_host
    from_disk = from_host + (measured.disk or _UNKNOWN_DISK_S)
    if adapter in replica.on_disk:
        return from_disk
    from_registry = from_host + (measured.registry or _UNKNOWN_REGISTRY_S)
    return from_registry / 2 if replica.is_loading(adapter) else from_registry
