"""Keeps an ingress connected to every engine replica that its router has: asks the engines that are
not connected to dial, and reports changes of the replicas. Runs in the ingress's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from engine.admission import EngineLimits
from serve_app.ray_calls import results_of
from serve_app.routing.state import RoutingState, routing_state
from serve_app.stream.server import StreamServer
from serve_app.tasks import keep_polling, spawn

_POLL_S = 0.5
_MAX_PAUSE_S = 5.0  # between two calls to engines that do not dial
_CALL_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class _Base:
    """A base application that requests are sent to."""

    name: str
    handle: DeploymentHandle[object]
    state: RoutingState
    pause_s: float = _POLL_S
    due_s: float = 0.0  # when the engines that are not connected may be called again
    call: asyncio.Task[None] | None = None


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
        self.bases: dict[str, _Base] = {}  # by application
        self._listening: set[str] = set()  # applications that were ever added

    def start(self) -> None:
        keep_polling(self.poll, _POLL_S, "engine-connections")

    def add_base(
        self, app_name: str, name: str, handle: DeploymentHandle[object], limits: EngineLimits
    ) -> None:
        """Connects the engines of a base. Ignores a base that is there with the same handle."""
        known = self.bases.get(app_name)
        if known is not None and known.handle is handle:
            return
        state = routing_state(app_name)
        state.views.set_limits(limits)
        self.bases[app_name] = _Base(name, handle, state)
        if app_name not in self._listening:
            self._listening.add(app_name)
            in_loop = asyncio.get_running_loop().call_soon_threadsafe
            state.add_listener(
                partial(in_loop, self._update_replicas, app_name),
                partial(self._call_placed, app_name),
            )
        self._update_replicas(app_name)

    def remove_base(self, app_name: str) -> None:
        """Ends the calls to the engines of a base. Its placed calls are still reported: Serve may
        hold calls that were sent before, and places them when it has a replica again."""
        self.bases.pop(app_name, None)

    def poll(self) -> None:
        """Asks the engines of each base to dial if any of them is not connected and no such call
        was made recently."""
        engines, now_s = self._stream.engines, asyncio.get_running_loop().time()
        for base in self.bases.values():
            if all(view.replica_id in engines for view in base.state.views.replicas):
                base.pause_s = _POLL_S
            elif now_s >= base.due_s and (base.call is None or base.call.done()):
                base.due_s = now_s + base.pause_s
                base.pause_s = min(_MAX_PAUSE_S, 2 * base.pause_s)
                base.call = spawn(self._ask_to_dial(base), "attend-engines")

    def _update_replicas(self, app_name: str) -> None:
        base = self.bases.get(app_name)
        if base is None:
            return
        base.pause_s, base.due_s = _POLL_S, 0.0
        self.poll()
        ids = frozenset(view.replica_id for view in base.state.views.replicas)
        self._replicas_changed(app_name, ids)

    async def _ask_to_dial(self, base: _Base) -> None:
        """Calls all replicas of the base; a replica whose engine is connected ignores the call."""
        with suppress(RayError, RayServeException, TimeoutError):
            calls = base.handle.broadcast("attend", self._stream.address)
            await results_of(calls, _CALL_TIMEOUT_S)
