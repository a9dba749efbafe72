"""An honest tenant next to an adversary: the real admission control and the real rule of accounts
under a virtual clock. Pure; for tests and benchmarks.

The engines are `ROWS` rows that together serve `CAPACITY_PER_S` usual requests per second; a
request occupies a row for as long as its tokens need, so that a long one delays the honest tenant
as much as on a device.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from serve_app.admission.controller import AdmissionController, Reason, Refused
from serve_app.admission.fair_queue import QueuedRequest
from serve_app.admission.tenants import Tenants
from serve_app.config import FairnessArgs
from serve_app.messages import RoutingRequest

CAPACITY_PER_S = 10.0  # usual requests
ROWS = 4
HONEST_PER_S = 2.0
ATTACKER_PER_S = 20.0
SECONDS = 120.0
MAX_WAITING = 256  # ModelArgs.max_queued_requests
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 128  # of a usual request
HONEST = "honest"
_USUAL_WORK = PROMPT_TOKENS + 2 * OUTPUT_TOKENS  # an output token as two, see `admission.cost`
_LOOK_S = 0.1  # as AdmissionQueue
_TRIM_S = 0.5


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as a client sends it."""

    at_s: float
    tenant: str
    adapter: str = ""
    priority: int = 0
    num_prompt: int = PROMPT_TOKENS
    num_output: int = OUTPUT_TOKENS  # generated per sequence
    num_sequences: int = 1
    max_tokens: int = OUTPUT_TOKENS  # requested per sequence
    leaves_after_s: float | None = None  # after `at_s`; None: the client stays

    @property
    def work(self) -> float:
        """Its cost in prompt tokens."""
        return self.num_prompt + 2.0 * self.num_output * self.num_sequences

    @property
    def service_s(self) -> float:
        """Seconds that it occupies a row."""
        return self.work / _USUAL_WORK * ROWS / CAPACITY_PER_S


@dataclass(slots=True)
class Score:
    """The outcome of one tenant's requests."""

    sent: int = 0
    served: int = 0  # went to an engine
    refused: int = 0
    work: float = 0.0  # of the served requests, in prompt tokens
    waits_s: list[float] = field(default_factory=list)  # of the served requests

    @property
    def share_served(self) -> float:
        return self.served / self.sent

    @property
    def longest_wait_s(self) -> float:
        return max(self.waits_s, default=0.0)


def stream(
    tenant: str,
    per_s: float,
    make: Callable[[int], dict[str, object]] = lambda _: {},
    seconds: float = SECONDS,
) -> list[Sent]:
    """Returns evenly spaced requests. `make` returns the fields of request number i."""
    times = (number / per_s for number in range(round(seconds * per_s)))
    return [
        Sent(**({"at_s": at_s, "tenant": tenant} | make(number)))  # type: ignore[arg-type]
        for number, at_s in enumerate(times)
    ]


def honest(tenant: str = HONEST, seconds: float = SECONDS, **fields: object) -> list[Sent]:
    """Returns requests for a fifth of the capacity."""
    return stream(tenant, HONEST_PER_S, lambda _: fields, seconds)


def attacker(
    make: Callable[[int], dict[str, object]] = lambda _: {}, seconds: float = SECONDS
) -> list[Sent]:
    """Returns requests for twice the capacity."""
    return stream("attacker", ATTACKER_PER_S, make, seconds)


def priority_attack() -> list[Sent]:
    """Returns requests that all ask to be served before others."""
    return attacker(lambda _: {"priority": -1})


def sybil_attack(num_names: int = 1000, seconds: float = SECONDS) -> list[Sent]:
    """Returns requests that each come from one of many made-up tenants."""
    return attacker(lambda number: {"tenant": f"made-up-{number % num_names}"}, seconds)


def scores(
    sent: Iterable[Sent],
    named: Iterable[str] = (HONEST,),
    *,
    is_proven: bool = False,
    settings: FairnessArgs | None = None,
) -> dict[str, Score]:
    """Returns the outcome by account. `named`: the tenants of equal weights in the configuration;
    `is_proven`: a trusted gateway sets the header."""
    settings = settings or FairnessArgs(weights=dict.fromkeys(named, 1.0))
    return _World(settings, Tenants(settings, is_proven=is_proven)).run(sent)


