"""What the three effects are, in numbers: one answer in, marks out.

A Markdown fence around the whole answer is taken off: the base model likes it, a program can too.
"""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import dataclass

from notebooks.demo_adapters import pirate, sql
from notebooks.demo_adapters.common import Example

FIRST_OBJECT = re.compile(r"{[^{}]*}", re.DOTALL)
FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ExtractMarks:
    parses: bool  # the answer as a whole is JSON
    has_keys: bool  # its keys are those asked for
    values_right: float  # share of the asked values; here a JSON object within prose counts too


@dataclass(frozen=True, slots=True)
class SqlMarks:
    is_exact: bool
    executes: bool
    result_right: bool  # the same rows as the reference query on two databases


@dataclass(frozen=True, slots=True)
class PirateMarks:
    speaks_pirate: bool
    answers: bool | None  # the right word is in it; None: an open question


def mark_extract(example: Example, answer: str) -> ExtractMarks:
    expected = json.loads(example.answer)
    answer = _unfenced(answer)
    whole = _json_object(answer)
    match = FIRST_OBJECT.search(answer)
    found = whole or (_json_object(match.group()) if match else None) or {}
    right = sum(key in found and _same(found[key], value) for key, value in expected.items())
    return ExtractMarks(
        parses=whole is not None,
        has_keys=whole is not None and whole.keys() == expected.keys(),
        values_right=right / len(expected),
    )


def mark_sql(example: sql.SqlExample, answer: str) -> SqlMarks:
    answer = _unfenced(answer)
    results = [_run(example, answer, seed) for seed in (1, 2)]
    expected = [_run(example, example.answer, seed) for seed in (1, 2)]
    return SqlMarks(
        is_exact=answer.strip() == example.answer,
        executes=None not in results,
        result_right=None not in results and results == expected,
    )


def mark_pirate(question: pirate.Question, answer: str) -> PirateMarks:
    key = question.answer
    found = re.search(rf"\b{re.escape(key)}\b", answer, re.IGNORECASE) is not None
    return PirateMarks(pirate.speaks_pirate(answer), found if key else None)


def _unfenced(answer: str) -> str:
    match = FENCED.fullmatch(answer.strip())
    return match[1] if match else answer


def _json_object(text: str) -> dict[str, object] | None:
    try:
        value = json.loads(text.strip())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _same(found: object, expected: object) -> bool:
    """Numbers by value, text to the letter; a number written as text is wrong."""
    return (
        type(found) in (int, float) and found == expected
        if _is_number(expected)
        else found == expected
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _run(example: sql.SqlExample, query: str, seed: int) -> list[tuple[object, ...]] | None:
    """The rows, in order only where the reference orders them; None: not one query that runs."""
    connection = sql.database(example.tables, seed)
    try:
        rows = connection.execute(query).fetchall()
    except (sqlite3.Error, sqlite3.Warning):
        return None
    finally:
        connection.close()
    return rows if "ORDER BY" in example.answer else sorted(rows, key=repr)
