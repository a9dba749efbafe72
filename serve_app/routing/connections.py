"""Keeps an ingress in touch with every engine replica that its router knows: asks those that are
not connected to dial, writes their frames into the views, and has a hot adapter loaded at its new
homes before requests need it there.

Lives in the ingress's event loop; ignorant of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from engine.admission import EngineLimits
from registry.entities import AdapterVersion
from serve_app.messages import EngineOutcome, RoutingRequest
from serve_app.metrics.ingress import RoutingCounts
from serve_app.ray_calls import root_cause
from serve_app.routing import state as routing_state
from serve_app.routing.lru import LruDict
from serve_app.routing.state import RoutingState
from serve_app.routing.view import LoadSeconds, ReplicaView
from serve_app.stream.server import StreamServer
from serve_app.stream.wire import SHUN_S, SILENCE_S, Step
from serve_app.tasks import keep, spawn

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_MAX_PAUSE_S = 5.0  # between two calls to engines that do not come
_ANSWER_S = 5.0
_WARM_PAUSES_S = (1.0, 60.0)  # the first and the longest after a warm-up that failed
_MAX_FAILED = 1024  # warm-ups of a base that are remembered

FindAdapter = Callable[[str], AdapterVersion | None]


@dataclass(frozen=True, slots=True)
class _Failed:
    """A warm-up that fails again and again."""

    words: str
    pause_s: float
    due_s: float  # on the event loop's clock


class _Base:
    """One base application that requests go to."""

    def __init__(self, name: str, handle: DeploymentHandle[object], meeting: RoutingState) -> None:
        self.name = name
        self.handle = handle
        self.meeting = meeting
        self.pause_s = _LOOK_S
        self.due_s = 0.0  # of the next call to engines that are not connected
        self.call: asyncio.Task[None] | None = None
        self.warming: dict[str, asyncio.Task[None]] = {}  # by adapter
        self.failed: LruDict[tuple[str, str], _Failed] = LruDict(_MAX_FAILED)  # (adapter, replica)
        self.unlisten: Callable[[], None] = lambda: None


class EngineConnections:
    def __init__(self, stream: StreamServer, find_adapter: FindAdapter) -> None:
        """`find_adapter`: by content digest."""
        self._stream = stream
        self._find_adapter = find_adapter
        self._bases: dict[str, _Base] = {}  # by application
        self._task: asyncio.Task[None] | None = None
        self.num_ingresses = 1  # that share the traffic, this one included
        # A frame was written into its view.
        self.on_frame: Callable[[], None] | None = None
        # (application, ids): Serve's router sends requests to these replicas from now on.
        self.on_replicas: Callable[[str, frozenset[str]], None] | None = None
        # (application, call): a view counts this call from now on. In the router's thread.
        self.on_placed: Callable[[str, str], None] | None = None
        stream.on_frame = self._on_frame
        stream.on_lost = self._on_lost
        stream.on_stop = self._on_stop

    def start(self) -> None:
        self._task = keep(self._run, "attendance")

    def enter(
        self, app_name: str, name: str, handle: DeploymentHandle[object], limits: EngineLimits
    ) -> None:
        """Requests go there from now on. Again with the same handle: nothing changes."""
        known = self._bases.get(app_name)
        if known is not None and known.handle is handle:
            return
        self.leave(app_name)
        meeting = routing_state.meet(app_name)
        meeting.views.set_limits(limits)
        meeting.on_placed = self._tell_placed
        base = self._bases[app_name] = _Base(name, handle, meeting)
        loop = asyncio.get_running_loop()

        def in_loop(came: frozenset[str], went: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._replicas_changed, base)

        base.unlisten = meeting.listen(in_loop)
        self._replicas_changed(base)

    def leave(self, app_name: str) -> None:
        base = self._bases.pop(app_name, None)
        if base is not None:
            base.unlisten()

    @property
    def meetings(self) -> Sequence[RoutingState]:
        return [base.meeting for base in self._bases.values()]

    def routed(self) -> list[RoutingCounts]:
        """By base name: an old and a new version may both be there."""
        names = {base.name: RoutingCounts(base.name, Counter(), 0) for base in self._bases.values()}
        for base in self._bases.values():
            so_far, its = names[base.name], base.meeting.decisions
            reasons = Counter(so_far.reasons) + Counter(its.reasons)
            hits = so_far.affinity_hits + its.affinity_hits
            names[base.name] = RoutingCounts(base.name, reasons, hits)
        return list(names.values())

    def _tell_placed(self, app_name: str, call_id: str) -> None:
        if self.on_placed is not None:
            self.on_placed(app_name, call_id)

    def _replicas_changed(self, base: _Base) -> None:
        base.pause_s, base.due_s = _LOOK_S, 0.0
        self._look()
        if self.on_replicas is not None:
            ids = frozenset(one.replica_id for one in base.meeting.views.replicas)
            self.on_replicas(base.meeting.app_name, ids)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self._look()
            except Exception:  # looked again
                logger.exception("attendance failed")

    def _look(self) -> None:
        engines, loop = self._stream.engines, asyncio.get_running_loop()
        now_s = loop.time()
        for base in self._bases.values():
            known = base.meeting.views.replicas
            if all(one.replica_id in engines for one in known):
                base.pause_s = _LOOK_S
            elif now_s >= base.due_s and (base.call is None or base.call.done()):
                base.due_s = now_s + base.pause_s
                base.pause_s = min(_MAX_PAUSE_S, 2 * base.pause_s)
                base.call = spawn(self._call(base), "attend-engines")
            for adapter, replica_id in base.meeting.warm_ups(self.num_ingresses):
                failed = base.failed.get((adapter, replica_id))
                if adapter not in base.warming and (failed is None or now_s >= failed.due_s):
                    task = spawn(self._warm(base, adapter, replica_id), "warm-adapter")
                    base.warming[adapter] = task

    async def _call(self, base: _Base) -> None:
        """All replicas: whose engine is connected already has nothing to do."""
        with suppress(RayError, RayServeException, TimeoutError):
            answers = base.handle.broadcast("attend", self._stream.address)
            await answers.results_async(timeout_s=_ANSWER_S, return_exceptions=True)

    async def _warm(self, base: _Base, digest: str, replica_id: str) -> None:
        """One at a time for each adapter. A failure costs its request the load, as without."""
        try:
            adapter = self._find_adapter(digest)
            if adapter is None:
                return
            ask = RoutingRequest(f"warm-{digest}", 0, 0, digest, adapter.rank, only=replica_id)
            words = ""
            try:
                async with asyncio.timeout(60.0):
                    outcome = await base.handle.warm.remote(adapter, ask)
                if isinstance(outcome, EngineOutcome) and not outcome.is_done:
                    words = outcome.words or "no reason is given"
            except (RayError, RayServeException, TimeoutError) as error:
                words = str(root_cause(error)) or type(error).__name__
            self._note_warm_up(base, adapter.name, (digest, replica_id), words)
            await asyncio.sleep(_LOOK_S)  # a frame tells what came of it
        finally:
            del base.warming[digest]

    def _note_warm_up(self, base: _Base, name: str, key: tuple[str, str], words: str) -> None:
        """`words`: why it failed; empty: it did not. Each cause is logged once, for a failure is
        tried again as long as the adapter's requests come."""
        failed, (first_s, longest_s) = base.failed.get(key), _WARM_PAUSES_S
        if not words:
            if failed is not None:
                base.failed.put(key, _Failed("", 0.0, 0.0))
            return
        before_s, known = (0.0, "") if failed is None else (failed.pause_s, failed.words)
        if words != known:
            logger.warning("%s is not loaded at %s: %s", name, key[1], words)
        pause_s = min(longest_s, max(first_s, 2 * before_s))
        due_s = asyncio.get_running_loop().time() + pause_s
        base.failed.put(key, _Failed(words, pause_s, due_s))

    def _on_frame(self, engine_id: str, step: Step) -> None:
        view = routing_state.connected.get(engine_id) or routing_state.adopt(engine_id)
        view.observe(step.load, time.monotonic(), is_stalled=step.stall * SILENCE_S > SHUN_S)
        if step.cached_prefixes or step.evicted_prefixes or step.is_whole:
            view.change_prefixes(
                step.cached_prefixes, step.evicted_prefixes, is_whole=step.is_whole
            )
        if step.adapters_on_disk is not None:
            view.on_disk = frozenset(step.adapters_on_disk)
        view.observe_load_s(LoadSeconds(*step.load_s))
        if step.accepted or step.outputs:
            self._note(view, step)
        if self.on_frame is not None:
            self.on_frame()

    def _note(self, view: ReplicaView, step: Step) -> None:
        decisions = [meeting.decisions for meeting in self.meetings]
        for one in step.accepted:
            view.unplace(one.request_id)
            for its in decisions:
                its.accepted(one.request_id, one.adapter_s, one.found_in)
        now_s = time.time()
        for output in step.outputs:
            if output.offset == 0:
                for its in decisions:
                    decision = its.first_token(output.request_id, output.queued_s, now_s)
                    if decision is not None and decision.expected is not None:
                        view.usual.learn_way(decision.answer_s - decision.expected.there_s)
            if output.finish_reason is not None:
                view.ended(output.offset + len(output.token_ids))

    def _on_stop(self, engine_id: str, num_tokens: int) -> None:
        view = routing_state.connected.get(engine_id)
        if view is not None:
            view.ended(num_tokens)

    def _on_lost(self, engine_id: str) -> None:
        view = routing_state.connected.pop(engine_id, None)
        if view is not None:
            view.lose()
