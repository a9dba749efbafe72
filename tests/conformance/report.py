"""The outcomes as lines for the terminal and as docs/conformance.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date

from tests.conformance.clients import CLIENTS
from tests.conformance.outcome import Outcome
from tests.docs.markdown import table

COLUMNS = ("client", "version", "day", "passed", "failed", "skipped", "seconds", "failures")

_HEAD = """<!-- Written by `make conformance WRITE=1`. -->

# Conformance

Public clients, unmodified, each in an environment of its own, against the demo server on a CPU.
Their versions are those of [requirements.txt](../tests/conformance/requirements.txt).
`make conformance` repeats all of it, `make conformance CLIENTS=openai,dspy` some; a failure without
a cause in [known.py](../tests/conformance/known.py) fails the run.

Skipped are tests of LangChain's own suite: images, PDF files, audio, and the benchmark of a stream.
The seconds are those of two cores that also did other work.

"""


def line(outcome: Outcome) -> str:
    head = f"{outcome.client:14} {outcome.version:10}"
    if outcome.not_run and not (outcome.passed or outcome.failed):
        return f"{head} not run: {outcome.not_run}"
    words = f"{head} {len(outcome.passed):3} passed, {len(outcome.failed)} failed"
    words += f" ({len(outcome.known)} known), {outcome.skipped} skipped, {outcome.seconds:.0f} s"
    return f"{words}; {outcome.not_run}" if outcome.not_run else words


def details(outcome: Outcome) -> list[str]:
    """Returns a line for each failure, and one for the addresses that the guard refused."""
    lines = [f"    known: {test}: {cause}" for test, cause in outcome.known.items()]
    lines += [f"    FAILED {test}: {why}" for test, why in outcome.unexpected.items()]
    if outcome.called_out:
        lines.append(f"    asked for other machines: {', '.join(outcome.called_out)}")
    return lines


def page(outcomes: Sequence[Outcome], before: str, day: date) -> str:
    """Returns the page with a row for each outcome; `before` is the page so far, whose rows of
    other clients stay."""
    kept = {row[0]: row for row in _rows(before)}
    for outcome in outcomes:
        kept[outcome.client] = (
            outcome.client,
            outcome.version,
            day.isoformat(),
            str(len(outcome.passed)),
            str(len(outcome.failed)),
            str(outcome.skipped),
            f"{outcome.seconds:.0f}",
            _why(outcome),
        )
    order = [client.name for client in CLIENTS]
    rows = [kept[name] for name in order if name in kept]
    return _HEAD + table(COLUMNS, rows)


def _rows(written: str) -> list[tuple[str, ...]]:
    """Returns the rows of the page's table, bars within cells as they were."""
    lines = [line[1:-1] for line in written.splitlines() if line.startswith("|")]
    return [
        tuple(cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line))
        for line in lines[2:]  # after the head and its rule
    ]


def _why(outcome: Outcome) -> str:
    parts = [outcome.not_run] if outcome.not_run else []
    causes: dict[str, list[str]] = {}
    for test in outcome.failed:
        words = outcome.known.get(test) or outcome.failed[test][:120]
        causes.setdefault(words, []).append(f"`{test}`")
    parts += [f"{', '.join(tests)}: {words}" for words, tests in causes.items()]
    return "; ".join(parts)
