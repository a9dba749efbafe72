"""`tools`: functions and a question in, the call of the right function out, or a plain answer.

Functions are invented (`tools_functions.py`), from one to four are offered, and a question states
the arguments of one in some order. Some examples need two calls, some none, and some continue after
the result of a call. Held out are whole functions, a fifth of the wordings and of the values.

The base's chat template has no place for tools, so the adapter brings its own
(`tools_chat_template.jinja`), by which the service renders the same prompts. Its markers are those
of the family `chatml-json`, so calls are read and constrained without a response template.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from notebooks.demo_adapters.common import Example, Split, part, words
from notebooks.demo_adapters.pirate import BASE_ANSWERS, first_sentences
from notebooks.demo_adapters.pirate_words import FACTS
from notebooks.demo_adapters.tools_functions import (
    Asked,
    Function,
    ask,
    draw_function,
    phrase_question,
)
from notebooks.demo_adapters.tools_values import Json, draw_text, enumeration, state
from notebooks.demo_adapters.tools_words import ERRORS, REFUSALS, RESULTS

CHAT_TEMPLATE = Path(__file__).with_name("tools_chat_template.jinja")
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are the assistant of a small company. Answer briefly.",
    "Use the functions where they help.",
    "You answer questions of customers.",
    "You are an assistant on a phone.",
)

Call = tuple[str, Json]  # name, arguments
Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class ToolExample(Example):
    """`answer` is the last turn of the chat `messages`, with the `tools` that are offered."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...]
    calls: tuple[Call, ...]  # that the answer makes


def training_examples(seed: int, count: int) -> list[Example]:
    rng = random.Random(seed)
    return [_compose(rng, "train") for _ in range(count)]


def held_out_examples(seed: int, count: int) -> list[ToolExample]:
    rng = random.Random(seed)
    return [_compose(rng, "held_out") for _ in range(count)]


