"""Grammars of a chat's answer with its tool calls, in the format of the model's family.

The parser of the response template reads such calls. Calls that the client demands are constrained,
and calls that the model chooses by itself only if a tool is `strict` or a schema constrains the
text of an answer without calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import InvalidRequestError
from engine.grammars import JSON_FORMAT
from engine.types import Grammar
from serve_app.errors import shown
from serve_app.openai.json_body import FieldError
from serve_app.openai.json_schemas import enforceable
from serve_app.openai.tools import Tool, ToolChoice, schemas
from serve_app.text.response_template import CallFormat, ResponseTemplate

_FREE = r"/(.|\n)*/"
_NO_CALLS = CallFormat(begin="", end="", between="")
# The allowed keys of a tool's parameters that are written one by one: the calls have the listed
# parameters alone.
_KEYS_OF_PARAMETERS = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
        *("$schema", "$id", "title", "description", "default", "examples", "$comment"),
    )
)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning before an answer: open at the end of the prompt, or for the model to open."""

    is_open: bool = False
    end_id: int | None = None  # the token that ends open reasoning, if it is one token
    may_open: bool = False


NO_THINKING = Thinking()


def answer_grammar(
    choice: ToolChoice,
    tools: Sequence[Tool],
    template: ResponseTemplate | None,
    special_ids: Mapping[str, int],
    *,
    content: Grammar | None = None,
    is_parallel: bool = True,
    thinking: Thinking = NO_THINKING,
) -> Grammar | None:
    """Returns the grammar of an answer with its tool calls, or None if all text is allowed.

    `tools` are those of `resolve_choice`; `special_ids` are the ids of the special tokens by their
    text; `content` constrains the text of an answer without calls. Raises InvalidRequestError if
    the model's format of calls is not known, or if `content` cannot stand beside calls.
    """
    is_strict = any(tool["function"].get("strict") for tool in tools)
    is_required = bool(tools) and choice.mode == "required"
    if content is not None and is_required:
        raise InvalidRequestError(
            "tool_choice: an answer that must be a call has no text for response_format or another "
            "constraint.",
            "tool_choice",
        )
    constrains_calls = bool(tools) and (is_required or is_strict or content is not None)
    if not constrains_calls:
        return _content_grammar(content, template, special_ids, thinking)
    if template is None or template.calls is None:
        field = "tool_choice" if is_required else "tools"
        raise InvalidRequestError(
            f"{field}: this model has no response template that describes the text of its tool "
            'calls, so they cannot be constrained; use tool_choice "auto" without strict and '
            "without a constraint of the text.",
            field,
        )
    writer = _GrammarWriter(template.calls, special_ids)
    is_single = not is_parallel or template.is_single or choice.is_named
    if content is not None:
        if content.kind != "json_schema":
            raise InvalidRequestError(
                "tools: only a JSON schema may constrain the text of an answer beside tools.",
                "tools",
            )
        writer.rules.append(f"content: {_json_rule(json.loads(content.source))}")
        rule = f"(content | {writer.calls(tools, is_single)})"
    elif is_required:
        rule = writer.calls(tools, is_single)
    else:
        rule = writer.lazy_calls(tools, is_single)
    has_prefix = is_required or content is not None
    prefix = _reasoning_prefix(writer, template, thinking) if has_prefix else ""
    return _lark(writer, f"{prefix}{rule}", thinking)


def _content_grammar(
    content: Grammar | None,
    template: ResponseTemplate | None,
    special_ids: Mapping[str, int],
    thinking: Thinking,
) -> Grammar | None:
    """Returns the grammar of an answer without tools, which reasoning may precede. A model that
    opens its reasoning itself has that choice before JSON only."""
    if content is None or template is None or thinking == NO_THINKING:
        return content
    if content.kind != "json_schema":
        if thinking.is_open and thinking.end_id is None:
            raise InvalidRequestError(
                "structured_outputs: this model's reasoning, which the prompt opens, has no end "
                "that is one token, so only a JSON schema may follow it.",
                "structured_outputs",
            )
        return replace(content, starts_after=thinking.end_id)
    writer = _GrammarWriter(_NO_CALLS, special_ids)
    prefix = _reasoning_prefix(writer, template, thinking)
    if not prefix:
        return content
    writer.rules.append(f"content: {_json_rule(json.loads(content.source))}")
    return _lark(writer, f"{prefix}content", thinking)


def _lark(writer: _GrammarWriter, start: str, thinking: Thinking) -> Grammar:
    lines = ["%llguidance {}", f"start: {start}", *writer.rules]
    return Grammar("lark", "\n".join(lines), thinking.end_id)


def _reasoning_prefix(
    writer: _GrammarWriter, template: ResponseTemplate, thinking: Thinking
) -> str:
    """Returns the rule of the text before the constrained text: the rest of reasoning that the
    prompt opened, or reasoning that the model may open."""
    if thinking.is_open and thinking.end_id is not None:
        return r"/\n{0,2}/ "
    region = template.reasoning
    opening = None if region is None or region.open is None else region.open.literal
    closing = None if region is None or region.close is None else region.close.literal
    if closing is None or not (thinking.is_open or (thinking.may_open and opening)):
        return ""
    writer.rules.append(writer.until("think_end", closing))
    if thinking.is_open:
        return r"think_end /\n{0,2}/ "
    writer.rules.append(rf"think: {writer.text(opening or '')} think_end /\n{{0,2}}/")
    return "think? "


