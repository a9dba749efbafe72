"""The duration of steps, and of many equal steps at once.

A step: fixed + token * prompt tokens + sequence * decoding sequences + kv_token * their context.
In a run of decode steps of the same n sequences the context grows by n a step, so step i takes
`first_s + i * growth_s` and sums and their inverse are closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt


@dataclass(frozen=True, slots=True)
class Pace:
    fixed_s: float
    token_s: float
    sequence_s: float
    kv_token_s: float = 0.0

    def step_s(self, num_tokens: int, num_sequences: int, context: int) -> float:
        return (
            self.fixed_s
            + self.token_s * num_tokens
            + self.sequence_s * num_sequences
            + self.kv_token_s * context
        )


def steps_s(first_s: float, growth_s: float, count: int) -> float:
    """Returns the seconds of `count` steps."""
    return count * first_s + growth_s * (count * (count - 1) // 2)


def steps_until(first_s: float, growth_s: float, seconds: float) -> int:
    """The smallest number of steps that take at least `seconds`."""
    if seconds <= 0:
        return 0
    if growth_s <= 0:
        count = ceil(seconds / first_s)
    else:
        half = first_s - growth_s / 2
        count = ceil((sqrt(half * half + 2 * growth_s * seconds) - half) / growth_s)
    while count > 0 and steps_s(first_s, growth_s, count - 1) >= seconds:  # rounding
        count -= 1
    while steps_s(first_s, growth_s, count) < seconds:
        count += 1
    return count
