"""`sql`: a schema and a question in, one SQL query out.

Questions and queries are composed together: a random schema of one or two tables, a kind of query,
up to two conditions, a phrasing. Held out are whole tables that training never sees, and on the
trained tables pairs of (table, column) that never stand in a training condition.
"""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass

from notebooks.demo_adapters.common import Example, Split, part
from notebooks.demo_adapters.sql_questions import KINDS, Question
from notebooks.demo_adapters.sql_schema import Table, draw_condition, draw_table, draw_where
from notebooks.demo_adapters.sql_themes import THEMES


@dataclass(frozen=True, slots=True)
class SqlExample(Example):
    tables: tuple[Table, ...]
    known_table: bool  # training saw the tables, but not this condition


def training_examples(seed: int, count: int) -> list[Example]:
    rng = random.Random(seed)
    return [_compose(rng, "train", known_table=True) for _ in range(count)]


def held_out_examples(seed: int, count: int) -> list[SqlExample]:
    """Half on tables never seen, half on seen tables with conditions never seen."""
    rng = random.Random(seed)
    examples: list[SqlExample] = []
    while len(examples) < count:
        known_table = len(examples) % 2 == 1
        example = _compose(rng, "held_out", known_table=known_table)
        if not known_table or " WHERE " in example.answer:
            examples.append(example)
    return examples


def database(tables: tuple[Table, ...], seed: int, num_rows: int = 40) -> sqlite3.Connection:
    """The example's schema in memory, filled with values that its questions can ask for."""
    rng = random.Random(seed)
    connection = sqlite3.connect(":memory:")
    for table in tables:
        connection.execute(table.create())
        for row in range(1, num_rows + 1):
            values = [str(row), *(c.draw(rng) for c in table.columns)]
            values += [str(rng.randint(1, num_rows // 3))] if table.parent else []
            connection.execute(f"INSERT INTO {table.name} VALUES ({', '.join(values)})")
    return connection


def _join(rng: random.Random, child: Table, parent: Table, split: Split | None) -> Question:
    key = f"{child.name}.{parent.singular}_id"
    join = f"FROM {child.name} JOIN {parent.name} ON {key} = {parent.name}.id"
    mine, theirs = rng.choice(child.columns), rng.choice(parent.texts)
    where = draw_condition(rng, parent, split, f"{parent.name}.")
    first, second = f"{child.name}.{mine.name}", f"{parent.name}.{theirs.name}"
    options = [
        (
            f"List the {mine.noun} of each {child.singular} with the {theirs.noun} "
            f"of its {parent.singular}.",
            f"SELECT {first}, {second} {join};",
        ),
        (
            f"Show the {mine.noun} of all {child.name} that belong to a {parent.singular} "
            f"{where.words}.",
            f"SELECT {first} {join} WHERE {where.sql};",
        ),
        (
            f"How many {child.name} belong to a {parent.singular} {where.words}?",
            f"SELECT COUNT(*) {join} WHERE {where.sql};",
        ),
        (
            f"How many {child.name} are there for each {parent.singular} {theirs.noun}?",
            f"SELECT {second}, COUNT(*) {join} GROUP BY {second};",
        ),
    ]
    return rng.choice(options)


INSTRUCTIONS = (
    "Write one SQL query that answers the question.\n\nSchema:\n{schema}\n\nQuestion: {question}",
    "Schema:\n{schema}\n\nQuestion: {question}\n\nSQL:",
    "Given this schema, write a SQL query.\n{schema}\n{question}",
    "{schema}\n\n{question}",
    "Translate the question into SQL.\n\n{schema}\n\nQuestion: {question}",
    "{question}\n\nUse these tables:\n{schema}",
)


def _compose(rng: random.Random, split: Split, *, known_table: bool) -> SqlExample:
    themes = part(THEMES, "train" if known_table else "held_out")
    conditions: Split | None = split if known_table else None
    table = draw_table(rng, themes, conditions)
    others = [theme for theme in themes if theme[0] != table.name]
    other = draw_table(rng, others, conditions)
    if rng.random() < 0.2:
        table = Table(table.name, table.singular, table.columns, other.singular)
        tables: tuple[Table, ...] = (other, table)
        question, query = _join(rng, table, other, conditions)
    else:
        tables = (table,) if rng.random() < 0.7 else (table, other)
        kinds, weights = zip(*KINDS, strict=True)
        ask = rng.choices(kinds, weights)[0]
        question, query = ask(rng, table, draw_where(rng, table, conditions))
    order = sorted(tables, key=lambda t: t.name)
    schema = "\n".join(t.create() for t in order)
    prompt = rng.choice(INSTRUCTIONS).format(schema=schema, question=question)
    return SqlExample(prompt, query, tuple(order), known_table)
