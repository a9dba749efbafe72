"""Where requests wait before the engines: the real waiting room, the real rule of when one may go.
What stands here for `serve_app.admission.queue` are its coroutines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.admission.capacity import has_room
from serve_app.admission.waiting_room import Applicant, Guest, Reason, Refused, WaitingRoom
from serve_app.routing.view import ReplicaViews
from tests.benchmarks.simulator.calls import Call

_TRIM_S = 0.5  # as AdmissionQueue
_MAX_TOKENS = 1 << 20  # that clients ask for; what comes is less


@dataclass(frozen=True, slots=True)
class GateArgs:
    """`config.FairnessArgs`."""

    weights: tuple[tuple[str, float], ...] = ()
    max_wait_s: float = 10.0
    max_engine_queue_s: float = 0.5
    max_queue_s: float = 30.0
    max_waiting: int = 256  # ModelArgs.max_queued_requests


class Gate:
    """Of one ingress. `send`: to an engine, as soon as Serve lets it."""

    def __init__(self, args: GateArgs, views: ReplicaViews, send: Callable[[Call], None]) -> None:
        self.room = WaitingRoom(
            dict(args.weights), args.max_wait_s, args.max_queue_s, args.max_waiting
        )
        self.refused: Counter[str] = Counter()  # by tenant
        self._args = args
        self._views = views
        self._send = send
        self._calls: dict[Guest, Call] = {}  # those that wait
        self._open: dict[int, Guest] = {}  # by the call's number
        self._trimmed_s = 0.0

    def __len__(self) -> int:
        return len(self.room)

    @property
    def waiting_tokens(self) -> int:
        return self.room.waiting_tokens

    def enter(self, call: Call, now_s: float) -> None:
        who = Applicant(call.tenant, call.adapter or "", call.rank if call.adapter else 0)
        try:
            guest, rival = self.room.enter(
                who, call.num_prompt, 1, _MAX_TOKENS, now_s, has_room=self._has_room()
            )
        except Refused:
            self.refused[call.tenant] += 1
            return
        self._open[call.index] = guest
        if rival is not None:
            self._refuse(rival, "full", now_s)
        if guest.is_waiting:
            self._calls[guest] = call
        else:
            self._send(call)

    def look(self, now_s: float) -> None:
        """There may be room: a frame came, or an answer ended."""
        while len(self.room) and self._has_room():
            guest = self.room.next(now_s)
            assert guest is not None
            self._send(self._calls.pop(guest))

    def left(self, call: Call, now_s: float) -> None:
        """Its answer ended."""
        guest = self._open.pop(call.index)
        self.room.generated(guest, call.num_output)
        self.room.leave(guest, now_s)

    def expire(self, now_s: float) -> None:
        """Who waited twice as long as anybody should, or will, is told so. Called now and then."""
        limit_s = self.room.patience_s
        for guest in [g for g in self._calls if now_s - g.entry.enqueued_s > limit_s]:
            self._refuse(guest, "waited", now_s)
        if now_s - self._trimmed_s >= _TRIM_S:
            self._trimmed_s = now_s
            while (hopeless := self.room.hopeless(now_s)) is not None:
                self._refuse(hopeless, "waited", now_s)

    def _has_room(self) -> bool:
        return has_room(self._views.replicas, (), self._args.max_engine_queue_s)

    def _refuse(self, guest: Guest, reason: Reason, now_s: float) -> None:
        self.room.refuse(guest, reason, now_s)
        call = self._calls.pop(guest)
        del self._open[call.index]
        self.refused[call.tenant] += 1
