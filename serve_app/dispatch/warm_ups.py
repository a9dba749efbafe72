"""Loads an adapter with much traffic at its new homes before requests need it there."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.messages import EngineOutcome, RoutingRequest
from serve_app.ray_calls import RAY_ERRORS, root_cause
from serve_app.routing.lru import LruDict
from serve_app.routing.state import routing_state
from serve_app.tasks import keep_polling, spawn

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_TIMEOUT_S = 60.0
_PAUSES_S = (1.0, 60.0)  # the first and the longest pause after a failed warm-up
_MAX_FAILURES = 1024  # failed warm-ups that are remembered


@dataclass(frozen=True, slots=True)
class _Failure:
    """The last failure of a warm-up; without words it has succeeded since."""

    words: str = ""
    pause_s: float = 0.0
    due_s: float = 0.0  # when it may be tried again, on the event loop's clock


class WarmUps:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}  # (application, adapter)
        # (application, adapter, replica)
        self._failures: LruDict[tuple[str, str, str], _Failure] = LruDict(_MAX_FAILURES)

    def start(self) -> asyncio.Task[None]:
        return keep_polling(self._poll, _POLL_S, "warm-ups")

    def _poll(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for base in self._gateway.handles:
            app_name = base.app_name
            wanted = routing_state(app_name).warm_ups(self._gateway.num_ingresses)
            for digest, replica_id in wanted:
                failure = self._failures.get((app_name, digest, replica_id))
                is_due = failure is None or now_s >= failure.due_s
                if (app_name, digest) not in self._running and is_due:
                    task = spawn(self._warm(base, digest, replica_id), "warm-adapter")
                    self._running[app_name, digest] = task

    async def _warm(self, base: BaseHandle, digest: str, replica_id: str) -> None:
        """Loads the adapter at a replica. After a failure a request waits for the load, as it
        does without warm-ups."""
        try:
            adapter = self._gateway.find_adapter(digest)
            if adapter is None:
                return
            request = RoutingRequest(f"warm-{digest}", 0, 0, digest, adapter.rank, only=replica_id)
            words = ""
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    outcome = await base.handle.warm.remote(adapter, request)
                if isinstance(outcome, EngineOutcome) and not outcome.is_done:
                    words = outcome.words or "no reason is given"
            except (*RAY_ERRORS, TimeoutError) as error:
                words = str(root_cause(error)) or type(error).__name__
            self._record(adapter.name, (base.app_name, digest, replica_id), words)
            await asyncio.sleep(_POLL_S)  # the view shows the result with the next frame
        finally:
            del self._running[base.app_name, digest]

    def _record(self, name: str, key: tuple[str, str, str], words: str) -> None:
        """Records why a warm-up failed, or with empty `words` that it succeeded. Each cause is
        logged once, because a failure is tried again for as long as the adapter has requests."""
        last = self._failures.get(key) or _Failure()
        if not words:
            if last.words:
                self._failures.put(key, _Failure())
            return
        if words != last.words:
            logger.warning("could not load %s at %s ahead of requests: %s", name, key[2], words)
        first_s, longest_s = _PAUSES_S
        pause_s = min(longest_s, max(first_s, 2 * last.pause_s))
        due_s = asyncio.get_running_loop().time() + pause_s
        self._failures.put(key, _Failure(words, pause_s, due_s))
