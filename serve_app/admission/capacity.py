"""How much more work the engine replicas of a base are to be given now. Pure.

An engine gets only a little work ahead of what runs: what waits in an engine is served in the order
of its arrival, what waits in front of it can still be put in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_app.messages import RoutingRequest
from serve_app.routing.score import expected_ttft, prompt_token_s
from serve_app.routing.view import ReplicaView

# Rows ahead of those that are free, as a part of all: a sequence that ends is known here and has a
# successor there some 20 ms later, in which a full batch of half a second's answers ends by 1/25.
_ROWS_AHEAD = 1 / 16
_NOTHING = RoutingRequest("", 0)


def has_room(
    replicas: Sequence[ReplicaView], under_way: Iterable[RoutingRequest], max_queue_s: float
) -> bool:
    """Whether one more request may go. `under_way`: sent, but not counted by any replica yet.
    True where no replica is known: then others decide."""
    rows, seconds, is_any_known = 0, 0.0, False
    for replica in replicas:  # until there is enough: one of a thousand, most of the time
        if not replica.is_connected or replica.is_draining:
            continue
        if not is_any_known:
            is_any_known = True
            for ask in under_way:
                rows -= ask.num_sequences
                seconds -= ask.num_tokens * prompt_token_s(replica)
        free_rows, free_s = _room(replica, max_queue_s)
        rows += free_rows
        seconds += free_s
        if rows > 0 and seconds > 0:
            return True
    return not is_any_known and _may_go_unseen(replicas, under_way)


def _may_go_unseen(replicas: Sequence[ReplicaView], under_way: Iterable[RoutingRequest]) -> bool:
    """Replicas that said nothing yet get what their rows hold: all that waited for the start would
    else sit in the first one's queue when the others come."""
    staying = [one for one in replicas if not one.is_draining]
    num_rows = sum(one.limits.max_num_seqs for one in staying)
    num_sent = sum(one.num_sequences for one in staying)
    return not num_rows or num_sent + sum(ask.num_sequences for ask in under_way) < num_rows


def _room(replica: ReplicaView, max_queue_s: float) -> tuple[int, float]:
    """Rows, and seconds of prefilling."""
    load, num_rows = replica.load, replica.limits.max_num_seqs
    num_ahead = max(1, round(num_rows * _ROWS_AHEAD))
    free_rows = num_rows + num_ahead - replica.num_sequences
    # With free rows they wait for memory, and more of them would wait just so.
    num_stuck = load.num_waiting - load.num_waiting_for_adapter
    if free_rows <= 0 or num_stuck > num_ahead:
        return 0, 0.0
    free_s = max_queue_s - expected_ttft(_NOTHING, replica).queue_s
    if free_s > 0:
        return free_rows, free_s
    # Prompts that fit into one step go together, however slow it is; but none ahead of the rows.
    free_tokens = replica.limits.max_num_batched_tokens - replica.queued_tokens
    if free_tokens > 0 and free_rows > num_ahead:
        return free_rows - num_ahead, free_tokens * prompt_token_s(replica) or max_queue_s
    return 0, 0.0
