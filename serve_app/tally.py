"""The counts of one arm of a split adapter, as ingresses report them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Arm = Literal["stable", "canary", "shadow"]

# ok: ended with text. empty: ended without. error: we failed. non_finite: the model gave NaN or
# infinity. refused: the client's fault, or too many requests. left: the client went away.
ArmOutcome = Literal["ok", "empty", "error", "non_finite", "refused", "left"]

OUTCOMES: tuple[ArmOutcome, ...] = ("ok", "empty", "error", "non_finite", "refused", "left")

_NUM_JUDGED = 4  # of these say something of the version

PLACES = {outcome: place for place, outcome in enumerate(OUTCOMES)}


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
class ArmCounts:
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

    def __add__(self, other: ArmCounts) -> ArmCounts:
        return _combined(self, other, operator.add)

    def __sub__(self, other: ArmCounts) -> ArmCounts:
        return _combined(self, other, operator.sub)

    def count(self, *outcomes: ArmOutcome) -> int:
        counted = self.outcomes
        return sum([counted[PLACES[outcome]] for outcome in outcomes])

    @property
    def num_judged(self) -> int:
        """Requests that say something of the version."""
        return sum(self.outcomes[:_NUM_JUDGED])

    @property
    def num_seen(self) -> int:
        """The judged requests and those whose clients left."""
        return self.num_judged + self.num_warm_left


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


def _combined(one: ArmCounts, other: ArmCounts, with_: Callable[..., Any]) -> ArmCounts:
    """`with_`: of two numbers."""

    def counts(mine: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(with_, mine, others))

    return ArmCounts(
        counts(one.outcomes, other.outcomes),
        with_(one.output_tokens, other.output_tokens),
        counts(one.first_token, other.first_token),
        with_(one.first_token_s, other.first_token_s),
        counts(one.latency, other.latency),
        with_(one.latency_s, other.latency_s),
        counts(one.warm_first_token, other.warm_first_token),
        with_(one.num_warm_left, other.num_warm_left),
    )
