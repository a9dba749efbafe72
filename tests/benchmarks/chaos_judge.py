"""The cases of `chaos`, and what was wrong with an answer, against the same case's undisturbed one.

Every case has one right answer, token by token: greedy or with a seed, fp32. A third of them has a
constraint, or must be a tool call; such an answer has to be valid besides. Ignorant of engines and
of what was done to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jsonschema

from tests.benchmarks.chaos_http import Exchange

PROMPTS = (
    "The three laws of robotics are",
    "Once upon a time in a small village by the sea there lived",
    "A list of reasons why streams should never break: 1.",
)
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2099},
        "tags": {"type": "array", "items": {"enum": ["sea", "robot", "law"]}, "maxItems": 4},
        "place": {"anyOf": [{"type": "string", "maxLength": 16}, {"type": "null"}]},
        "is_true": {"type": "boolean"},
    },
    "required": ["title", "year", "tags", "place", "is_true"],
    "additionalProperties": False,
}
REGEX = r"([A-Z][a-z]{2,9} ){6}[0-9]{4}-[0-9]{2}"
CHOICES = (
    "a robot may not injure a human being or, through inaction, allow one to come to harm",
    "a robot must obey orders given by human beings except where they conflict with the first law",
    "streams break because engines are killed, and go on because another engine has the tokens",
)
TOOL = {
    "type": "function",
    "function": {"name": "write_down", "description": "Stores a record.", "parameters": SCHEMA},
}
# Grammars forbid `ignore_eos`, and their answers end by themselves.
CONSTRAINED: Mapping[str, object] = {"ignore_eos": False, "max_tokens": 160}
KINDS: tuple[dict[str, object], ...] = (
    {"stream": True, "temperature": 0},
    {"stream": False, "temperature": 0},
    {"stream": True, "n": 2, "seed": 11, **SAMPLED},
    {"stream": True, "temperature": 0, "stop": "?"},  # the reference run puts a stop string there
    {"stream": True, "seed": 12, "presence_penalty": 0.6, "repetition_penalty": 1.2, **SAMPLED},
    {"stream": True, "temperature": 0, "logprobs": 2},
    {"stream": False, "n": 2, "seed": 13, "logprobs": 1, **SAMPLED},
    {"stream": True, "temperature": 0, "chat": True, "ignore_eos": False},
    {"stream": True, "seed": 14, "guided_json": SCHEMA, **SAMPLED, **CONSTRAINED},
    {"stream": False, "n": 2, "seed": 15, "guided_regex": REGEX, **SAMPLED, **CONSTRAINED},
    {"stream": True, "temperature": 0, "guided_choice": CHOICES, **CONSTRAINED},
    {
        "stream": True,
        "seed": 16,
        "chat": True,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        **SAMPLED,
        **CONSTRAINED,
    },
)
VERDICTS = ("ok", "failed", "cut", "truncated", "lost", "doubled", "different", "invalid")
LOGPROB_TOLERANCE = 1e-3


@dataclass(slots=True)
class Told:
    """One answer as its client put it together."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by choice
    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[tuple[str, str]]] = field(default_factory=dict)  # names, arguments
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    usage_tokens: int | None = None
    prompt_tokens: int = 0  # by the usage of the answer
    is_done: bool = False  # [DONE] came
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(len(one) for one in self.token_ids.values())


def make_cases(
    models: Sequence[str], tokens: int, *, can_chat: bool, is_free: bool = False
) -> list[dict[str, object]]:
    """Bodies; "chat" is for `path_and_body`. A base without a template calls no tools. `is_free`:
    no answer has a constraint."""
    cases: list[dict[str, object]] = []
    kinds = [kind for kind in KINDS if can_chat or "tools" not in kind]
    if is_free:
        kinds = [kind for kind in kinds if not is_constrained(kind)]
    for number, prompt in enumerate(PROMPTS):
        for index, kind in enumerate(kinds):
            common: dict[str, object] = {
                "model": models[(index + number) % len(models)],
                "prompt": prompt,
                "max_tokens": tokens - 7 * (index % 3),
                "return_token_ids": True,
                "ignore_eos": True,
            }
            if kind["stream"]:
                common["stream_options"] = {"include_usage": True}
            cases.append(common | kind | ({} if can_chat else {"chat": False}))
    return cases


def path_and_body(case: dict[str, object]) -> tuple[str, dict[str, object]]:
    body = {name: value for name, value in case.items() if name != "chat"}
    if not case.get("chat"):
        return "/v1/completions", body
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return "/v1/chat/completions", body