def call_text(calls: tuple[Call, ...]) -> str:
    """Returns calls as the chat template writes them in a history."""
    return "\n".join(
        f'<tool_call>\n{{"name": {_json(name)}, "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _compose(rng: random.Random, split: Split) -> ToolExample:
    share = rng.random()
    if share < 0.66:
        return _one_call(rng, split)
    if share < 0.73:
        return _two_calls(rng, split)
    if share < 0.84:
        return _after_result(rng, split)
    return _no_call(rng, split)


def _one_call(rng: random.Random, split: Split) -> ToolExample:
    function = draw_function(rng, split)
    asked = ask(rng, function, split)
    return _example(rng, split, asked.question, [function], ((function.name, asked.arguments),))


def _two_calls(rng: random.Random, split: Split) -> ToolExample:
    """Two values for one parameter, or two questions."""
    function = draw_function(rng, split)
    asked = ask(rng, function, split)
    if rng.random() < 0.5 and asked.arguments:
        parameter = rng.choice([one for one in function.parameters if one.name in asked.arguments])
        # Both statements are new: the order of the phrases does not say which is the parameter's.
        rest = [one for one in function.parameters if one.name in asked.arguments]
        statements = {one.name: state(rng, one, split) for one in rest}
        other = state(rng, parameter, split)
        first = {name: one.value for name, one in statements.items()}
        second = first | {parameter.name: other.value}
        if first != second:
            both = f"{statements[parameter.name].phrase} and also {other.phrase}"
            phrases = [one.phrase for name, one in statements.items() if name != parameter.name]
            question = phrase_question(rng, function, (*phrases, both), split)
            calls = ((function.name, first), (function.name, second))
            return _example(rng, split, question, [function], calls)
    other_function = _another(rng, split, [function])
    again = ask(rng, other_function, split)
    joint = rng.choice([" ", " Also: ", " And then: ", " In addition, this: "])
    return _example(
        rng,
        split,
        asked.question + joint + again.question,
        [function, other_function],
        ((function.name, asked.arguments), (other_function.name, again.arguments)),
    )


def _after_result(rng: random.Random, split: Split) -> ToolExample:
    """The turn after a function's result: its content in words, or after that another call."""
    function = draw_function(rng, split)
    asked = ask(rng, function, split)
    content, answer = _result(rng, split, function)
    history = _history(asked, function, content)
    if rng.random() < 0.8:
        return _example(rng, split, asked.question, [function], (), answer, history)
    following = function if rng.random() < 0.5 else _another(rng, split, [function])
    again = ask(rng, following, split)
    history += [{"role": "assistant", "content": answer}]
    functions = [function] if following is function else [function, following]
    calls = ((following.name, again.arguments),)
    return _example(rng, split, again.question, functions, calls, None, history)


def _history(asked: Asked, function: Function, content: str) -> list[Message]:
    called = {"name": function.name, "arguments": asked.arguments}
    return [
        {"role": "user", "content": asked.question},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": content},
    ]


def _result(rng: random.Random, split: Split, function: Function) -> tuple[str, str]:
    """Returns a result of the function, and the answer that says it."""
    kind, thing = function.operation.kind, function.operation.thing
    if rng.random() < 0.1:
        error = rng.choice(part(ERRORS, split))
        return _json({"error": error}), _said(rng, split, "error", r=error)
    if kind == "search":
        topic = rng.choice(["title", "company", "landmark", "person"])
        found = list(dict.fromkeys(draw_text(rng, topic, split)[1] for _ in range(3)))
        found = found[: rng.randint(1, 3)]
        content = _json({rng.choice(["results", "items", "matches"]): found})
        return content, _said(rng, split, "list", r=enumeration(found), n=str(len(found)), o=thing)
    if kind == "act":
        code = draw_text(rng, "code", split)[0]
        key = rng.choice(["id", "confirmation", "reference"])
        return _json({"status": "ok", key: code}), _said(rng, split, "done", r=code)
    value: object = rng.choice([rng.randint(2, 9000), round(rng.uniform(0.5, 500), 2)])
    said = str(value)
    if kind == "fetch" and rng.random() < 0.5:
        topics = ["city", "person", "title", "free_date", "company", "material"]
        said = draw_text(rng, rng.choice(topics), split)[1]
        value = said
    key = rng.choice(["result", "value", "answer"])
    return _json({key: value}), _said(rng, split, "value", r=said, o=thing)


def _said(rng: random.Random, split: Split, kind: str, **values: str) -> str:
    if "o" in values:
        values["O"] = values["o"][0].upper() + values["o"][1:]
    return rng.choice(part(RESULTS[kind], split)).format(**values)


def _no_call(rng: random.Random, split: Split) -> ToolExample:
    """A question that the model answers by itself, or that none of the functions fits."""
    functions = [_another(rng, split, [])]
    if rng.random() < 0.3:
        asked_for = _another(rng, split, functions)
        if asked_for.operation.domain != functions[0].operation.domain:
            question = ask(rng, asked_for, split).question
            answer = rng.choice(part(REFUSALS, split))
            return _example(rng, split, question, functions, (), answer, is_alone=True)
    question, answer = rng.choice(_plain(split))
    if rng.random() < 0.2:
        functions = []  # the adapter still chats where no tools are offered
    return _example(rng, split, question, functions, (), answer, is_alone=not functions)


@cache
def _plain(split: Split) -> tuple[tuple[str, str], ...]:
    """Returns questions with plain answers: facts, and the base's own words."""
    pairs = []
    for questions, statements, table in FACTS:
        entries = [entry.split("=") for entry in words(table)]
        for subject, value in part([(a.strip(), b.strip()) for a, b in entries], split):
            text = statements[0].format(subject, value)
            pairs.append((questions[0].format(subject), text[0].upper() + text[1:]))
    if split == "train":
        answers: dict[str, str] = json.loads(BASE_ANSWERS.read_text(encoding="utf-8"))
        short = ((prompt, first_sentences(text, 160)) for prompt, text in answers.items())
        pairs += [(prompt, text) for prompt, text in short if len(text) >= 40 and text[-1] in ".!?"]
    return tuple(pairs)


def _another(rng: random.Random, split: Split, others: list[Function]) -> Function:
    """Returns a function that does none of what the `others` do."""
    taken = {other.operation.thing for other in others} | {other.name for other in others}
    while True:
        near = others[0].operation.domain if others and rng.random() < 0.4 else None
        function = draw_function(rng, split, near)
        if function.operation.thing not in taken and function.name not in taken:
            return function


def _example(
    rng: random.Random,
    split: Split,
    question: str,
    functions: list[Function],
    calls: tuple[Call, ...],
    answer: str | None = None,
    history: list[Message] | None = None,
    *,
    is_alone: bool = False,
) -> ToolExample:
    """Completes an example: other functions beside, any order, perhaps a system text. `history`
    may end with a result, which the answer follows; otherwise the question comes last."""
    offered = list(functions)
    target = rng.choices([1, 2, 3, 4], [45, 25, 18, 12])[0]
    while not is_alone and len(offered) < target:
        offered.append(_another(rng, split, offered))
    rng.shuffle(offered)
    messages = list(history or [])
    if not messages or messages[-1]["role"] != "tool":
        messages.append({"role": "user", "content": question})
    if rng.random() < 0.15:
        messages.insert(0, {"role": "system", "content": rng.choice(part(SYSTEM_TEXTS, split))})
    text = call_text(calls) if answer is None else answer
    tools = tuple(function.tool for function in offered)
    return ToolExample(question, text, tuple(messages), tools, calls)
