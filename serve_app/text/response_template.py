"""Response templates: the inverse of a chat template, from a model's text to a message's fields.

The format is version 1 of transformers' `response_template` in tokenizer_config.json: data, not
code. A field is a region of the text between an opening and a closing delimiter. A model without a
template of its own gets the template of its family if its chat template has that family's marks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

import regex

from engine.errors import UnsupportedModelError

Family = Literal[  # tried in this order
    "qwen-xml", "chatml-json", "llama3-json", "mistral-args", "mistral", "gemma", "granite", "phi"
]
FAMILIES: tuple[Family, ...] = get_args(Family)
REASONING_FIELDS = frozenset(("reasoning_content", "reasoning", "thinking"))
MATCH_SECONDS = 0.05  # of one search; the packaged expressions take microseconds
MAX_TEMPLATE_CHARS = 64 * 1024
MAX_PATTERN_CHARS = 2048  # of one expression; the longest of a family has 150
# The library writes counted repetitions out: the 22 characters of `((a{1000}){1000}){1000}` would
# take all memory before the first search.
MAX_REPETITIONS = 1000  # the product of all counts in an expression
MAX_ALTERNATIVES = 32  # of fields, and of texts that delimit one

_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats"),
    *("join", "optional", "transform", "transform_each"),
}
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_COUNT = regex.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_INVALID = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_UNQUOTED_KEY = regex.compile('(?<=[{,])([^\\s{}\\[\\],:"\x01\x02]+):')
_CONTENTS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")


@dataclass(frozen=True, slots=True)
class Delimiter:
    pattern: Any  # a compiled expression of `regex`
    is_final: bool  # a whole match at the end of the text cannot grow: a literal
    literal: str | None  # the first, None for a pattern

    @classmethod
    def read(cls, spec: Mapping[str, Any], name: str) -> Delimiter | None:
        literal, source = spec.get(name), spec.get(f"{name}_pattern")
        if literal is not None and source is not None:
            raise ValueError(f"has both {name} and {name}_pattern")
        if source is not None:
            return cls(_compiled(source), False, None)
        if literal is None:
            return None
        literals = [literal] if isinstance(literal, str) else list(dict.fromkeys(literal))
        if not literals or not all(isinstance(text, str) and text for text in literals):
            raise ValueError(f"{name} must be a non-empty string or a list of such strings")
        if len(literals) > MAX_ALTERNATIVES:
            raise ValueError(f"{name} has more than {MAX_ALTERNATIVES} texts")
        grows = any(a != b and a.startswith(b) for a in literals for b in literals)
        ordered = sorted(literals, key=len, reverse=True)
        return cls(_compiled("|".join(map(regex.escape, ordered))), not grows, literals[0])


@dataclass(frozen=True, slots=True)
class Region:
    """One field of a template."""

    name: str
    open: Delimiter | None  # None for the field of all text outside of other regions
    close: Delimiter | None
    content: str
    content_args: Mapping[str, Any]
    transform: Any
    transform_each: bool

    @property
    def is_text(self) -> bool:
        return self.content == "text" and self.transform is None

    def value(self, body: str, captures: Mapping[str, str]) -> Any:
        """Returns the value of a closed region. Raises ValueError, LookupError or TypeError if the
        text is not in the region's format."""
        value = parse_content(body, self.content, self.content_args)
        if self.transform is None:
            return value
        if not self.transform_each:
            return _transformed(self.transform, {**captures, "content": value})
        return [_transformed(self.transform, {**captures, **dict(item)}) for item in value]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text of a family's tool calls, for grammars. NAME and KEY stand for names."""

    begin: str
    end: str
    between: str
    before: str = ""  # before the first call
    after: str = ""  # after the last call
    parameter_begin: str = ""  # empty: the arguments are one JSON object
    parameter_end: str = ""


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    name: str
    regions: tuple[Region, ...]
    implicit: Region | None
    start_anchor: Delimiter
    calls: CallFormat | None = None  # None: calls are read, but cannot be demanded
    is_single: bool = False  # the family writes one call in an answer
    short_ids: bool = False  # ids of calls have nine characters, as Mistral's templates demand
    sources: str = ""  # all delimiters, without backslashes
    thinks: bool = False  # the chat template writes the delimiter of reasoning

    @property
    def is_packaged(self) -> bool:
        """Returns True for a family's: its expressions need no time limit."""
        return self.name in FAMILIES

    @property
    def reasoning(self) -> Region | None:
        return next((one for one in self.regions if one.name in REASONING_FIELDS), None)

    @property
    def reads_calls(self) -> bool:
        return any(one.name == "tool_calls" for one in self.regions)

    def is_marker(self, token: str) -> bool:
        """Returns True for the text of a special token that delimits a region."""
        return bool(token) and token in self.sources

    def without_calls(self) -> ResponseTemplate:
        """Returns the template for an answer without tools: text like a call stays text."""
        kept = tuple(one for one in self.regions if one.name != "tool_calls")
        return replace(self, regions=kept)

    def turn_start(self, prompt: str) -> str:
        """Returns the part of the answer that the prompt has already begun; empty if the search
        needs too long."""
        end: int | None = None
        try:
            for match in self.start_anchor.pattern.finditer(prompt, timeout=MATCH_SECONDS):
                end = match.end()
        except TimeoutError:
            return ""
        return "" if end is None else prompt[end:]


