"""Writes the frames of the side stream into the views of the engines that sent them, and the
measured times into the decisions of the requests. Runs in the ingress's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_app.routing import state as routing
from serve_app.routing.view import LoadSeconds, ReplicaView
from serve_app.stream.wire import DEPRIORITISE_S, SILENCE_S, Step


class ViewFeed:
    """The listener of a `StreamServer`."""

    def __init__(self, views_changed: Callable[[], None] = lambda: None) -> None:
        """`views_changed` is called after each frame."""
        self._views_changed = views_changed

    def frame_received(self, engine_id: str, step: Step) -> None:
        view = routing.connected.get(engine_id) or routing.attach(engine_id)
        is_stalled = step.stall * SILENCE_S > DEPRIORITISE_S
        view.observe(step.load, time.monotonic(), is_stalled=is_stalled)
        if step.cached_prefixes or step.evicted_prefixes or step.is_whole:
            view.change_prefixes(
                step.cached_prefixes, step.evicted_prefixes, is_whole=step.is_whole
            )
        if step.adapters_on_disk is not None:
            view.observe_disk(step.adapters_on_disk)
        view.observe_load_s(LoadSeconds(*step.load_s))
        if step.accepted or step.outputs:
            _record(view, step)
        self._views_changed()

    def choice_stopped(self, engine_id: str, num_tokens: int) -> None:
        """Counts a choice that ended at a stop string, which no frame reports."""
        view = routing.connected.get(engine_id)
        if view is not None:
            view.record_length(num_tokens)

    def engine_lost(self, engine_id: str) -> None:
        view = routing.connected.pop(engine_id, None)
        if view is not None:
            view.disconnect()


def _record(view: ReplicaView, step: Step) -> None:
    """Records that requests were accepted, got their first token or ended."""
    decisions = [state.decisions for state in routing.routing_states()]
    for accepted in step.accepted:
        view.unplace(accepted.request_id)
        for of_base in decisions:
            of_base.accepted(accepted.request_id, accepted.adapter_s, accepted.found_in)
    now_s = time.time()
    for output in step.outputs:
        if output.offset == 0:
            for of_base in decisions:
                decision = of_base.first_token(output.request_id, output.queued_s, now_s)
                if decision is not None and decision.expected is not None:
                    view.estimates.learn_overhead(decision.answer_s - decision.expected.there_s)
        if output.finish_reason is not None:
            view.record_length(output.offset + len(output.token_ids))
