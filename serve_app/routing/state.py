"""The routing state that a process shares between Serve's router and its event loop: for each base
application the views of its replicas, its policy and its decisions. `ViewFeed` fills the views.

Serve makes the router itself, from plain values and in a thread of its own, so the two sides find
each other through this module: the only module with state of the process. Every function may be
called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.admission import EngineLimits
from serve_app.messages import RoutingRequest
from serve_app.routing.decisions import Decisions
from serve_app.routing.expected_ttft import ExpectedTtft
from serve_app.routing.policies import Option, PolicyError, make_policy
from serve_app.routing.policy import Policy, Ranked
from serve_app.routing.view import ReplicaView, ReplicaViews
from serve_app.stream.wire import DEPRIORITISE_S, SILENCE_S, Step

logger = logging.getLogger(__name__)

# Until the base has described itself: no limit keeps a request from a replica.
_UNKNOWN_LIMITS = EngineLimits(0, 0, 0)


class RoutingState:
    """The routing state of a base application."""

    def __init__(
        self, app_name: str, connected: dict[str, ReplicaView], lock: threading.Lock
    ) -> None:
        """`connected`, `lock`: see `ReplicaViews`."""
        self.app_name = app_name
        self.views = ReplicaViews(_UNKNOWN_LIMITS, connected, lock)
        self.decisions = Decisions()
        self.policy_name = "expected_ttft"
        self._policy: Policy = ExpectedTtft()
        self._lock = threading.Lock()
        self._listeners: tuple[tuple[Callable[[], object], Callable[[str], None]], ...] = ()

    def set_policy(self, name: str, options: Mapping[str, Option]) -> None:
        """Replaces the policy. A configuration file's policy is checked when the file is read; if
        it cannot be made here nevertheless, requests follow the present policy."""
        try:
            policy = make_policy(name, options)
        except PolicyError:
            logger.exception("%s keeps the policy %s", self.app_name, self.policy_name)
            return
        with self._lock:
            self._policy, self.policy_name = policy, name
            self._update_policy()

    def rank(self, request: RoutingRequest) -> list[Ranked]:
        """Ranks the present replicas, which must not be empty. Raises any exception of
        a user's policy."""
        with self._lock:
            return self._policy.rank(request, self.views.replicas, time.monotonic())

    def warm_ups(self, num_ingresses: int) -> list[tuple[str, str]]:
        """Returns the (adapter, replica) pairs to load before requests need them.
        `num_ingresses`: how many ingresses share the traffic."""
        with self._lock:
            if isinstance(self._policy, ExpectedTtft):
                self._policy.placement.num_ingresses = max(1, num_ingresses)
                return self._policy.warm_ups(time.monotonic())
        return []

    def place(self, request: RoutingRequest, replica_id: str) -> None:
        """Counts the request at the replica that was chosen for it."""
        if (view := self.views.get(replica_id)) is not None:
            view.place(request, time.monotonic())
        for _, placed in self._listeners:
            placed(request.call_id)

    def unplace(self, call_id: str) -> None:
        """Undoes `place`, unless the decision is forgotten by now."""
        decision = self.decisions.get(call_id)
        if decision is not None and (view := self.views.get(decision.replica_id)) is not None:
            view.unplace(call_id)

    def set_replicas(self, replica_ids: Iterable[str]) -> None:
        """Replaces the set of replicas by Serve's newest."""
        if not self.views.set_replicas(replica_ids):
            return
        with self._lock:
            self._update_policy()
        for replicas_changed, _ in self._listeners:
            try:
                replicas_changed()
            except Exception:  # a listener's failure must not reach the router
                logger.exception("a listener to the replicas of %s failed", self.app_name)

    def add_listener(
        self, replicas_changed: Callable[[], object], placed: Callable[[str], None]
    ) -> None:
        """Both are called in the router's thread: `replicas_changed` when Serve's router has
        another set of replicas, `placed` when a replica's view counts a call from now on."""
        with self._lock:
            self._listeners = (*self._listeners, (replicas_changed, placed))

    def _update_policy(self) -> None:
        try:
            self._policy.changed([view.replica_id for view in self.views.replicas])
        except Exception:
            logger.exception("the policy %s failed on a change of the replicas", self.policy_name)


