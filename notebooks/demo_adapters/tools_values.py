"""The parameters of `tools`: read from `tools_tables.txt`, with their schemas and drawn values.

A value is drawn together with the words by which a question states it: "14:30" with "2:30 pm", 0.05
with "5%", 3 with "three".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from notebooks.demo_adapters import extract_words as people
from notebooks.demo_adapters.common import Split, part, words
from notebooks.demo_adapters.tools_words import VALUES

TABLES = Path(__file__).with_name("tools_tables.txt")
Json = dict[str, Any]
Kind = Literal["string", "enum", "number", "rate", "flag", "list", "range"]
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMERALS = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter before a function gives it one of its names."""

    kind: Kind
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    phrases: tuple[str, ...]  # of a question, with {} for the value
    values: str = ""  # the kind of value, or the allowed ones
    noun: str = ""  # of a number
    unit: str = ""
    low: int = 0
    high: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    slot: Slot
    is_required: bool
    schema: Json


@dataclass(frozen=True, slots=True)
class Statement:
    """A value of a parameter, and the phrase of a question that states it."""

    value: Any
    phrase: str


@cache
def rows(section: str) -> tuple[tuple[str, ...], ...]:
    """Returns the lines of a section of the tables, as fields."""
    found, is_inside = [], False
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            is_inside = line == f"[{section}]"
        elif is_inside and line and not line.startswith("#"):
            found.append(tuple(field.strip() for field in line.split(";")))
    return tuple(found)


@cache
def slots() -> dict[str, Slot]:
    """Returns the slots by the references of the tables, such as `city` or `#mass`."""
    found = {"*range": Slot("range", ("range", "interval", "limits"), ("The range",), ())}
    for key, names, descriptions, phrases, values in rows("strings"):
        found[key] = Slot("string", _split(names), _split(descriptions), _split(phrases), values)
    for key, names, descriptions, phrases, values in rows("enums"):
        found[key] = Slot("enum", _split(names), _split(descriptions), _split(phrases), values)
    for noun, names, unit, span, text in rows("numbers"):
        low, high = (int(bound) for bound in span.split("-"))
        all_names = (noun.replace(" ", "_"), *_split(names))
        found["#" + noun] = Slot("number", all_names, (text,), (), "", noun, unit, low, high)
    for noun, names, text in rows("rates"):
        found["%" + noun] = Slot("rate", _split(names), (text,), (), "", noun)
    for names, text, yes, no in rows("flags"):
        found["+" + _split(names)[0]] = Slot("flag", _split(names), (text,), _split(yes), no)
    for names, descriptions, phrases, values in rows("lists"):
        first = _split(names)[0]
        found["~" + first] = Slot(
            "list", _split(names), _split(descriptions), _split(phrases), values
        )
    return found


def _split(field: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in field.split("|"))


def draw_parameter(
    rng: random.Random, slot: Slot, is_required: bool, taken: set[str]
) -> Parameter | None:
    """Returns the parameter under a name that is not yet `taken`, or None if all are."""
    free = [name for name in slot.names if name not in taken]
    if not free:
        return None
    schema = _schema(rng, slot)
    if rng.random() > 0.06:
        text = rng.choice(slot.descriptions)
        if not is_required and rng.random() < 0.35:
            text += _default(rng, slot)
        schema["description"] = text if rng.random() < 0.5 else text + "."
    return Parameter(rng.choice(free), slot, is_required, schema)


def _default(rng: random.Random, slot: Slot) -> str:
    """Returns words about a default, which a call does not repeat."""
    if slot.kind == "number":
        return f" (default {rng.randint(slot.low, slot.high)})"
    if slot.kind == "enum":
        return f" (defaults to '{rng.choice(_split(slot.values))}')"
    return " (default false)" if slot.kind == "flag" else ", optional"


def _schema(rng: random.Random, slot: Slot) -> Json:
    if slot.kind == "enum":
        return {"type": "string", "enum": list(_split(slot.values))}
    if slot.kind == "number":
        return {"type": "number" if rng.random() < 0.3 else "integer"}
    if slot.kind == "list":
        item = "string" if slot.values != "@number" else rng.choice(["integer", "number"])
        return {"type": "array", "items": {"type": item}}
    if slot.kind == "range":
        low, high = rng.choice([("min", "max"), ("from", "to"), ("start", "end")])
        bound = {"type": "integer"}
        return {
            "type": "object",
            "properties": {low: dict(bound), high: dict(bound)},
            "required": [low, high],
        }
    return {"type": {"rate": "number", "flag": "boolean"}.get(slot.kind, "string")}


