"""The invented functions of `tools`: an operation, a style of names, a choice of parameters.

Operations come from three tables: written ones, quantities computed from any numbers, and
attributes of entities. Every fifth of each table is held out, so that no held-out function has a
name or an object of training.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from notebooks.demo_adapters.common import Split, part
from notebooks.demo_adapters.tools_values import (
    Json,
    Parameter,
    Slot,
    Statement,
    draw_parameter,
    rows,
    slots,
    state,
)
from notebooks.demo_adapters.tools_words import (
    DESCRIPTIONS,
    FRAMES,
    QUESTION_WORDS,
    RESERVED,
    STEMS,
    VERBS,
)

OperationKind = Literal["compute", "fetch", "search", "act"]
KINDS: tuple[OperationKind, ...] = ("compute", "fetch", "search", "act")


@dataclass(frozen=True, slots=True)
class Operation:
    """A thing to do, before it is a function."""

    domain: str
    kind: OperationKind
    verb: str  # of an act
    thing: str  # what is done, with its article
    name_words: tuple[str, ...]  # that every name of it has
    slots: tuple[tuple[Slot, bool], ...]  # with True for a required one


@dataclass(frozen=True, slots=True)
class Function:
    operation: Operation
    name: str
    parameters: tuple[Parameter, ...]
    description: str

    @property
    def tool(self) -> Json:
        """The function as clients write it in `tools`, and as the chat template gets it."""
        required = [one.name for one in self.parameters if one.is_required]
        parameters = {
            "type": "object",
            "properties": {one.name: one.schema for one in self.parameters},
            "required": required,
        }
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the arguments of the call that answers it, in the schema's order."""

    question: str
    arguments: Json
    phrases: tuple[str, ...]  # of the arguments, in the order of the question


@cache
def written_operations(split: Split) -> tuple[Operation, ...]:
    return tuple(_written(*row) for row in part(rows("operations"), split))


@cache
def computed_things(split: Split) -> tuple[tuple[str, str], ...]:
    """Returns (domain, what is computed)."""
    return tuple(
        part([(row[0], one) for row in rows("computed") for one in _alternatives(row[1])], split)
    )


