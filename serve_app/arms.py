"""What each version of a split adapter does to its requests, counted at an ingress.

Cumulative, by adapter, arm and version: the manager judges canaries by it, /metrics shows it.
Ignorant of how a request got to its arm.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app.errors import AdapterUnsupportedError, ClientGoneError, NonFiniteError, to_api_error
from serve_app.histograms import Histogram
from serve_app.traffic import Arm

# ok: ended with text. empty: ended without. error: we failed. non_finite: the model gave NaN or
# infinity. refused: the client's fault, or too many requests. left: the client went away.
Outcome = Literal["ok", "empty", "error", "non_finite", "refused", "left"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "empty", "error", "non_finite", "refused", "left")
_NUM_JUDGED = 4  # of these say something of the version
_PLACES = {outcome: place for place, outcome in enumerate(OUTCOMES)}

# A ratio of two quantiles is to be trusted: each bucket is 1.41 of the one before, 1 ms to 12 min.
ARM_SECONDS = tuple(round(0.001 * math.sqrt(2) ** step, 6) for step in range(40))
_NO_SECONDS = (0,) * (len(ARM_SECONDS) + 1)


@dataclass(frozen=True, slots=True)
class ArmKey:
    adapter: str
    arm: Arm
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Tally:
    """The counts of one arm. The tuples go by OUTCOMES and by ARM_SECONDS with what is above."""

    outcomes: tuple[int, ...] = (0,) * len(OUTCOMES)
    output_tokens: int = 0
    first_token: tuple[int, ...] = _NO_SECONDS
    first_token_s: float = 0.0  # sum
    latency: tuple[int, ...] = _NO_SECONDS  # of those that ended well
    latency_s: float = 0.0  # sum
    # Of the requests that found their adapter on the engine's device: a first token that waited for
    # a load, or a client that left meanwhile, says nothing of the version.
    warm_first_token: tuple[int, ...] = _NO_SECONDS
    num_warm_left: int = 0

    def __add__(self, other: Tally) -> Tally:
        return _combined(self, other, operator.add)

    def __sub__(self, other: Tally) -> Tally:
        return _combined(self, other, operator.sub)

    def count(self, *outcomes: Outcome) -> int:
        counted = self.outcomes
        return sum([counted[_PLACES[outcome]] for outcome in outcomes])

    @property
    def num_judged(self) -> int:
        """Requests that say something of the version."""
        return sum(self.outcomes[:_NUM_JUDGED])

    @property
    def num_seen(self) -> int:
        """The judged requests and those whose clients left."""
        return self.num_judged + self.num_warm_left


class Arms:
    """Of one ingress replica. All methods belong to its event loop."""

    def __init__(self) -> None:
        self._counts: dict[ArmKey, _Counts] = {}

    def watch(self, key: ArmKey) -> Watch:
        """From the arrival of a request on."""
        return Watch(self._counts.setdefault(key, _Counts()))

    def tallies(self) -> tuple[tuple[ArmKey, Tally], ...]:
        return tuple((key, counts.tally()) for key, counts in self._counts.items())

    def keep(self, versions: Collection[tuple[str, str]]) -> None:
        """(name, digest) of what is registered; the others are forgotten."""
        for key in [key for key in self._counts if (key.adapter, key.digest) not in versions]:
            del self._counts[key]


class Watch:
    """One request of an arm. The first end counts."""

    __slots__ = ("_counts", "_first_token_s", "_is_ended", "_is_warm", "_start_s", "_time")

    def __init__(self, counts: _Counts) -> None:
        self._counts = counts
        self._time = asyncio.get_running_loop().time
        self._start_s = self._time()
        self._first_token_s: float | None = None
        self._is_ended = False
        self._is_warm = False

    def warm(self) -> None:
        """An engine took the request, and had its adapter on the device."""
        self._is_warm = True

    def first_token(self) -> None:
        self._first_token_s = self._time() - self._start_s

    def done(self, has_text: bool, num_tokens: int) -> None:
        self._end("ok" if has_text else "empty", num_tokens)

    def failed(self, error: BaseException, num_tokens: int) -> None:
        self._end(outcome_of(error), num_tokens)

    def left(self, num_tokens: int) -> None:
        self._end("left", num_tokens)

    def _end(self, outcome: Outcome, num_tokens: int) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        counts = self._counts
        counts.outcomes[_PLACES[outcome]] += 1
        counts.output_tokens += num_tokens
        if self._first_token_s is not None:
            counts.first_token.observe(self._first_token_s)
            if self._is_warm:
                counts.warm_first_token.observe(self._first_token_s)
        if outcome == "left" and self._is_warm:
            counts.num_warm_left += 1
        if outcome in ("ok", "empty"):
            counts.latency.observe(self._time() - self._start_s)


def outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, ClientGoneError | asyncio.CancelledError):
        return "left"
    if isinstance(error, NonFiniteError):
        return "non_finite"
    is_ours = isinstance(error, AdapterUnsupportedError)  # the version's fault, not the client's
    return "error" if is_ours or to_api_error(error).status >= 500 else "refused"


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Of seconds counted by ARM_SECONDS; what lies above them counts as the last. None: empty."""
    total = sum(counts)
    if total == 0:
        return None
    wanted = share * total
    below = 0
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= wanted:
            high = ARM_SECONDS[index]
            low = high / math.sqrt(2)
            # Buckets grow by a factor, so what lies within one does too.
            return float(low * (high / low) ** ((wanted - below) / count))
        below += count
    return ARM_SECONDS[-1]


@dataclass(slots=True)
class _Counts:
    outcomes: list[int] = field(default_factory=lambda: [0] * len(OUTCOMES))
    output_tokens: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(ARM_SECONDS))
    latency: Histogram = field(default_factory=lambda: Histogram(ARM_SECONDS))
    warm_first_token: Histogram = field(default_factory=lambda: Histogram(ARM_SECONDS))
    num_warm_left: int = 0

    def tally(self) -> Tally:
        return Tally(
            tuple(self.outcomes),
            self.output_tokens,
            tuple(self.first_token.counts),
            self.first_token.total,
            tuple(self.latency.counts),
            self.latency.total,
            tuple(self.warm_first_token.counts),
            self.num_warm_left,
        )


def _combined(one: Tally, other: Tally, with_: Callable[..., Any]) -> Tally:
    """`with_`: of two numbers."""

    def counts(mine: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(with_, mine, others))

    return Tally(
        counts(one.outcomes, other.outcomes),
        with_(one.output_tokens, other.output_tokens),
        counts(one.first_token, other.first_token),
        with_(one.first_token_s, other.first_token_s),
        counts(one.latency, other.latency),
        with_(one.latency_s, other.latency_s),
        counts(one.warm_first_token, other.warm_first_token),
        with_(one.num_warm_left, other.num_warm_left),
    )