def state(rng: random.Random, parameter: Parameter, split: Split) -> Statement:
    """Draws a value and the words for it."""
    slot, schema = parameter.slot, parameter.schema
    if slot.kind == "number":
        return _state_number(rng, slot, schema["type"] == "number")
    if slot.kind == "rate":
        percent = rng.choice([rng.randint(1, 30), rng.randint(2, 60) / 4])
        said = rng.choice([f"{percent:g}%", f"{percent:g}%", f"{percent:g} percent"])
        phrase = rng.choice(["with {a} {n} of {}", "at {a} {n} of {}", "the {n} is {}"])
        text = phrase.format(said, a=article(slot.noun), n=slot.noun)
        return Statement(round(percent / 100, 6), text)
    if slot.kind == "flag":
        if rng.random() < 0.75:
            return Statement(True, rng.choice(slot.phrases))
        return Statement(False, rng.choice(_split(slot.values)))
    if slot.kind == "range":
        low = rng.randint(0, 20)
        high = low + rng.randint(1, 30)
        keys = list(schema["properties"])
        said = rng.choice([f"between {low} and {high}", f"from {low} to {high}"])
        return Statement(dict(zip(keys, (low, high), strict=True)), said)
    phrase = rng.choice(slot.phrases)
    if slot.kind == "enum":
        value = rng.choice(schema["enum"])
        return Statement(value, phrase.format(value))
    if slot.kind == "list":
        return _state_list(rng, slot, schema["items"]["type"], phrase, split)
    kind = slot.values.removeprefix("@")
    value, said = draw_text(rng, kind, split)
    return Statement(value, phrase.format(said))


def _state_number(rng: random.Random, slot: Slot, is_decimal: bool) -> Statement:
    value: int | float = rng.randint(slot.low, slot.high)
    if is_decimal and slot.unit and rng.random() < 0.6:
        value = round(value + rng.randint(1, 99) / rng.choice([10, 100]), 2)
    if slot.noun == "year":
        return Statement(value, rng.choice(["in {}", "for the year {}", "from {}"]).format(value))
    said = f"{value}"
    if isinstance(value, int) and value < len(NUMERALS) and rng.random() < 0.3:
        said = NUMERALS[value]
    elif value >= 1000 and rng.random() < 0.4:
        said = f"{value:,}"
    if slot.noun.startswith("number of ") or slot.noun == slot.unit:
        things = slot.noun.removeprefix("number of ")
        things = things.removesuffix("s") if value == 1 else things
        phrases = ["for {} {t}", "with {} {t}", "{} {t}", "the {n} is {}"]
        return Statement(value, rng.choice(phrases).format(said, t=things, n=slot.noun))
    if slot.unit == "dollars" and rng.random() < 0.5:
        amount = f"${value:,}" if rng.random() < 0.5 else f"${value}"
    elif rng.random() < 0.15:
        amount = said
    else:
        amount = f"{said}{'' if said[0].isdigit() and rng.random() < 0.15 else ' '}{slot.unit}"
    phrases = [
        *("with {a} {n} of {}", "{a} {n} of {}", "for {a} {n} of {}", "where the {n} is {}"),
        *("with {n} {}", "the {n} is {}", "{n} = {}", "{n}: {}"),
    ]
    weights = [4, 3, 2, 2, 2, 2, 1, 1]
    phrase = rng.choices(phrases, weights)[0]
    return Statement(value, phrase.format(amount, a=article(slot.noun), n=slot.noun))


def _state_list(rng: random.Random, slot: Slot, item: str, phrase: str, split: Split) -> Statement:
    count = rng.randint(2, 6)
    if slot.values != "@number":
        kind = slot.values.removeprefix("@")
        texts = list(dict.fromkeys(draw_text(rng, kind, split)[1] for _ in range(count)))
        return Statement(texts, phrase.format(enumeration(texts)))
    scale = rng.choice([1, 10]) if item == "number" else 1
    numbers = [
        rng.randint(1, 200) if scale == 1 else rng.randint(1, 2000) / 10 for _ in range(count)
    ]
    said = [f"{number}" for number in numbers]
    written = rng.choice([enumeration(said), ", ".join(said), f"[{', '.join(said)}]"])
    return Statement(numbers, phrase.format(written))