def load_template(spec: object, name: str = "", extras: Mapping[str, Any] = {}) -> ResponseTemplate:
    """Builds a template from its JSON. Raises UnsupportedModelError with the reason."""
    try:
        return _load(spec, name, extras)
    except (*_INVALID, regex.error) as error:
        raise UnsupportedModelError(f"response_template: {error}") from error


def _load(spec: object, name: str, extras: Mapping[str, Any]) -> ResponseTemplate:
    if not isinstance(spec, dict) or spec.get("version", 1) != 1:
        raise ValueError("must be an object of version 1")
    if len(json.dumps(spec)) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"has more than {MAX_TEMPLATE_CHARS} characters")
    if unknown := spec.keys() - _TEMPLATE_KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    fields = spec.get("fields")
    if not isinstance(fields, dict) or not fields:
        raise ValueError("fields must be a non-empty object")
    if len(fields) > MAX_ALTERNATIVES:
        raise ValueError(f"has more than {MAX_ALTERNATIVES} fields")
    regions = tuple(_region(key, value) for key, value in fields.items())
    implicit = [one for one in regions if one.open is None]
    if len(implicit) > 1:
        raise ValueError("only one field may have no open")
    anchor = Delimiter.read(spec, "start_anchor")
    if anchor is None:
        raise ValueError("start_anchor or start_anchor_pattern is missing")
    delimiters = [one for field in regions for one in (field.open, field.close) if one]
    return ResponseTemplate(
        name,
        regions,
        implicit[0] if implicit else None,
        anchor,
        CallFormat(**extras["calls"]) if "calls" in extras else None,
        extras.get("is_single", False),
        extras.get("short_ids", False),
        "\n".join(one.pattern.pattern for one in delimiters).replace("\\", ""),
    )


def _region(name: str, spec: object) -> Region:
    if not isinstance(spec, dict):
        raise ValueError(f"field {name} must be an object")
    if unknown := spec.keys() - _FIELD_KEYS:
        raise ValueError(f"field {name} has unknown keys {sorted(unknown)}")
    content = spec.get("content", "text")
    content_args = spec.get("content_args") or {}
    _check_content(name, content, content_args)
    transform = spec.get("transform")
    _check_transform(name, transform)
    return Region(
        name,
        Delimiter.read(spec, "open"),
        Delimiter.read(spec, "close"),
        content,
        content_args,
        transform,
        spec.get("transform_each", False),
    )


def _compiled(source: str) -> Any:
    """Compiles an expression, perhaps of an adapter. Raises ValueError beyond the limits."""
    if len(source) > MAX_PATTERN_CHARS:
        raise ValueError(f"an expression has more than {MAX_PATTERN_CHARS} characters")
    counts = [max(int(one or 1) for one in found.groups()) for found in _COUNT.finditer(source)]
    if math.prod(counts) > MAX_REPETITIONS:
        raise ValueError(f"an expression has more than {MAX_REPETITIONS} counted repetitions")
    return regex.compile(source, regex.DOTALL)


def _check_content(name: str, content: object, args: object) -> None:
    if content not in _CONTENTS:
        raise ValueError(f"field {name} has an unknown content {content!r}")
    if not isinstance(args, dict):
        raise TypeError(f"field {name} has arguments that are no object")
    if content == "xml-inline":
        _compiled(args["tag_pattern"])
    if len(args.get("string_delims", ())) > MAX_ALTERNATIVES:
        raise ValueError(f"field {name} has more than {MAX_ALTERNATIVES} string_delims")
    parser = args.get("value_parser")
    if parser is not None:
        _check_content(name, parser.get("name", "text"), parser.get("args", {}))


def _check_transform(name: str, transform: object) -> None:
    if isinstance(transform, dict | list):
        for value in transform.values() if isinstance(transform, dict) else transform:
            _check_transform(name, value)
    elif isinstance(transform, str):
        found = _PLACEHOLDER.search(transform)
        if found and found[0] != transform:
            raise ValueError(f"field {name} mixes a placeholder with text: {transform!r}")


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, dict):
        return {key: _transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_transformed(value, scope) for value in transform]
    match = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    value: Any = scope
    for key in match[1].split("."):
        value = value[key]
    return value


