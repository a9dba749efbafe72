"""The effects in numbers: one answer in, marks out.

A Markdown fence around the whole answer is taken off: the base model likes it, a program can too.
"""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import dataclass

from notebooks.demo_adapters import pirate, sql
from notebooks.demo_adapters.common import Example
from notebooks.demo_adapters.tools import Call, ToolExample
from notebooks.demo_adapters.tools_values import Json
from serve_app.text.regions import RegionParser
from serve_app.text.response_template import family_template

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


@dataclass(frozen=True, slots=True)
class ToolMarks:
    decides: bool  # calls if and only if a call is right, and the functions are the right ones
    well_formed: bool | None  # known functions, known arguments, all required ones; None: no call
    arguments_right: bool | None  # all calls as expected; None where no call is right


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


def mark_tools(example: ToolExample, answer: str) -> ToolMarks:
    """Marks an answer by the calls that a client receives; a list of calls may have any order."""
    calls, is_clean = read_calls(answer)
    expected, made = sorted(example.calls, key=_order), sorted(calls, key=_order)
    return ToolMarks(
        decides=[name for name, _ in made] == [name for name, _ in expected],
        well_formed=is_clean and all(_fits(call, example.tools) for call in calls)
        if calls or not is_clean
        else None,
        arguments_right=_same_calls(made, expected) if expected else None,
    )


def read_calls(answer: str) -> tuple[list[Call], bool]:
    """Returns the calls that the service reads from an answer, and False if it holds the beginning
    of a call that stayed text."""
    parser = RegionParser(family_template("chatml-json"))
    pieces = [*parser.push(answer), *parser.finish()]
    calls = [(name, arguments) for piece in pieces for name, arguments, _ in piece.calls]
    return calls, not any("<tool_call>" in piece.content for piece in pieces)


def _order(call: Call) -> tuple[str, str]:
    name, arguments = call
    return name, json.dumps(arguments, sort_keys=True)


def _fits(call: Call, tools: tuple[Json, ...]) -> bool:
    name, arguments = call
    for tool in tools:
        if tool["function"]["name"] == name:
            schema = tool["function"]["parameters"]
            required, known = set(schema["required"]), set(schema["properties"])
            return required <= arguments.keys() <= known
    return False


def _same_calls(made: list[Call], expected: list[Call]) -> bool:
    return len(made) == len(expected) and all(
        a == c and b.keys() == d.keys() and all(_same(b[key], d[key]) for key in d)
        for (a, b), (c, d) in zip(made, expected, strict=True)
    )


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
        else type(found) is type(expected) and found == expected
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
