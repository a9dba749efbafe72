"""The kinds of question over one table, each with its query and several phrasings."""

from __future__ import annotations

import random
from collections.abc import Callable

from notebooks.demo_adapters.sql_schema import Condition, Table

Question = tuple[str, str]


def _select(rng: random.Random, t: Table, where: Condition) -> Question:
    shown = rng.sample(t.columns, rng.randint(1, 2))
    nouns = " and ".join(c.noun for c in shown)
    names = ", ".join(c.name for c in shown)
    words = rng.choice(
        [
            f"Show the {nouns} of all {t.name} {where.words}.",
            f"List the {nouns} of {t.name} {where.words}.",
            f"What is the {nouns} of the {t.name} {where.words}?",
            f"Give me the {nouns} of every {t.singular} {where.words}.",
            f"Find the {nouns} for {t.name} {where.words}.",
        ]
    )
    return words, f"SELECT {names} FROM {t.name} WHERE {where.sql};"


def _select_all(rng: random.Random, t: Table, where: Condition) -> Question:
    words = rng.choice(
        [
            f"Show all {t.name} {where.words}.",
            f"Which {t.name} are there {where.words}?",
            f"List every {t.singular} {where.words}.",
            f"Find {t.name} {where.words}.",
        ]
    )
    return words, f"SELECT * FROM {t.name} WHERE {where.sql};"


def _count(rng: random.Random, t: Table, where: Condition) -> Question:
    if rng.random() < 0.25:
        return f"How many {t.name} are there?", f"SELECT COUNT(*) FROM {t.name};"
    words = rng.choice(
        [
            f"How many {t.name} are there {where.words}?",
            f"Count the {t.name} {where.words}.",
            f"What is the number of {t.name} {where.words}?",
        ]
    )
    return words, f"SELECT COUNT(*) FROM {t.name} WHERE {where.sql};"


AGGREGATES = (
    ("average", "AVG"),
    ("mean", "AVG"),
    ("total", "SUM"),
    ("sum of the", "SUM"),
    ("highest", "MAX"),
    ("maximum", "MAX"),
    ("lowest", "MIN"),
    ("minimum", "MIN"),
)


def _aggregate(rng: random.Random, t: Table, where: Condition) -> Question:
    (word, function), column = rng.choice(AGGREGATES), rng.choice(t.numbers)
    start = rng.choice([f"What is the {word} {column.noun}", f"Find the {word} {column.noun}"])
    end = "?" if start.startswith("What") else "."
    sql = f"SELECT {function}({column.name}) FROM {t.name}"
    if rng.random() < 0.35:
        return f"{start} of all {t.name}{end}", f"{sql};"
    return f"{start} of {t.name} {where.words}{end}", f"{sql} WHERE {where.sql};"


def _group(rng: random.Random, t: Table, where: Condition) -> Question:
    key = rng.choice(t.texts)
    if rng.random() < 0.5:
        words = rng.choice(
            [
                f"How many {t.name} are there for each {key.noun}?",
                f"Count the {t.name} per {key.noun}.",
                f"Show the number of {t.name} by {key.noun}.",
            ]
        )
        return words, f"SELECT {key.name}, COUNT(*) FROM {t.name} GROUP BY {key.name};"
    (word, function), column = rng.choice(AGGREGATES), rng.choice(t.numbers)
    words = rng.choice(
        [
            f"What is the {word} {column.noun} of {t.name} for each {key.noun}?",
            f"Show the {word} {column.noun} per {key.noun}.",
            f"Give the {word} {column.noun} by {key.noun}.",
        ]
    )
    sql = f"SELECT {key.name}, {function}({column.name}) FROM {t.name} GROUP BY {key.name};"
    return words, sql


def _having(rng: random.Random, t: Table, where: Condition) -> Question:
    key, least = rng.choice(t.texts), rng.randint(2, 9)
    words = rng.choice(
        [
            f"Which {key.noun} has more than {least} {t.name}?",
            f"Show every {key.noun} with more than {least} {t.name}.",
        ]
    )
    group = f"SELECT {key.name} FROM {t.name} GROUP BY {key.name}"
    return words, f"{group} HAVING COUNT(*) > {least};"


def _order(rng: random.Random, t: Table, where: Condition) -> Question:
    shown, by, limit = rng.choice(t.texts), rng.choice(t.numbers), rng.randint(2, 10)
    low = rng.random() < 0.4
    extreme, direction = ("lowest", "ASC") if low else ("highest", "DESC")
    tail = f"ORDER BY {by.name} {direction}"
    options = [
        (f"Show the {shown.noun} of the {limit} {t.name} with the {extreme} {by.noun}.", limit),
        (f"Which {t.singular} has the {extreme} {by.noun}? Show the {shown.noun}.", 1),
        (f"What is the {shown.noun} of the {t.singular} with the {extreme} {by.noun}?", 1),
        (f"List the {shown.noun} of all {t.name} sorted by {by.noun}, {extreme} first.", 0),
        (
            f"Give the {shown.noun} of the top {limit} {t.name} by {by.noun}, {extreme} first.",
            limit,
        ),
    ]
    words, rows = rng.choice(options)
    limited = f" LIMIT {rows}" if rows else ""
    return words, f"SELECT {shown.name} FROM {t.name} {tail}{limited};"


def _distinct(rng: random.Random, t: Table, where: Condition) -> Question:
    column = rng.choice(t.texts)
    if rng.random() < 0.4:
        words = f"How many different values of {column.noun} do the {t.name} have?"
        return words, f"SELECT COUNT(DISTINCT {column.name}) FROM {t.name};"
    words = rng.choice(
        [
            f"Which different values of {column.noun} occur among the {t.name}?",
            f"List every distinct {column.noun} of the {t.name}.",
            f"Show the unique {column.noun} values in {t.name}.",
        ]
    )
    return words, f"SELECT DISTINCT {column.name} FROM {t.name};"


KINDS: tuple[tuple[Callable[[random.Random, Table, Condition], Question], int], ...] = (
    (_select, 6),
    (_select_all, 3),
    (_count, 4),
    (_aggregate, 4),
    (_group, 4),
    (_having, 1),
    (_order, 4),
    (_distinct, 2),
)
