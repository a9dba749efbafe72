"""What the generations of one ingress replica share so that they outlive their engines.

Every attempt is known here while it lives. Those at a replica that left Serve's set (it drains) are
told to go on elsewhere as soon as there is an elsewhere; those at an engine from which nothing came
for `silence_s` as well, and sooner those that came when it was silent already. Here too: suspects'
turns, quarantine, the count of what happened. Ignorant of tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Protocol

from serve_app.dispatch.attempt import Attempt
from serve_app.dispatch.probation import SuspectQueue
from serve_app.dispatch.request_quarantine import RequestQuarantine
from serve_app.errors import EngineGoneError
from serve_app.metrics.migration import MigrationMetrics
from serve_app.stream.server import StreamServer
from serve_app.stream.wire import DEPRIORITISE_S, SILENCE_S
from serve_app.tasks import keep

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_LATE_S = 0.5  # a look that comes so late: this process was held up, and has frames to read yet
_MAX_DEATHS_KNOWN = 32
_LATE_NEWS_S = 5.0


class ReplicaLeavesError(Exception):
    """The engine's replica is drained: its requests go on elsewhere."""


class SilentEngineError(EngineGoneError):
    """Nothing comes from the engine, which is connected, or its step does not end."""


class RouterView(Protocol):
    """What is asked of whoever chooses replicas."""

    def placed_at(self, app_name: str, call_id: str) -> str | None:
        """The replica that a call was sent to, as long as that is remembered."""
        ...

    def deprioritise(self, engine_id: str) -> None:
        """The last resort, until a frame comes from it."""
        ...


class Migrations:
    def __init__(
        self,
        server: StreamServer,
        router: RouterView,
        ingress: str,
        silence_s: float = SILENCE_S,
        shun_s: float = DEPRIORITISE_S,
    ) -> None:
        self.metrics = MigrationMetrics(ingress)
        self.quarantine = RequestQuarantine()
        self.has_silent_engine = False  # connected, and given up
        self._server = server
        self._router = router
        self._silence_s, self._shun_s = silence_s, shun_s
        self._live: dict[str, set[Attempt]] = {}  # by application
        self._up: dict[str, frozenset[str]] = {}  # engine ids by application, as Serve's router has
        self._gone: dict[str, set[str]] = {}  # that were up, and may have requests yet
        self._arrivals: dict[str, asyncio.Future[None]] = {}  # by application, see `arrival`
        self._probations: dict[str, SuspectQueue] = {}
        # Engine id -> when it died, the attempts there without a token; the newest deaths.
        self._deaths: dict[str, tuple[float, frozenset[Attempt]]] = {}
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = keep(self._keep_looking, "watch-engines")

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def enter(self, app_name: str, attempt: Attempt) -> None:
        self._live.setdefault(app_name, set()).add(attempt)

    def leave(self, app_name: str, attempt: Attempt) -> None:
        live = self._live.get(app_name, set())
        live.discard(attempt)
        if not live:
            self._live.pop(app_name, None)

    def where(self, app_name: str, attempt: Attempt) -> str | None:
        """The engine replica that it is at, as far as that is known."""
        return attempt.engine_id or self._router.placed_at(app_name, attempt.call_id)

    def was_gone(self, attempt: Attempt, engine_id: str) -> bool:
        """The engine had left before this attempt began, and has not come back since."""
        return self._server.has_lost(engine_id, attempt.began_s)

    def arrival(self, app_name: str) -> asyncio.Future[None]:
        """Done when Serve's router gets a replica that it does not have now."""
        if app_name not in self._arrivals:
            self._arrivals[app_name] = asyncio.get_running_loop().create_future()
        return self._arrivals[app_name]

    def probation(self, app_name: str) -> SuspectQueue:
        return self._probations.setdefault(app_name, SuspectQueue())

    def is_quiet(self, app_name: str, *, but_for_new: bool) -> bool:
        """Nobody waits for its first token at its present engine, or for an engine. `but_for_new`:
        nobody who left another engine does."""
        return all(
            one.has_output or (but_for_new and one.is_first) for one in self._live.get(app_name, ())
        )

    def note_death(self, app_name: str, engine_id: str) -> None:
        """For `was_alone`; the first of those that were there says it, the others may be late."""
        known = self._deaths.get(engine_id)
        now_s = time.monotonic()
        if known is not None and now_s - known[0] < _LATE_NEWS_S:
            return
        newcomers = frozenset(
            one
            for one in self._live.get(app_name, ())
            if not one.has_output and self.where(app_name, one) in (None, engine_id)
        )
        self._deaths.pop(engine_id, None)
        self._deaths[engine_id] = (now_s, newcomers)
        while len(self._deaths) > _MAX_DEATHS_KNOWN:
            del self._deaths[next(iter(self._deaths))]

    def was_alone(self, attempt: Attempt, engine_id: str) -> bool:
        """No other attempt of this ingress could have been at this engine, without a token, when
        it died."""
        return self._deaths[engine_id][1] <= {attempt}

    def replicas_changed(self, app_name: str, up: Iterable[str]) -> None:
        """Serve's router sends new requests to these."""
        before, now = self._up.get(app_name, frozenset()), frozenset(up)
        self._up[app_name] = now
        gone = self._gone.setdefault(app_name, set())
        gone |= before - now
        gone -= now
        if now - before and (arrival := self._arrivals.pop(app_name, None)) is not None:
            arrival.set_result(None)
        self._move_on(app_name)

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            if loop.time() - due_s < _LATE_S:
                self.look()

    def look(self) -> None:
        """At those whose engine became known late, and at silent engines."""
        silence_s = {one: self._server.silence_s(one) or 0.0 for one in self._server.engines}
        self.has_silent_engine = any(one > self._silence_s for one in silence_s.values())
        for engine_id, its_s in silence_s.items():
            if its_s > self._shun_s:
                self._router.deprioritise(engine_id)
        for app_name, attempts in tuple(self._live.items()):
            self._move_on(app_name)
            for attempt in tuple(attempts):
                if attempt.is_movable:
                    self._check_silence(app_name, attempt)
        for gone in self._gone.values():
            gone &= self._server.engines

    def _move_on(self, app_name: str) -> None:
        gone = self._gone.get(app_name)
        if not gone or not self._up[app_name]:
            return  # without another replica they had better end where they are
        for attempt in tuple(self._live.get(app_name, ())):
            engine_id = self.where(app_name, attempt)
            if not attempt.is_movable or engine_id is None or engine_id not in gone:
                continue
            if engine_id in self._server.engines:
                attempt.fail(ReplicaLeavesError())
            else:  # it left because it died: what its calls are about to say, too
                attempt.fail(EngineGoneError(f"engine {engine_id} is gone", engine_id))

    def _check_silence(self, app_name: str, attempt: Attempt) -> None:
        engine_id = self.where(app_name, attempt)
        silence_s = None if engine_id is None else self._server.silence_s(engine_id)
        if engine_id is None or silence_s is None:
            return
        if silence_s > self._shun_s and time.monotonic() - silence_s < attempt.began_s:
            words = f"engine {engine_id} was silent when a request came"
            attempt.fail(SilentEngineError(words, engine_id, was_dead=True))
        elif silence_s > self._silence_s:
            logger.warning("engine %s is silent or hangs, for %.0f s", engine_id, silence_s)
            attempt.fail(SilentEngineError(f"engine {engine_id} is silent", engine_id))
