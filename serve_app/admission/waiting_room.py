"""Who waits for the engines of one base, who goes next, and who is refused. Pure: methods take the
time, so that the ingress, the simulator and tests all have this one.

A request is refused before it waits: when the room is full and its owner holds his share of it
already, or when it would have to wait longer than `max_queue_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from serve_app.admission.cost import TokenCost, price
from serve_app.admission.fair_queue import Entry, FairQueue
from serve_app.admission.pace import DrainRate
from serve_app.admission.rates import RequestRates

Reason = Literal["full", "expected_wait", "waited"]

_USUAL_OUTPUT_TOKENS = 128.0  # of a sequence, until some have ended
_OUTPUT_WEIGHT = 1 / 32  # of a newly ended one in the mean


@dataclass(frozen=True, slots=True)
class Applicant:
    """Who asks for an engine."""

    tenant: str = ""
    adapter: str = ""  # by name, so that its versions share; "": none
    rank: int = 0
    priority: int = 0  # lower is earlier


class Refused(Exception):
    """`wait_s`: what it would have to wait, as far as is known."""

    def __init__(self, reason: Reason, wait_s: float) -> None:
        super().__init__(reason, wait_s)
        self.reason = reason
        self.wait_s = wait_s


class Guest:
    """One request, from `enter` to `leave`. Its fields are for reading."""

    __slots__ = (
        "entry",
        "num_charged",
        "num_generated",
        "num_sequences",
        "num_tokens",
        "price",
        "waited_s",
    )

    def __init__(
        self, entry: Entry, num_tokens: int, num_sequences: int, price: TokenCost, num_charged: int
    ) -> None:
        self.entry = entry
        self.num_tokens = num_tokens  # of its prompts
        self.num_sequences = num_sequences
        self.price = price
        self.num_charged = num_charged  # tokens of output
        self.num_generated = 0
        self.waited_s = 0.0  # as of when it went

    @property
    def is_waiting(self) -> bool:
        return self.entry.is_waiting


class WaitingRoom:
    def __init__(
        self,
        weights: Mapping[str, float],
        max_wait_s: float,
        max_queue_s: float,
        max_waiting: int,
    ) -> None:
        """`max_wait_s`: see `FairQueue`."""
        self.demand = RequestRates()
        self.waiting_tokens = 0  # of the prompts that wait
        self.num_open = 0  # those that wait, and those whose answer is still to be charged
        self._max_queue_s = max_queue_s
        self._max_waiting = max_waiting
        self._queue = FairQueue(weights, max_wait_s)
        self._pace = DrainRate()
        self._guests: dict[Entry, Guest] = {}  # those that wait
        self._mean_output = _USUAL_OUTPUT_TOKENS
        self._running_cost = 0.0

    def __len__(self) -> int:
        """Those that wait."""
        return len(self._queue)

    @property
    def patience_s(self) -> float:
        """Twice what was expected of anybody: the engines stand still, or others came."""
        return 2 * self._max_queue_s

    def check(self, who: Applicant, now_s: float) -> None:
        """Raises Refused where it is hopeless, whatever the prompt."""
        if len(self._queue):
            self._find_place(who, price(who.rank).of(0, self._mean_output), now_s)

    def enter(
        self,
        who: Applicant,
        num_tokens: int,
        num_sequences: int,
        max_tokens: int,
        now_s: float,
        *,
        has_room: bool,
    ) -> tuple[Guest, Guest | None]:
        """The newcomer, who waits unless nobody does and an engine `has_room`; and who has to go
        for it: `refuse` him. `max_tokens`: of all its choices. Raises Refused."""
        output = min(max_tokens, round(self._mean_output * num_sequences))
        of_one = price(who.rank)
        cost = of_one.of(num_tokens, output)
        goes_at_once = has_room and not len(self._queue)
        rival = None if goes_at_once else self._find_place(who, cost, now_s)
        if not len(self._queue):
            self._pace.begin(now_s)
        entry = self._queue.add(who.tenant, who.adapter, who.priority, cost, now_s)
        guest = Guest(entry, num_tokens, num_sequences, of_one, output)
        self._guests[entry] = guest
        self.waiting_tokens += num_tokens
        self.num_open += 1
        if goes_at_once:
            self._send_next(now_s)
        return guest, None if rival is None else self._guests[rival]

    def next(self, now_s: float) -> Guest | None:
        """An engine has room: who goes; None: nobody waits."""
        if not len(self._queue):
            return None
        guest = self._send_next(now_s)
        self._pace.departed(guest.entry.cost, now_s)
        return guest

    def hopeless(self, now_s: float) -> Guest | None:
        """Who filled the room alone, has to share it since, and will not be served in time: the
        newest of whoever holds most."""
        entry = self._queue.largest()
        if entry is None or self._wait_s(_applicant(entry), 0.0, now_s) <= self.patience_s:
            return None
        return self._guests[entry]

    def refuse(self, guest: Guest, reason: Reason, now_s: float) -> Refused:
        """It leaves, and is to be told this."""
        refused = self._refused(reason, _applicant(guest.entry), guest.entry.cost, now_s)
        self.leave(guest, now_s)
        return refused

    def generated(self, guest: Guest, num_tokens: int) -> None:
        """So many output tokens until now, of all its choices."""
        guest.num_generated = num_tokens
        if num_tokens > guest.num_charged:
            more = guest.price.of(0, num_tokens - guest.num_charged)
            self._queue.charge(guest.entry, more)
            guest.num_charged = num_tokens

    def leave(self, guest: Guest, now_s: float) -> None:
        """Its answer ended, or it does not wait any more. Once."""
        if self._guests.pop(guest.entry, None) is not None:
            self.waiting_tokens -= guest.num_tokens
        else:
            self._running_cost -= guest.entry.cost
            unused = guest.num_charged - guest.num_generated
            self._queue.charge(guest.entry, -guest.price.of(0, unused))
            if guest.num_generated:
                one = guest.num_generated / guest.num_sequences
                self._mean_output += _OUTPUT_WEIGHT * (one - self._mean_output)
                self._pace.ended(now_s - guest.entry.enqueued_s - guest.waited_s)
        self._queue.close(guest.entry)
        self.num_open -= 1
        if self.num_open == len(self._guests):
            self._running_cost = 0.0  # nothing runs; without what rounding left

    def _send_next(self, now_s: float) -> Guest:
        entry = self._queue.pop(now_s)
        assert entry is not None
        guest = self._guests.pop(entry)
        guest.waited_s = now_s - entry.enqueued_s
        self.waiting_tokens -= guest.num_tokens
        self._running_cost += entry.cost
        self.demand.sent(now_s)
        return guest

    def _find_place(self, who: Applicant, cost: float, now_s: float) -> Entry | None:
        """The one that leaves for a newcomer, where the room is full."""
        if self._wait_s(who, cost, now_s) > self._max_queue_s:
            raise self._refused("expected_wait", who, cost, now_s)
        if len(self._queue) < self._max_waiting:
            return None
        rival = self._queue.rival(who.tenant, who.adapter, who.priority)
        if rival is None:
            raise self._refused("full", who, cost, now_s)
        return rival

    def _wait_s(self, who: Applicant, cost: float, now_s: float) -> float:
        """Expected; 0: not known."""
        if not len(self._queue):
            return 0.0
        ahead = self._queue.cost_ahead(who.tenant, who.adapter, who.priority, cost)
        return self._pace.wait_s(ahead, self._running_cost, now_s) or 0.0

    def _refused(self, reason: Reason, who: Applicant, cost: float, now_s: float) -> Refused:
        self.demand.refused(now_s)
        return Refused(reason, self._wait_s(who, cost, now_s))


def _applicant(entry: Entry) -> Applicant:
    return Applicant(entry.tenant, entry.adapter, priority=entry.priority)
