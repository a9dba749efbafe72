"""The CPU demo's workload: requests of unequal length over the base and its adapters, seeded.

Output lengths follow an exponential law, as chat traffic roughly does: many short answers, a few
long ones. Every request asks for exactly its length (`ignore_eos`), so both sides of a comparison
yield the same number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

TOPICS = ("rivers", "bread", "the moon", "trains", "violins", "glaciers", "chess", "bees", "salt")
PADDING = "Please take into account what was said before and keep the answer as useful as you can. "


@dataclass(frozen=True, slots=True)
class Job:
    target: str | None  # adapter name; None is the base
    text: str
    num_output_tokens: int


def make_jobs(
    targets: Sequence[str | None],
    count: int,
    *,
    mean: int = 48,
    longest: int = 192,
    padding: int = 5,
    seed: int = 0,
) -> list[Job]:
    """`count` requests that take the targets in turn, prompts of about 30 to 130 tokens: with up to
    `padding` sentences of 20 tokens each."""
    draw = random.Random(seed)
    jobs = []
    for i in range(count):
        topic = draw.choice(TOPICS)
        said_before = PADDING * draw.randint(0, padding)
        text = f"Request {i}: tell me something about {topic}. {said_before}"
        length = min(longest, max(4, round(draw.expovariate(1 / mean))))
        jobs.append(Job(targets[i % len(targets)], text, length))
    return jobs
