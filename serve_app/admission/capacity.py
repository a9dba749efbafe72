"""The capacity of a base's engine replicas for more requests. Pure.

An engine gets only a little work ahead of its running batch: requests that wait in an engine are
served in the order of their arrival, while those in front of it can still be reordered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_app.messages import RoutingRequest
from serve_app.routing.score import expected_ttft, prompt_token_s
from serve_app.routing.view import ReplicaView

# Rows given in excess of the free rows, as a fraction of all. After a sequence has ended, its
# successor reaches the engine some 20 ms later; in that time 1/25 of a full batch ends if responses
# last half a second.
_ROWS_AHEAD = 1 / 16
_EMPTY_REQUEST = RoutingRequest("", 0)


def has_capacity(
    replicas: Sequence[ReplicaView], under_way: Iterable[RoutingRequest], max_queue_s: float
) -> bool:
    """Returns True if another request may be sent. `under_way`: requests that were sent and that
    no replica's view counts yet. True without any known replica: then Serve's limits apply."""
    rows, seconds, is_any_connected = 0, 0.0, False
    for replica in replicas:  # mostly ends at the first of a thousand: as soon as there is enough
        if not replica.is_connected:
            continue
        if not is_any_connected:
            is_any_connected = True
            for request in under_way:
                rows -= request.num_sequences
                seconds -= request.num_tokens * prompt_token_s(replica)
        free_rows, free_s = _capacity(replica, max_queue_s)
        rows += free_rows
        seconds += free_s
        if rows > 0 and seconds > 0:
            return True
    return not is_any_connected and _has_rows_before_first_frame(replicas, under_way)


def _has_rows_before_first_frame(
    replicas: Sequence[ReplicaView], under_way: Iterable[RoutingRequest]
) -> bool:
    """Replicas that have sent no frame yet get as many sequences as they have rows. With more, all
    requests that waited for the start would queue in the first replica when the others come."""
    num_rows = sum(replica.limits.max_num_seqs for replica in replicas)
    num_placed = sum(replica.num_sequences for replica in replicas)
    num_sent = num_placed + sum(request.num_sequences for request in under_way)
    return not num_rows or num_sent < num_rows


def _capacity(replica: ReplicaView, max_queue_s: float) -> tuple[int, float]:
    """Returns (rows, seconds of prefill) that the replica has to spare."""
    load, num_rows = replica.load, replica.limits.max_num_seqs
    num_ahead = max(1, round(num_rows * _ROWS_AHEAD))
    free_rows = num_rows + num_ahead - replica.num_sequences
    # Sequences that wait though rows are free wait for memory; more of them would wait as well.
    num_stuck = load.num_waiting - load.num_waiting_for_adapter
    if free_rows <= 0 or num_stuck > num_ahead:
        return 0, 0.0
    free_s = max_queue_s - expected_ttft(_EMPTY_REQUEST, replica).queue_s
    if free_s > 0:
        return free_rows, free_s
    # Prompts that fit into a single step go together, however slow it is, but without rows ahead.
    free_tokens = replica.limits.max_num_batched_tokens - replica.queued_tokens
    if free_tokens > 0 and free_rows > num_ahead:
        return free_rows - num_ahead, free_tokens * prompt_token_s(replica) or max_queue_s
    return 0, 0.0