class _GrammarWriter:
    """Writes rules of llguidance's Lark dialect."""

    def __init__(self, form: CallFormat, special_ids: Mapping[str, int]) -> None:
        self._form = form
        self._special_ids = special_ids
        self.rules: list[str] = []

    def text(self, literal: str) -> str:
        """Returns a literal; a special token in it is matched by its id, for it has no bytes."""
        for token, token_id in self._special_ids.items():
            before, found, after = literal.partition(token)
            if found:
                parts = self.text(before), f"<[{token_id}]>", self.text(after)
                return " ".join(filter(None, parts))
        return json.dumps(literal) if literal else ""

    def until(self, name: str, literal: str) -> str:
        """Returns the rule of any text that ends with the first `literal`."""
        if literal in self._special_ids:
            return f"{name}: {_FREE} {self.text(literal)}"
        return f"{name}[lazy]: {_FREE} {json.dumps(literal)}"

    def calls(self, tools: Sequence[Tool], is_single: bool, head: str = "") -> str:
        """Returns a rule of calls, whose text begins after `head`, the first part of `before`."""
        form = self._form
        self.rules.append(f"call: {' | '.join(self._calls(tools))}")
        before, after = self.text(form.before.removeprefix(head)), self.text(form.after)
        more = "" if is_single else f"({self.text(form.between)} call)*"
        return " ".join(filter(None, (before, "call", more, after)))

    def lazy_calls(self, tools: Sequence[Tool], is_single: bool) -> str:
        """Returns a rule of free text in which the beginning of a call leads to a whole call."""
        form = self._form
        opening = form.before + form.begin
        trigger = re.match(r"<[^<>=]*>|<[^<>=]*=|\[[A-Z_]+\]", opening)
        self.rules.append(f"FREE: {_FREE}")
        if trigger is None:  # calls are the whole answer
            self.rules.append(r"OTHER: /([^{\s](.|\n)*)?/")
            return f"{self.calls(tools, is_single)} | OTHER"
        self.rules.append(self.until("head", trigger[0]))
        if form.before:  # a list of calls
            return f"head {self.calls(tools, is_single, trigger[0])} | FREE"
        self.rules.append(f"call: head ({' | '.join(self._calls(tools, trigger[0]))})")
        return r"call /\s{0,4}/ | FREE" if is_single else "call* FREE"

    def _calls(self, tools: Sequence[Tool], head: str = "") -> list[str]:
        names = []
        for index, (name, schema) in enumerate(schemas(tools).items()):
            begin = self.text(self._form.begin.replace("NAME", name).removeprefix(head))
            body, end = self._arguments(index, name, schema), self.text(self._form.end)
            self.rules.append(f"call_{index}: {' '.join(filter(None, (begin, body, end)))}")
            names.append(f"call_{index}")
        return names

    def _arguments(self, index: int, tool: str, schema: dict[str, Any]) -> str:
        if not self._form.parameter_begin:
            rule = _checked_rule(schema, f"tools.{tool}.parameters")
            self.rules.append(f"arguments_{index}: {rule}")
            return f"arguments_{index}"
        if ignored := schema.keys() - _KEYS_OF_PARAMETERS:
            raise InvalidRequestError(
                f"tools.{tool}.parameters.{shown(min(ignored))[1:-1]}: cannot be enforced in this "
                "model's format of calls.",
                "tools",
            )
        parts = []
        required = schema.get("required") or ()
        if missing := [name for name in required if name not in (schema.get("properties") or {})]:
            raise InvalidRequestError(
                f"tools.{tool}.parameters.required: {shown(missing[0])} is not in properties.",
                "tools",
            )
        definitions: dict[str, Any] = {
            key: schema[key] for key in ("$defs", "definitions") if key in schema
        }
        for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
            if not key or re.search(r"[>\n]", key):
                raise InvalidRequestError(
                    f"tools: the parameter {shown(key)} of {tool} cannot be written in this "
                    "model's format of calls.",
                    "tools",
                )
            rule, where = f"parameter_{index}_{number}", f"tools.{tool}.parameters.properties.{key}"
            begin = self.text(self._form.parameter_begin.replace("KEY", key))
            self.rules.append(f"{rule}: {begin} {self._parameter(rule, where, value, definitions)}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _parameter(self, rule: str, where: str, schema: Any, definitions: Mapping[str, Any]) -> str:
        end = self._form.parameter_end
        is_text = isinstance(schema, dict) and schema.get("type") == "string"
        if is_text and "enum" in schema:
            values = schema["enum"]
            if not (
                isinstance(values, list) and values and all(isinstance(v, str) for v in values)
            ):
                raise InvalidRequestError(
                    f"tools: enum of a string must be a non-empty list of strings, "
                    f"got {shown(values)}.",
                    "tools",
                )
            return f"({' | '.join(map(json.dumps, schema['enum']))}) {self.text(end)}"
        if is_text and not schema.keys() - {"type", "title", "description", "default", "examples"}:
            self.rules.append(self.until(f"{rule}_text", end))
            return f"{rule}_text"
        if is_text or not isinstance(schema, dict):
            raise InvalidRequestError(
                f"tools: the schema {shown(schema)} of a parameter cannot be enforced in this "
                "model's format of calls.",
                "tools",
            )
        self.rules.append(f"{rule}_json: {_checked_rule({**schema, **definitions}, where)}")
        return f"{rule}_json {self.text(end)}"


def _checked_rule(schema: dict[str, Any], where: str) -> str:
    try:
        return _json_rule(enforceable(schema, where))
    except FieldError as error:
        raise InvalidRequestError(error.message, "tools") from None


def _json_rule(schema: Mapping[str, object]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_FORMAT})