def parse_content(text: str, kind: str, args: Mapping[str, Any]) -> Any:
    if kind == "json":
        return _lax_json(text, args)
    if kind == "xml-inline":
        return _xml_inline(text, args)
    stripped = text.strip() if args.get("strip", True) else text
    if kind == "text":
        return stripped
    if kind == "kv-lines":
        return _kv_lines(text, args)
    if kind == "bool":
        return stripped.lower() in ("true", "1")
    return int(stripped) if kind == "int" else float(stripped)


def _lax_json(text: str, args: Mapping[str, Any]) -> Any:
    """Parses JSON, with a dialect's string delimiters and unquoted keys if `args` name them."""
    strings: list[str] = []

    def keep(match: Any) -> str:
        strings.append(match[1])
        return f"\x01{len(strings) - 1}\x02"

    working = text
    if args.get("string_delims") and ("\x01" in text or "\x02" in text):
        raise ValueError("a control character in the text")
    for opening, closing in args.get("string_delims", ()):
        pattern = regex.escape(opening) + "(.*?)" + regex.escape(closing)
        working = regex.sub(pattern, keep, working, flags=regex.DOTALL, timeout=MATCH_SECONDS)
    if args.get("unquoted_keys"):
        working = _UNQUOTED_KEY.sub(r'"\1":', working, timeout=MATCH_SECONDS)
    if strings:
        working = regex.sub(
            "\x01([0-9]+)\x02", lambda match: json.dumps(strings[int(match[1])]), working
        )
    try:
        return json.loads(working)
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip() if args.get("strip", True) else text
        raise


def _xml_inline(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    pattern = regex.compile(args["tag_pattern"], regex.DOTALL)
    for match in pattern.finditer(text, timeout=MATCH_SECONDS):
        key, value = match["key"], _sub_value(match.groupdict().get("value", ""), args)
        if key in values and args.get("merge_duplicates"):
            before = values[key]
            values[key] = [*(before if isinstance(before, list) else [before]), value]
        else:
            values[key] = value
    return values


def _kv_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = line.partition(args.get("kv_sep", ":"))
        if separator:
            values[key.strip()] = _sub_value(value.strip(), args)
    return values


def _sub_value(text: str, args: Mapping[str, Any]) -> Any:
    parser = args.get("value_parser")
    if parser is None:
        return text
    return parse_content(text, parser.get("name", "text"), parser.get("args", {}))


@cache
def family_template(name: str) -> ResponseTemplate:
    """Returns a packaged template. Raises UnsupportedModelError for an unknown name."""
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"response_template: no family {name!r}; the families are {', '.join(FAMILIES)}"
        )
    spec = _family(name)
    return load_template(spec["template"], name, spec)


@cache
def _family(name: str) -> dict[str, Any]:
    folder = files("serve_app.text") / "response_templates"
    spec: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return spec


def choose_template(own: object, chat_template: str | None) -> ResponseTemplate | None:
    """Returns the model's own template, given as such or by the name of a family, otherwise that of
    the family whose marks the chat template has, otherwise None. Raises UnsupportedModelError if
    the model's own template is invalid."""
    source = chat_template or ""
    family = _family_of(source)
    if isinstance(own, str):
        template = family_template(own)
    elif own is not None:
        template = load_template(own, "own", _compatible_calls(own, family))
    elif family is not None:
        template = family_template(family)
    else:
        return None
    opening = template.reasoning.open if template.reasoning else None
    literal = None if opening is None else opening.literal
    return replace(template, thinks=literal is not None and literal.strip() in source)


def _family_of(chat_template: str) -> str | None:
    for name in FAMILIES:
        for marks in _family(name)["marks"]:
            if all(mark in chat_template for mark in marks):
                return name
    return None


def _compatible_calls(own: object, family: str | None) -> Mapping[str, Any]:
    """Returns the family's format of calls if the model's own template delimits calls equally."""
    if family is None:
        return {}
    spec = _family(family)
    ours = spec["template"]["fields"].get("tool_calls")
    fields = own.get("fields") if isinstance(own, dict) else None
    theirs = fields.get("tool_calls") if isinstance(fields, dict) else None
    return spec if _delimiters(theirs) == _delimiters(ours) else {}


def _delimiters(field: object) -> object:
    """Returns the field without the arguments by which its content is read."""
    if not isinstance(field, dict):
        return None
    return {key: value for key, value in field.items() if key != "content_args"}