def read_answer(exchange: Exchange) -> Told:
    told = Told()
    if exchange.status != 200 or not exchange.events:
        if exchange.status == 200 and exchange.is_whole:
            _add(told, json.loads(exchange.body))
            told.is_done = True
        else:
            told.error = f"{exchange.status} {exchange.error} {exchange.body[:200]!r}"
        return told
    for _, event in exchange.events:
        lines = event.split(b"\n")
        data = next((line[6:] for line in lines if line.startswith(b"data: ")), b"")
        if data == b"[DONE]":
            told.is_done = True
        elif data:
            content = json.loads(data)
            if "error" in content:
                told.error = json.dumps(content["error"])
            else:
                _add(told, content)
    return told


def is_constrained(case: Mapping[str, object]) -> bool:
    return "tools" in case or any(name.startswith("guided_") for name in case)


def problem_of_constraint(case: Mapping[str, object], told: Told) -> str:
    """Returns why an answer is not of its case's constraint, or an empty text."""
    if not is_constrained(case):
        return ""
    for choice, text in told.texts.items():
        if told.reasons.get(choice) != ("tool_calls" if "tools" in case else "stop"):
            return f"choice {choice} ended with {told.reasons.get(choice)}"
        try:
            if "tools" in case:
                ((name, text),) = told.calls[choice]
                if name != "write_down":
                    return f"choice {choice}: {name!r} is no tool"
            if "guided_json" in case or "tools" in case:
                jsonschema.validate(json.loads(text), SCHEMA)
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            return f"choice {choice}: {type(error).__name__}: {str(error)[:200]}"
        if "guided_regex" in case and not re.fullmatch(REGEX, text):
            return f"choice {choice}: {text!r} does not match"
        if "guided_choice" in case and text not in CHOICES:
            return f"choice {choice}: {text!r} is no choice"
    return ""


def judge(
    told: Told, exchange: Exchange, right: Told, case: Mapping[str, object]
) -> tuple[str, str]:
    """(verdict, details). `failed` and `cut` are told to the client; all others but `ok` are
    not: they are what must never happen."""
    if not exchange.is_whole:
        return "cut", f"after {told.num_tokens} of {right.num_tokens} tokens: {exchange.error}"
    if told.error:
        return "failed", told.error
    if not told.is_done or told.reasons.keys() != right.reasons.keys():
        return "truncated", f"after {told.num_tokens} of {right.num_tokens} tokens"
    if told.num_tokens != right.num_tokens:
        kind = "lost" if told.num_tokens < right.num_tokens else "doubled"
        return kind, f"{told.num_tokens} tokens, not {right.num_tokens}"
    if problem := problem_of_constraint(case, told):
        return "invalid", problem
    for name in ("token_ids", "texts", "calls", "reasons", "usage_tokens"):
        if getattr(told, name) != getattr(right, name):
            return "different", f"{name}: {_first_difference(told, right)}"
    if len(told.ids) != 1:
        return "different", f"{len(told.ids)} ids"
    if told.usage_tokens != told.num_tokens:
        return "different", f"usage {told.usage_tokens} of {told.num_tokens} tokens"
    if not _are_logprobs_near(told, right):
        return "different", "logprobs"
    return "ok", ""


def _add(told: Told, content: dict[str, object]) -> None:
    told.ids.add(str(content["id"]))
    choices = content["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        index = choice["index"]
        said = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or said.get("content") or ""
        told.texts[index] = told.texts.get(index, "") + text
        for call in said.get("tool_calls") or ():
            function = call["function"]
            told.calls.setdefault(index, []).append((function["name"], function["arguments"]))
        told.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        if choice.get("logprobs"):
            told.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"] is not None:
            told.reasons[index] = choice["finish_reason"]
    usage = content.get("usage")
    if isinstance(usage, dict):
        told.usage_tokens = usage["completion_tokens"]
        told.prompt_tokens = usage["prompt_tokens"]


def _first_difference(told: Told, right: Told) -> str:
    for choice, token_ids in right.token_ids.items():
        ours = told.token_ids.get(choice, [])
        for position, (one, other) in enumerate(zip(ours, token_ids, strict=False)):
            if one != other:
                return f"choice {choice}, token {position} of {len(token_ids)}"
    return "not in the tokens"


def _are_logprobs_near(told: Told, right: Told) -> bool:
    return told.logprobs.keys() == right.logprobs.keys() and all(
        len(told.logprobs[choice]) == len(values)
        and all(
            abs(ours - theirs) < LOGPROB_TOLERANCE
            for ours, theirs in zip(told.logprobs[choice], values, strict=True)
        )
        for choice, values in right.logprobs.items()
    )
