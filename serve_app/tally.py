"""The counts of an arm of a split adapter, as ingresses report them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

Arm = Literal["stable", "canary", "shadow"]

# ok: ended with text. empty: ended without text. error: the server failed. non_finite: the model
# returned NaN or infinity. refused: the client's fault, or too many requests. left: the client
# disconnected.
ArmOutcome = Literal["ok", "empty", "error", "non_finite", "refused", "left"]

OUTCOMES: tuple[ArmOutcome, ...] = ("ok", "empty", "error", "non_finite", "refused", "left")

_NUM_JUDGED = 4  # the first four can be the version's fault or merit

OUTCOME_INDEX = {outcome: index for index, outcome in enumerate(OUTCOMES)}

# Bounds from 1 ms to 12 min, each 1.41 times the previous: fine enough for a ratio of quantiles.
ARM_SECONDS = tuple(round(0.001 * math.sqrt(2) ** step, 6) for step in range(40))

_EMPTY = (0,) * (len(ARM_SECONDS) + 1)


@dataclass(frozen=True, slots=True)
class ArmKey:
    adapter: str
    arm: Arm
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """The counts of an arm. `outcomes` is indexed as OUTCOMES; the histograms have a count per
    bound of ARM_SECONDS, and a last count for longer times."""

    outcomes: tuple[int, ...] = (0,) * len(OUTCOMES)
    output_tokens: int = 0
    first_token: tuple[int, ...] = _EMPTY
    first_token_s: float = 0.0  # sum
    latency: tuple[int, ...] = _EMPTY  # of requests that ended with ok or empty
    latency_s: float = 0.0  # sum
    # Requests whose adapter was on the engine's device when they came: if a first token waits for a
    # load, or a client leaves meanwhile, the version is not to blame.
    warm_first_token: tuple[int, ...] = _EMPTY
    num_warm_left: int = 0

    def __add__(self, other: ArmCounts) -> ArmCounts:
        return _combined(self, other, operator.add)

    def __sub__(self, other: ArmCounts) -> ArmCounts:
        return _combined(self, other, operator.sub)

    def count(self, *outcomes: ArmOutcome) -> int:
        counted = self.outcomes
        return sum([counted[OUTCOME_INDEX[outcome]] for outcome in outcomes])

    @property
    def num_judged(self) -> int:
        """The requests whose outcome the version is responsible for."""
        return sum(self.outcomes[:_NUM_JUDGED])

    @property
    def num_seen(self) -> int:
        """The judged requests, and the warm requests whose clients left."""
        return self.num_judged + self.num_warm_left


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Returns the quantile `share` (0 to 1) in seconds of a histogram by ARM_SECONDS, None if it is
    empty. Times above the last bound count as that bound."""
    total = sum(counts)
    if total == 0:
        return None
    wanted = share * total
    below = 0
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= wanted:
            high = ARM_SECONDS[index]
            low = high / math.sqrt(2)
            # Bounds grow by a factor, so times within a bucket are interpolated by factors, too.
            return float(low * (high / low) ** ((wanted - below) / count))
        below += count
    return ARM_SECONDS[-1]


def _combined(one: ArmCounts, other: ArmCounts, combine: Callable[..., Any]) -> ArmCounts:
    """`combine` adds or subtracts two numbers."""
    values: list[Any] = []
    for field in fields(ArmCounts):
        mine, others = getattr(one, field.name), getattr(other, field.name)
        is_number = not isinstance(mine, tuple)
        values.append(combine(mine, others) if is_number else tuple(map(combine, mine, others)))
    return ArmCounts(*values)
