"""Where Serve's router, which runs in its own thread and is made by Ray, meets the rest of its
process: for each base application its views, its policy and its decisions.

The one place with state of the process, for Serve makes routers with plain values only. All of it
may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from time import monotonic

from engine.admission import EngineLimits
from serve_app.messages import RoutingRequest
from serve_app.routing.decisions import Decisions
from serve_app.routing.expected_ttft import ExpectedTtft
from serve_app.routing.policies import PolicyArgs, PolicyError, make_policy
from serve_app.routing.policy import Policy, Ranked
from serve_app.routing.view import ReplicaView, ReplicaViews

logger = logging.getLogger(__name__)

OnReplicas = Callable[[frozenset[str], frozenset[str]], None]

# Until the base described itself: no limit that would keep a request from a replica.
_UNKNOWN_LIMITS = EngineLimits(0, 0, 0)


class RoutingState:
    """Of one base application."""

    def __init__(
        self, app_name: str, connected: dict[str, ReplicaView], lock: threading.Lock
    ) -> None:
        """`connected`, `lock`: as `ReplicaViews` takes them."""
        self.app_name = app_name
        self.views = ReplicaViews(_UNKNOWN_LIMITS, connected, lock)
        self.decisions = Decisions()
        self.policy_name = "expected_ttft"
        self.on_placed: Callable[[str, str], None] | None = None  # (application, call)
        self._policy: Policy = ExpectedTtft()
        self._lock = threading.Lock()
        self._listeners: list[OnReplicas] = []

    def set_policy(self, args: PolicyArgs) -> None:
        """The file's policy was checked where it was read; should it be impossible here, requests
        go as they would without it."""
        try:
            policy = make_policy(args)
        except PolicyError:
            logger.exception("%s goes on with %s", self.app_name, self.policy_name)
            return
        with self._lock:
            self._policy, self.policy_name = policy, args.policy
            self._tell_policy()

    def rank(self, ask: RoutingRequest) -> list[Ranked]:
        """Over the replicas there are now, at least one. Raises whatever a user's policy raises."""
        with self._lock:
            return self._policy.rank(ask, self.views.replicas, monotonic())

    def warm_ups(self, num_ingresses: int) -> list[tuple[str, str]]:
        """(adapter, replica) that shall have it before requests ask for it; asked twice a second.
        `num_ingresses`: that share the traffic."""
        with self._lock:
            if isinstance(self._policy, ExpectedTtft):
                self._policy.placement.num_ingresses = max(1, num_ingresses)
                return self._policy.warm_ups(monotonic())
        return []

    def place(self, ask: RoutingRequest, replica_id: str) -> None:
        if (view := self.views.get(replica_id)) is not None:
            view.place(ask, monotonic())
        if self.on_placed is not None:
            self.on_placed(self.app_name, ask.call_id)

    def unplace(self, call_id: str) -> None:
        """Wherever it was placed, as far as that is remembered."""
        decision = self.decisions.get(call_id)
        if decision is not None and (view := self.views.get(decision.replica_id)) is not None:
            view.unplace(call_id)

    def keep(self, replica_ids: Iterable[str]) -> None:
        """Serve's newest word on which replicas there are."""
        came, went = self.views.keep(replica_ids)
        if not came and not went:
            return
        with self._lock:
            self._tell_policy()
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener(came, went)
            except Exception:  # a listener's fault is not the router's
                logger.exception("a listener to the replicas of %s failed", self.app_name)

    def listen(self, listener: OnReplicas) -> Callable[[], None]:
        """Returns what ends it."""
        with self._lock:
            self._listeners.append(listener)

        def end() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return end

    def _tell_policy(self) -> None:
        try:
            self._policy.changed([one.replica_id for one in self.views.replicas])
        except Exception:
            logger.exception("the policy %s failed on a change", self.policy_name)


class Registry:
    def __init__(self) -> None:
        # Of all engines whose frames come, by id, whether or not Serve told of them.
        self.connected: dict[str, ReplicaView] = {}
        self._meetings: dict[str, RoutingState] = {}
        self._lock = threading.Lock()

    def meet(self, app_name: str) -> RoutingState:
        """Made by whoever comes first. Never forgotten: there are as many as base versions."""
        with self._lock:
            meeting = self._meetings.get(app_name)
            if meeting is None:
                meeting = self._meetings[app_name] = RoutingState(
                    app_name, self.connected, self._lock
                )
            return meeting

    def adopt(self, engine_id: str) -> ReplicaView:
        """The view of an engine whose first frame came, maybe before Serve told of it. The router's
        thread may add the replica at the same moment: the lock leaves one view for both."""
        with self._lock:
            for meeting in self._meetings.values():
                if (view := meeting.views.get(engine_id)) is not None:
                    break
            else:
                view = ReplicaView(engine_id, _UNKNOWN_LIMITS)
            return self.connected.setdefault(engine_id, view)


_registry = Registry()

connected = _registry.connected


# Functions, for Serve pickles the router's class by value and what it names with it.
def meet(app_name: str) -> RoutingState:
    return _registry.meet(app_name)


def adopt(engine_id: str) -> ReplicaView:
    return _registry.adopt(engine_id)


def of(app_name: str) -> ReplicaViews:
    return meet(app_name).views


def on_replicas(app_name: str, callback: OnReplicas) -> Callable[[], None]:
    """`callback(came, went)`, in the router's thread. Returns what ends it."""
    return meet(app_name).listen(callback)


def placed_at(app_name: str, call_id: str) -> str | None:
    """The replica that this call was sent to, as long as that is remembered."""
    decision = meet(app_name).decisions.get(call_id)
    return None if decision is None else decision.replica_id


def shun(engine_id: str) -> None:
    """The last resort, until a frame comes from it."""
    if (view := connected.get(engine_id)) is not None:
        view.shun()