@cache
def entity_attributes(split: Split) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Returns (row of the entity, attribute)."""
    return tuple(
        part([(row, one) for row in rows("facts") for one in _alternatives(row[3])], split)
    )


def _alternatives(field: str) -> list[str]:
    return [one.strip() for one in field.split("|")]


def _written(domain: str, act: str, thing: str, spec: str) -> Operation:
    word, _, verb = act.partition(" ")
    (kind,) = (one for one in KINDS if one == word)
    found = []
    for ref in re.findall(r"\+\w+|[#%~*]?[a-z][a-z_ ]*[!?]", spec):
        key = ref.rstrip("!?")
        found.append((_slot(key), ref.endswith("!")))
    core = re.sub(r"\b(the|a|an|of|with|on|in|to)\b", " ", f"{verb} {thing}" if verb else thing)
    return Operation(domain, kind, verb, thing, tuple(core.replace("-", "").split()), tuple(found))


def _slot(key: str) -> Slot:
    known = slots()
    if key in known:
        return known[key]
    # A flag or a list may be named by the beginning of one of its names.
    for ref, slot in known.items():
        if ref[0] == key[0] in "+~" and any(name.startswith(key[1:]) for name in slot.names):
            return slot
    raise LookupError(f"tools_tables.txt: there is no parameter {key!r}")


def draw_operation(rng: random.Random, split: Split) -> Operation:
    family = rng.random()
    if family < 0.5:
        return rng.choice(written_operations(split))
    known = slots()
    if family < 0.78:
        domain, thing = rng.choice(computed_things(split))
        numbers = [slot for ref, slot in known.items() if ref[0] == "#" and slot.noun != "year"]
        chosen = [(slot, rng.random() < 0.85) for slot in rng.sample(numbers, rng.randint(1, 4))]
        if rng.random() < 0.25:
            rates = [slot for ref, slot in known.items() if ref[0] == "%"]
            chosen.append((rng.choice(rates), rng.random() < 0.7))
        if rng.random() < 0.3:
            extra = ("system", "method", "material", "+round_result", "unit_length", "gender")
            chosen.append((known[rng.choice(extra)], rng.random() < 0.3))
        if not any(is_required for _, is_required in chosen):
            chosen[0] = (chosen[0][0], True)
        return Operation(domain, "compute", "", f"the {thing}", tuple(thing.split()), tuple(chosen))
    (entity, names, values, _), attribute = rng.choice(entity_attributes(split))
    phrases = (f"of the {entity} {{}}", "of {}", f"for the {entity} {{}}", "for {}", "of '{}'")
    key = "Identifier" if values == "code" else "Name"
    texts = (f"The {entity}", f"{key} of the {entity}")
    slot = Slot("string", tuple(_alternatives(names)), texts, phrases, "@" + values)
    chosen = [(slot, True)]
    if rng.random() < 0.35:
        ref = rng.choice(("#year", "language", "currency", "free_date", "+history", "format"))
        chosen.append((_slot(ref), rng.random() < 0.3))
    name_words = (*entity.split(), *attribute.split())
    return Operation("info", "fetch", "", f"the {attribute}", name_words, tuple(chosen))


def draw_function(rng: random.Random, split: Split, domain: str | None = None) -> Function:
    """Returns a function; of this domain if one is found soon."""
    for _ in range(8):
        operation = draw_operation(rng, split)
        if domain in (None, operation.domain):
            break
    kept = [(slot, need) for slot, need in operation.slots if need or rng.random() < 0.65]
    taken: set[str] = set()
    parameters = []
    for slot, is_required in kept:
        parameter = draw_parameter(rng, slot, is_required, taken)
        if parameter is not None:
            taken.add(parameter.name)
            parameters.append(parameter)
    if rng.random() < 0.6:
        parameters.sort(key=lambda one: not one.is_required)
    else:
        rng.shuffle(parameters)
    if operation.kind == "act":
        verb = operation.verb
        text = rng.choice(DESCRIPTIONS["act"]).format(
            o=operation.thing, v=verb, V=verb[0].upper() + verb[1:]
        )
    else:
        text = rng.choice(DESCRIPTIONS[operation.kind]).format(o=operation.thing)
    return Function(operation, _draw_name(rng, operation), tuple(parameters), text)


def _draw_name(rng: random.Random, operation: Operation) -> str:
    """Returns a name in one of the styles of libraries. A dot, which the API of OpenAI does not
    allow in a name, is an underscore, as its clients write it."""
    while bare_name(name := _style_name(rng, operation)) in RESERVED:
        pass
    return name


def bare_name(name: str) -> str:
    """Returns the letters of a name, by which two styles of one name are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _style_name(rng: random.Random, operation: Operation) -> str:
    tokens = [word.lower() for word in operation.name_words]
    domain = operation.domain.lower()
    verb = "" if operation.kind == "act" else rng.choice(VERBS[operation.kind])
    named = [verb, *tokens] if verb else tokens
    style = rng.random()
    if style < 0.45:
        return "_".join(named)
    if style < 0.65:  # module.function
        return "_".join([domain, *named])
    if style < 0.75:  # module.function_part.verb
        return "_".join([domain, *tokens, verb or "run"])
    if style < 0.95:
        return named[0] + "".join(word.capitalize() for word in named[1:])
    return "-".join(named)


def ask(rng: random.Random, function: Function, split: Split) -> Asked:
    """Draws the arguments of a call and a question that states them."""
    said: list[tuple[Parameter, Statement]] = [
        (one, state(rng, one, split))
        for one in function.parameters
        if one.is_required or rng.random() < 0.5
    ]
    arguments = {parameter.name: statement.value for parameter, statement in said}
    if rng.random() < 0.5:
        rng.shuffle(said)
    phrases = tuple(statement.phrase for _, statement in said)
    return Asked(phrase_question(rng, function, phrases, split), arguments, phrases)


def phrase_question(
    rng: random.Random, function: Function, phrases: tuple[str, ...], split: Split
) -> str:
    operation = function.operation
    stems = STEMS[operation.kind] * 2 if len(STEMS[operation.kind]) % 5 else STEMS[operation.kind]
    stem = rng.choice(part(stems, split)).format(o=operation.thing, v=operation.verb)
    stem = stem[0].upper() + stem[1:]
    mark = "?" if stem.split()[0].lower() in QUESTION_WORDS else "."
    rest = _joined(rng, phrases)
    if not rest:
        return stem + mark
    frame = rng.choice(part(FRAMES, split))
    text = frame.format(
        stem=stem,
        stem_low=stem if stem.startswith("I ") else stem[0].lower() + stem[1:],
        rest=rest,
        Rest=rest[0].upper() + rest[1:],
        mark=mark,
    )
    return text.replace(".?", "?").replace("..", ".")


def _joined(rng: random.Random, phrases: tuple[str, ...]) -> str:
    if len(phrases) < 2:
        return "".join(phrases)
    style = rng.random()
    if style < 0.4:
        return " ".join(phrases)
    if style < 0.8:
        return ", ".join(phrases[:-1]) + " and " + phrases[-1].removeprefix("and ")
    return ", ".join(phrases)