class RoutingStates:
    """All routing states of a process, and the views of all engines that are connected to it."""

    def __init__(self) -> None:
        # By engine id; includes engines that Serve's router has not reported yet.
        self.connected: dict[str, ReplicaView] = {}
        self._states: dict[str, RoutingState] = {}  # by application
        self._lock = threading.Lock()

    def of(self, app_name: str) -> RoutingState:
        """Returns the application's state, made by the first caller. It is kept for ever: there
        are only as many states as base versions."""
        with self._lock:
            state = self._states.get(app_name)
            if state is None:
                state = self._states[app_name] = RoutingState(app_name, self.connected, self._lock)
            return state

    @property
    def all(self) -> Sequence[RoutingState]:
        with self._lock:
            return tuple(self._states.values())

    def attach(self, engine_id: str) -> ReplicaView:
        """Returns the view of an engine whose first frame arrived, possibly before Serve reported
        the replica. The router's thread may add the replica at the same moment: the lock leaves a
        single view for both."""
        with self._lock:
            for state in self._states.values():
                if (view := state.views.get(engine_id)) is not None:
                    break
            else:
                view = ReplicaView(engine_id, _UNKNOWN_LIMITS)
            return self.connected.setdefault(engine_id, view)


_states = RoutingStates()

connected = _states.connected


# Functions, because Serve pickles the router's class by value, together with the names in it.
def routing_state(app_name: str) -> RoutingState:
    return _states.of(app_name)


def placed_at(app_name: str, call_id: str) -> str | None:
    """Returns the replica that the call was sent to; None if that is forgotten by now."""
    decision = _states.of(app_name).decisions.get(call_id)
    return None if decision is None else decision.replica_id


def deprioritise(engine_id: str) -> None:
    """Makes the engine the last resort until its next frame. The connection lives on, so its
    prefixes stay: the engine does not send them again."""
    if (view := connected.get(engine_id)) is not None:
        view.is_connected = False


class ViewFeed:
    """The listener of a `StreamServer`: writes its frames into the views of the engines that sent
    them, and measured times into the decisions. Runs in the ingress's event loop."""

    def __init__(self, views_changed: Callable[[], None] = lambda: None) -> None:
        """`views_changed` is called after each frame."""
        self._views_changed = views_changed

    def frame_received(self, engine_id: str, step: Step) -> None:
        view = connected.get(engine_id) or _states.attach(engine_id)
        is_stalled = step.stall * SILENCE_S > DEPRIORITISE_S
        now_s, same = time.monotonic(), step.same_adapters
        view.observe(step.load, now_s, is_stalled=is_stalled, same_adapters=same)
        if step.cached_prefixes or step.evicted_prefixes or step.is_whole:
            view.change_prefixes(
                step.cached_prefixes, step.evicted_prefixes, is_whole=step.is_whole
            )
        if step.adapters_on_disk is not None:
            view.on_disk = frozenset(step.adapters_on_disk)
        view.observe_load_s(step.load_s)
        if step.accepted or step.outputs:
            _record(view, step)
        self._views_changed()

    def choice_stopped(self, engine_id: str, num_tokens: int) -> None:
        view = connected.get(engine_id)
        if view is not None:
            view.record_length(num_tokens)

    def engine_lost(self, engine_id: str) -> None:
        view = connected.pop(engine_id, None)
        if view is not None:
            view.disconnect()


def _record(view: ReplicaView, step: Step) -> None:
    """Records that requests were accepted, got their first token or ended."""
    decisions = [state.decisions for state in _states.all]
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
