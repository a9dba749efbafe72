"""Keeps an ingress connected to every engine replica that its router has: asks the engines that are
not connected to dial, and reports changes of the replicas. Runs in the ingress's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from engine.admission import EngineLimits
from serve_app.metrics.ingress import RoutingCounts
from serve_app.routing.state import RoutingListener, RoutingState, routing_state
from serve_app.stream.server import StreamServer
from serve_app.tasks import keep, spawn

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_MAX_PAUSE_S = 5.0  # between two calls to engines that do not dial
_CALL_TIMEOUT_S = 5.0


class _Base:
    """A base application that requests are sent to."""

    def __init__(self, name: str, handle: DeploymentHandle[object], state: RoutingState) -> None:
        self.name = name
        self.handle = handle
        self.state = state
        self.pause_s = _POLL_S
        self.due_s = 0.0  # when the engines that are not connected may be called again
        self.call: asyncio.Task[None] | None = None


class EngineConnections:
    def __init__(
        self,
        stream: StreamServer,
        call_placed: Callable[[str, str], None],
        replicas_changed: Callable[[str, frozenset[str]], None],
    ) -> None:
        """`call_placed(application, call id)` is called in the router's thread as soon as a view
        counts the call, `replicas_changed(application, replica ids)` in the event loop."""
        self._stream = stream
        self._call_placed = call_placed
        self._replicas_changed = replicas_changed
        self._bases: dict[str, _Base] = {}  # by application
        # By application. Listens after `remove_base` as well: requests that are still queued for
        # the application are placed later.
        self._listeners: dict[str, RoutingListener] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep(self._run, "engine-connections")

    def add_base(
        self, app_name: str, name: str, handle: DeploymentHandle[object], limits: EngineLimits
    ) -> None:
        """Connects the engines of a base. Ignores a base that is there with the same handle."""
        known = self._bases.get(app_name)
        if known is not None and known.handle is handle:
            return
        self.remove_base(app_name)
        state = routing_state(app_name)
        state.views.set_limits(limits)
        base = self._bases[app_name] = _Base(name, handle, state)
        in_loop = asyncio.get_running_loop().call_soon_threadsafe
        listener = RoutingListener(
            partial(in_loop, self._update_replicas, base), partial(self._call_placed, app_name)
        )
        state.add_listener(listener)
        if (old := self._listeners.get(app_name)) is not None:
            state.remove_listener(old)
        self._listeners[app_name] = listener
        self._update_replicas(base)

    def remove_base(self, app_name: str) -> None:
        self._bases.pop(app_name, None)

    @property
    def states(self) -> Sequence[RoutingState]:
        return [base.state for base in self._bases.values()]

    def routed(self) -> list[RoutingCounts]:
        """Returns the counts by base name: two versions of a base may be here at once."""
        counts: dict[str, RoutingCounts] = {}
        for base in self._bases.values():
            before = counts.get(base.name, RoutingCounts(base.name, Counter(), 0))
            decisions = base.state.decisions
            reasons = Counter(before.reasons) + decisions.reasons
            hits = before.affinity_hits + decisions.affinity_hits
            counts[base.name] = RoutingCounts(base.name, reasons, hits)
        return list(counts.values())

    def poll(self) -> None:
        """Asks the engines of each base to dial if any of them is not connected and no such call
        was made recently."""
        engines, now_s = self._stream.engines, asyncio.get_running_loop().time()
        for base in self._bases.values():
            if all(view.replica_id in engines for view in base.state.views.replicas):
                base.pause_s = _POLL_S
            elif now_s >= base.due_s and (base.call is None or base.call.done()):
                base.due_s = now_s + base.pause_s
                base.pause_s = min(_MAX_PAUSE_S, 2 * base.pause_s)
                base.call = spawn(self._ask_to_dial(base), "attend-engines")

    def _update_replicas(self, base: _Base) -> None:
        if self._bases.get(base.state.app_name) is not base:
            return
        base.pause_s, base.due_s = _POLL_S, 0.0
        self.poll()
        ids = frozenset(view.replica_id for view in base.state.views.replicas)
        self._replicas_changed(base.state.app_name, ids)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                self.poll()
            except Exception:  # the next poll tries again
                logger.exception("a poll of the engine connections failed")

    async def _ask_to_dial(self, base: _Base) -> None:
        """Calls all replicas of the base; a replica whose engine is connected ignores the call."""
        with suppress(RayError, RayServeException, TimeoutError):
            answers = base.handle.broadcast("attend", self._stream.address)
            await answers.results_async(timeout_s=_CALL_TIMEOUT_S, return_exceptions=True)
