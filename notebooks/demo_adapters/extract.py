"""`extract`: free text and a list of keys in, one JSON object out.

A text is composed of sentences about drawn values; the request asks for some of its fields, under
one of several names each, in any order, and now and then for a field that the text does not hold
(null). Held-out texts use people, places, firms and things that training never names.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass

from notebooks.demo_adapters import extract_words as vocabulary
from notebooks.demo_adapters.common import Example, Split, part, words

Value = str | int | float | None

SYLLABLES = {
    "train": ("mar", "lo", "ken", "ta", "ri", "sol", "vi", "ber", "na", "du", "fel", "go"),
    "held_out": ("pax", "ju", "wen", "ko", "zil", "hu", "tram", "qui"),
}


@dataclass(frozen=True, slots=True)
class Fields:
    """The values that one text is about."""

    values: dict[str, Value]
    pronoun: str  # She or He


def training_examples(seed: int, count: int) -> list[Example]:
    rng = random.Random(seed)
    return [_compose(rng, "train") for _ in range(count)]


def held_out_examples(seed: int, count: int) -> list[Example]:
    rng = random.Random(seed)
    return [_compose(rng, "held_out") for _ in range(count)]


def _draw_fields(rng: random.Random, split: Split) -> Fields:
    def one(text: str) -> str:
        return rng.choice(part(words(text), split))

    first, last = one(vocabulary.FIRST_NAMES), one(vocabulary.LAST_NAMES)
    if rng.random() < 0.3:  # a made-up name: copied, not recalled
        first = "".join(rng.choices(SYLLABLES[split], k=rng.randint(2, 3))).title()
    person = first if rng.random() < 0.3 else f"{first} {last}"
    company = one(vocabulary.COMPANY_STARTS) + one(vocabulary.COMPANY_ENDS)
    product = one(vocabulary.PRODUCTS)
    if rng.random() < 0.5:
        product = f"{one(vocabulary.ADJECTIVES)} {product}"
    dots = rng.choice([".", "_", ""])
    host = rng.choice([company.split()[0].lower() + ".com", "mail.com", "post.org", "inbox.net"])
    digits = "".join(rng.choices("0123456789", k=4))
    values: dict[str, Value] = {
        "person": person,
        "age": rng.randint(18, 90),
        "city": one(vocabulary.CITIES),
        "city2": one(vocabulary.CITIES),
        "job": one(vocabulary.JOBS),
        "company": company,
        "email": f"{first.lower()}{dots}{last.lower()}@{host}",
        "phone": f"{rng.randint(200, 999)}-{rng.randint(100, 999)}-{digits}",
        "hobby": one(vocabulary.HOBBIES),
        "quantity": rng.randint(2, 60),
        "product": product,
        "price": _draw_price(rng),
        "date": _draw_date(rng),
        "code": "".join(rng.choices("ABCDEFGHKLMNPRSTXZ", k=2)) + f"-{rng.randint(100, 9999)}",
        "payment": rng.choice(words(vocabulary.PAYMENTS)),
        "event": one(vocabulary.EVENTS),
        "time": f"{rng.randint(7, 21)}:{rng.choice(['00', '15', '30', '45'])}",
        "seat": f"{rng.randint(1, 40)}{rng.choice('ABCDEF')}",
        "rating": rng.randint(1, 5),
        "street": f"{rng.randint(1, 99)} {one(vocabulary.STREETS)} Street",
        "rooms": rng.randint(2, 9),
    }
    return Fields(values, rng.choice(["She", "He"]))


def _draw_price(rng: random.Random) -> Value:
    if rng.random() < 0.4:
        return round(rng.uniform(2, 400), 2) + 0.0
    return rng.randint(5, 3000)


def _draw_date(rng: random.Random) -> str:
    month, day, year = (
        rng.choice(words(vocabulary.MONTHS)),
        rng.randint(1, 28),
        rng.randint(2022, 2029),
    )
    return rng.choice(
        [
            f"{month} {day}",
            f"{day} {month} {year}",
            f"{month} {day}, {year}",
            f"{year}-{rng.randint(1, 12):02d}-{day:02d}",
        ]
    )


def _draw_text(rng: random.Random, fields: Fields) -> tuple[str, list[str]]:
    """A text, and the fields that it mentions in their order."""
    kind = rng.choice(vocabulary.KINDS)
    groups = rng.sample(kind.sentences, rng.randint(0, min(3, len(kind.sentences))))
    sentences = [rng.choice(kind.openings), *(rng.choice(group) for group in groups)]
    template = " ".join(sentences)
    mentioned = [name for name in re.findall(r"{(\w+)}", template) if name in fields.values]
    pronoun = fields.pronoun
    text = template.format(
        **fields.values,
        pron=pronoun,
        pron_low=pronoun.lower(),
        obj="her" if pronoun == "She" else "him",
    )
    return text, list(dict.fromkeys(mentioned))


def _compose(rng: random.Random, split: Split) -> Example:
    fields = _draw_fields(rng, split)
    text, mentioned = _draw_text(rng, fields)
    asked = rng.sample(mentioned, rng.randint(min(2, len(mentioned)), min(5, len(mentioned))))
    answer: dict[str, Value] = {}
    for name in asked:
        keys = vocabulary.NAMES[name]
        if name == "city" and "city2" in mentioned:
            keys = vocabulary.ORIGIN_NAMES
        answer[rng.choice(keys)] = fields.values[name]
    if rng.random() < 0.12:
        absent = rng.choice(
            [
                name
                for name in ("age", "email", "phone", "price", "date", "job", "company")
                if name not in mentioned
            ]
        )
        answer[rng.choice(vocabulary.NAMES[absent])] = None
        answer = dict(rng.sample(list(answer.items()), len(answer)))
    request = rng.choice(vocabulary.REQUESTS)
    prompt = request.format(keys=_spell(rng, list(answer)), text=text)
    return Example(prompt, json.dumps(answer, ensure_ascii=False))


def _spell(rng: random.Random, keys: list[str]) -> str:
    """The list of keys, as different people write it."""
    if rng.random() < 0.15:
        keys = [f'"{key}"' for key in keys]
    if len(keys) > 1 and rng.random() < 0.5:
        return ", ".join(keys[:-1]) + " and " + keys[-1]
    return ", ".join(keys)
