"""An order: steps drawn from a seed and run against the world. If they break a promise, they are
reduced to the fewest that still break it."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.config import ModelArgs
from tests.control_plane.draws import ADAPTERS, BASES
from tests.control_plane.operator_rules import ORDERS
from tests.control_plane.plots import Step
from tests.control_plane.promises import begin, check_step, settle
from tests.control_plane.rules import RULES
from tests.control_plane.store import Database
from tests.control_plane.troubles import TROUBLES
from tests.control_plane.world import Violation, World, fake_world

ALL_RULES = RULES | ORDERS | TROUBLES
_MAX_TRIES = 120  # of shorter orders
# The models of the configuration file; the registry adds beta if the file does not.
LAYOUTS: tuple[tuple[ModelArgs, ...], ...] = (
    (ModelArgs(name="alpha"),),
    (ModelArgs(name="alpha"), ModelArgs(name="beta@champion")),
    (ModelArgs(name="alpha"), ModelArgs(name="beta", alias="prod")),
)


@dataclass
class Outcome:
    seed: int
    steps: list[Step]
    broken: str | None = None
    said: list[str] = field(default_factory=list)  # after each step
    counts: Counter[str] = field(default_factory=Counter)


def run(database: Database, seed: int, steps: Sequence[Step]) -> Outcome:
    outcome = Outcome(seed, list(steps))
    with fake_world(database, LAYOUTS[seed % len(LAYOUTS)], seed) as world:
        try:
            world.loop.run_until_complete(_run(world, steps, outcome))
        except Exception as error:
            outcome.broken = str(error) if isinstance(error, Violation) else _place(error)
        outcome.counts = world.journal.counts
    return outcome


async def _run(world: World, steps: Sequence[Step], outcome: Outcome) -> None:
    await begin(world)
    for name, arguments in steps:
        words = await ALL_RULES[name](world, **arguments)
        outcome.said.append(words)
        is_refused = words.startswith(("refused", "failed"))
        world.journal.counts[f"{name} refused" if is_refused else name] += 1
        await asyncio.sleep(0.02)
        await check_step(world)
    await settle(world)


def _place(error: Exception) -> str:
    """Describes an unexpected error."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = ", ".join(f"{Path(one.filename).name} {one.name} {one.lineno}" for one in frames)
    return f"{type(error).__name__} {error} in {places}"


def shorten(database: Database, failed: Outcome) -> Outcome:
    """Removes steps, first many and then single steps, while the same promise stays broken (equal
    text except for numbers)."""
    best, tries, size = failed, 0, max(1, len(failed.steps) // 2)
    while True:
        begin, has_shrunk = 0, False
        while begin < len(best.steps) and tries < _MAX_TRIES:
            tried = [*best.steps[:begin], *best.steps[begin + size :]]
            outcome = run(database, failed.seed, tried)
            tries += 1
            if kind_of(outcome.broken) == kind_of(failed.broken):
                best, has_shrunk = outcome, True
            else:
                begin += size
        if tries >= _MAX_TRIES or (size == 1 and not has_shrunk):
            return best
        size = max(1, size // 2)


def kind_of(broken: str | None) -> str | None:
    """The promise without the names and numbers of this order."""
    if broken is None:
        return None
    words = broken.split(":")[0] if not broken.startswith("a traceback") else broken
    known = {*ADAPTERS, *BASES, "alpha"}
    return " ".join(
        "-" if word.split("@")[0] in known or any(c.isdigit() for c in word) else word
        for word in words.split()[:12]
    )


def shown(outcome: Outcome) -> str:
    lines = [f"seed {outcome.seed}: {outcome.broken}"]
    for i, (name, arguments) in enumerate(outcome.steps):
        said = f"  -> {outcome.said[i]}" if i < len(outcome.said) and outcome.said[i] else ""
        inside = ", ".join(f"{key}={_short(value)}" for key, value in arguments.items())
        lines.append(f"  {i + 1}. {name}({inside}){said}")
    return "\n".join(lines)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "..."
