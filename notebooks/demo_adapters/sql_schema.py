"""Tables, columns and conditions of `sql`, drawn at random from the themes.

A pair of (table, column) belongs to one split: conditions over it are trained on, or held out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b

from notebooks.demo_adapters.common import Split
from notebooks.demo_adapters.sql_themes import VALUES


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    values: tuple[str, ...] = ()  # of a text column
    low: int = 0  # of a number
    high: int = 0

    @property
    def noun(self) -> str:
        return self.name.replace("_", " ")

    def draw(self, rng: random.Random) -> str:
        """A value as an SQL literal."""
        return (
            f"'{rng.choice(self.values)}'" if self.values else str(rng.randint(self.low, self.high))
        )


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    singular: str
    columns: tuple[Column, ...]
    parent: str = ""  # with a foreign key `<parent singular>_id`, the parent's singular

    @property
    def texts(self) -> list[Column]:
        return [c for c in self.columns if c.values]

    @property
    def numbers(self) -> list[Column]:
        return [c for c in self.columns if not c.values]

    def create(self) -> str:
        parts = [
            "id INTEGER",
            *(f"{c.name} {'TEXT' if c.values else 'INTEGER'}" for c in self.columns),
        ]
        parts += [f"{self.parent}_id INTEGER"] if self.parent else []
        return f"CREATE TABLE {self.name} ({', '.join(parts)});"


@dataclass(frozen=True, slots=True)
class Condition:
    words: str
    sql: str


def condition_split(table: str, column: str) -> Split:
    """Returns whether conditions on this column of this table are trained on, or held out."""
    digest = blake2b(f"{table}.{column}".encode(), digest_size=2).digest()
    return "held_out" if digest[0] % 5 == 0 else "train"


def allowed_columns(table: Table, split: Split | None) -> list[Column]:
    """Returns the columns over which this split may have a condition; `None`: all."""
    return [c for c in table.columns if split in (None, condition_split(table.name, c.name))]


def draw_table(
    rng: random.Random, themes: list[tuple[str, str, str]], split: Split | None
) -> Table:
    """A theme's table that this split may ask about: two or three texts, two or three numbers."""
    while True:
        table = _draw_any_table(rng, themes)
        if allowed_columns(table, split):
            return table


def _draw_any_table(rng: random.Random, themes: list[tuple[str, str, str]]) -> Table:
    name, singular, spec = rng.choice(themes)
    columns = [_column(entry.strip()) for entry in spec.split(",")]
    texts = [c for c in columns if c.values]
    numbers = [c for c in columns if not c.values]
    chosen = rng.sample(texts, rng.randint(2, len(texts)))
    chosen += rng.sample(numbers, rng.randint(2, len(numbers)))
    rng.shuffle(chosen)
    return Table(name, singular, tuple(chosen))


def _column(entry: str) -> Column:
    name, _, span = entry.partition(":")
    if not span:
        return Column(name, tuple(VALUES[name].split("|")))
    low, high = span.split("-")
    return Column(name, low=int(low), high=int(high))


def draw_condition(
    rng: random.Random, table: Table, split: Split | None, prefix: str = ""
) -> Condition:
    """One condition over a column that this split may use."""
    column = rng.choice(allowed_columns(table, split))
    name, noun, value = prefix + column.name, column.noun, column.draw(rng)
    plain = value.strip("'")
    if column.values:
        options = [
            (f"whose {noun} is {plain}", f"{name} = {value}"),
            (f"with the {noun} {plain}", f"{name} = {value}"),
            (f"with {noun} {plain}", f"{name} = {value}"),
            (f"where the {noun} is {plain}", f"{name} = {value}"),
            (f"whose {noun} is not {plain}", f"{name} <> {value}"),
            (f"whose {noun} starts with {plain[0]}", f"{name} LIKE '{plain[0]}%'"),
        ]
        weights = [4, 2, 3, 3, 1, 1]
    else:
        low, high = sorted((int(value), int(column.draw(rng))))
        options = [
            (f"with a {noun} above {value}", f"{name} > {value}"),
            (f"whose {noun} is greater than {value}", f"{name} > {value}"),
            (f"with {noun} over {value}", f"{name} > {value}"),
            (f"whose {noun} is more than {value}", f"{name} > {value}"),
            (f"with a {noun} below {value}", f"{name} < {value}"),
            (f"whose {noun} is less than {value}", f"{name} < {value}"),
            (f"with a {noun} of at least {value}", f"{name} >= {value}"),
            (f"with a {noun} of at most {value}", f"{name} <= {value}"),
            (f"whose {noun} is between {low} and {high}", f"{name} BETWEEN {low} AND {high}"),
            (f"with a {noun} of exactly {value}", f"{name} = {value}"),
        ]
        weights = [2, 2, 2, 2, 2, 2, 2, 2, 1, 1]
    return Condition(*rng.choices(options, weights)[0])


def draw_where(rng: random.Random, table: Table, split: Split | None) -> Condition:
    """One condition, at times two joined by AND or OR."""
    first = draw_condition(rng, table, split)
    if rng.random() < 0.7:
        return first
    second = draw_condition(rng, table, split)
    if second.sql.split()[0] == first.sql.split()[0]:
        return first
    word = rng.choice(["and", "and", "or"])
    return Condition(
        f"{first.words} {word} {second.words}", f"{first.sql} {word.upper()} {second.sql}"
    )