@dataclass(slots=True)
class _Open:
    sent: Sent
    queued: QueuedRequest
    score: Score
    went_s: float | None = None
    is_gone: bool = False


class _World:
    def __init__(self, settings: FairnessArgs, tenants: Tenants) -> None:
        self._tenants = tenants
        self._controller = AdmissionController(
            settings.weights, settings.max_wait_s, settings.max_queue_s, MAX_WAITING
        )
        self._waiting: dict[QueuedRequest, _Open] = {}
        self._num_running = 0
        self._scores: dict[str, Score] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._ticks = count()

    def run(self, sent: Iterable[Sent]) -> dict[str, Score]:
        for one in sent:
            self._at(one.at_s, partial(self._arrive, one))
        for number in range(round(SECONDS / _LOOK_S)):
            self._at(number * _LOOK_S, self._send)
        for number in range(round(SECONDS / _TRIM_S)):
            self._at(number * _TRIM_S, self._trim)
        while self._events:
            now_s, _, act = heapq.heappop(self._events)
            act(now_s)
        assert not self._controller.num_open
        return self._scores

    def _at(self, when_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._ticks), act))

    def _arrive(self, sent: Sent, now_s: float) -> None:
        tenant, priority = self._tenants.account(sent.tenant, sent.priority)
        request = RoutingRequest(
            "",
            sent.num_prompt,
            sent.num_sequences,
            adapter_name=sent.adapter,
            tenant=tenant,
            priority=priority,
        )
        score = self._scores.setdefault(tenant, Score())
        score.sent += 1
        try:
            self._controller.check(replace(request, num_tokens=0, num_sequences=0), now_s)
            queued, victim = self._controller.add_request(
                request,
                sent.max_tokens * sent.num_sequences,
                now_s,
                has_capacity=self._num_running < ROWS,
            )
        except Refused:
            score.refused += 1
            return
        one = _Open(sent, queued, score)
        if victim is not None:
            self._refuse(victim, "full", now_s)
        if sent.leaves_after_s is not None:
            self._at(now_s + sent.leaves_after_s, lambda at_s: self._end(one, at_s))
        if queued.is_waiting:
            self._waiting[queued] = one
            self._at(now_s + self._controller.timeout_s, lambda at_s: self._give_up(one, at_s))
        else:
            self._start(one, now_s)

    def _send(self, now_s: float) -> None:
        while len(self._controller) and self._num_running < ROWS:
            queued = self._controller.pop_request(now_s)
            assert queued is not None
            self._start(self._waiting.pop(queued), now_s)

    def _start(self, one: _Open, now_s: float) -> None:
        self._num_running += 1
        one.went_s = now_s
        one.score.served += 1
        one.score.waits_s.append(one.queued.waited_s)
        self._at(now_s + one.sent.service_s, lambda at_s: self._end(one, at_s))

    def _end(self, one: _Open, now_s: float) -> None:
        """The response is complete, or its client leaves."""
        if one.is_gone:
            return
        one.is_gone = True
        self._waiting.pop(one.queued, None)
        if one.went_s is not None:
            self._num_running -= 1
            done = min(1.0, (now_s - one.went_s) / one.sent.service_s)
            one.score.work += done * one.sent.work
            num_generated = round(done * one.sent.num_output * one.sent.num_sequences)
            self._controller.set_generated(one.queued, num_generated)
        self._controller.close(one.queued, now_s)
        self._send(now_s)

    def _trim(self, now_s: float) -> None:
        while (queued := self._controller.unserviceable(now_s)) is not None:
            self._refuse(queued, "waited", now_s)

    def _give_up(self, one: _Open, now_s: float) -> None:
        if one.queued in self._waiting:
            self._refuse(one.queued, "waited", now_s)

    def _refuse(self, queued: QueuedRequest, reason: Reason, now_s: float) -> None:
        one = self._waiting.pop(queued)
        one.is_gone = True
        one.score.refused += 1
        self._controller.refuse(queued, reason, now_s)