def draw_text(rng: random.Random, kind: str, split: Split) -> tuple[str, str]:
    """Returns a text value of this kind as the argument has it, and as the question says it."""
    if kind in DRAWN:
        drawn = DRAWN[kind](rng, split)
        return drawn if isinstance(drawn, tuple) else (drawn, drawn)
    value = rng.choice(part(words(VALUES[kind]), split))
    if kind == "city" and rng.random() < 0.12:
        value += ", " + rng.choice(part(words(VALUES["country"]), split))
    return value, value


def _person(rng: random.Random, split: Split) -> str:
    first = rng.choice(part(words(people.FIRST_NAMES), split))
    if rng.random() < 0.3:
        return first
    return f"{first} {rng.choice(part(words(people.LAST_NAMES), split))}"


def _company(rng: random.Random, split: Split) -> str:
    start = rng.choice(part(words(people.COMPANY_STARTS), split))
    return start + rng.choice(part(words(people.COMPANY_ENDS), split))


def _iso_date(rng: random.Random, split: Split) -> tuple[str, str]:
    month, day, year = rng.randint(1, 12), rng.randint(1, 28), rng.randint(2018, 2029)
    iso = f"{year}-{month:02d}-{day:02d}"
    name = words(people.MONTHS)[month - 1]
    return iso, rng.choice([iso, iso, f"{name} {day}, {year}", f"{day} {name} {year}"])


def _free_date(rng: random.Random, split: Split) -> str:
    day, month = rng.randint(1, 28), rng.choice(words(people.MONTHS))
    return rng.choice(
        [
            f"{month} {day}",
            f"{day} {month}",
            f"{month} {day}, {rng.randint(2020, 2029)}",
            _iso_date(rng, split)[0],
            f"next {rng.choice(WEEKDAYS)}",
            rng.choice(["tomorrow", "today", "next week", "this weekend"]),
        ]
    )


def _time(rng: random.Random, split: Split) -> tuple[str, str]:
    hour, minute = rng.randint(6, 22), rng.choice([0, 15, 30, 45])
    value = f"{hour:02d}:{minute:02d}"
    half = f"{(hour - 1) % 12 + 1}:{minute:02d} {'am' if hour < 12 else 'pm'}"
    return value, rng.choice([value, value, half])


def _email(rng: random.Random, split: Split) -> str:
    name = _person(rng, split).lower().replace(" ", rng.choice([".", "_", ""]))
    return f"{name}@{rng.choice(['mail.com', 'post.org', 'inbox.net', 'example.com'])}"


def _phone(rng: random.Random, split: Split) -> str:
    return f"{rng.randint(200, 999)}-{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def _code(rng: random.Random, split: Split) -> str:
    letters = "".join(rng.choices("ABCDEFGHKLMNPRSTXZ", k=rng.randint(1, 3)))
    return letters + rng.choice(["-", ""]) + str(rng.randint(100, 99999))


def _expression(rng: random.Random, split: Split) -> str:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 20)
    power = rng.randint(2, 5)
    return rng.choice(
        [
            f"{a}x^{power} + {b}x - {c}",
            f"x^{power} + {c}",
            f"{a}*x**{power} - {b}*x",
            f"sin({a}x) + {b}",
            f"{a}x + {c}",
            f"exp(-{a}x)",
        ]
    )


def _street(rng: random.Random, split: Split) -> str:
    return f"{rng.randint(1, 199)} {rng.choice(part(words(people.STREETS), split))} Street"


def _file(rng: random.Random, split: Split) -> str:
    stem = rng.choice(["report", "notes", "budget", "photo", "letter", "slides", "backup", "plan"])
    ending = rng.choice(["pdf", "txt", "png", "docx", "csv", "zip"])
    folder = rng.choice(["", "", "work/", "home/files/", "/data/"])
    return f"{folder}{stem}_{rng.randint(1, 99)}.{ending}"


def _url(rng: random.Random, split: Split) -> str:
    name = rng.choice(part(words(people.COMPANY_STARTS), split)).lower().replace(" ", "")
    return f"https://{name}.{rng.choice(['com', 'org', 'net'])}/{rng.choice(['news', 'blog', 'a'])}"


DRAWN: dict[str, Callable[[random.Random, Split], str | tuple[str, str]]] = {
    "person": _person,
    "company": _company,
    "iso_date": _iso_date,
    "free_date": _free_date,
    "time": _time,
    "email": _email,
    "phone": _phone,
    "code": _code,
    "expression": _expression,
    "street": _street,
    "file": _file,
    "url": _url,
}


def article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def enumeration(texts: list[str]) -> str:
    """Returns "a, b and c"."""
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1]
