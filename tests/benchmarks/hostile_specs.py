"""Constraints that try to cost a server time, memory or its life; for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tests.grammar_helpers import ambiguous


def _nested(keyword: str, depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: [schema, {"type": "integer"}]}
    return schema


def _deep(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


_MANY_NAMES: Mapping[str, object] = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string"} for i in range(990)},
    "minProperties": 600,
}
_DOUBLING = (
    "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(900)) + '\na900: "x"'
)
_CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(990)) + '\na990: "x"'
_TOO_MANY = "start: a0\n" + "\n".join(f'a{i}: "x"' for i in range(2000))

# The fields of a body by the name of what is tried.
HOSTILE: dict[str, dict[str, object]] = {
    "nested anyOf": {"guided_json": _nested("anyOf", 14)},
    "nested allOf": {"guided_json": _nested("allOf", 14)},
    "nested oneOf": {"guided_json": _nested("oneOf", 14)},
    "deep objects": {"guided_json": _deep(14)},
    "deeper than allowed": {"guided_json": _deep(150)},
    "1,000 lengths": {
        "guided_json": {"anyOf": [{"type": "string", "minLength": i} for i in range(1000)]}
    },
    "long string": {"guided_json": {"type": "string", "minLength": 60_000, "maxLength": 60_001}},
    "counted pattern": {"guided_json": {"type": "string", "pattern": "(a{1,900}){1,900}"}},
    "nested stars": {"guided_json": {"type": "string", "pattern": "(((((a*)*)*)*)*)*b"}},
    "open brackets": {"guided_json": {"type": "string", "pattern": "[" * 4000}},
    "array of 10^9": {
        "guided_json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}
    },
    "array of 2^70": {"guided_json": {"type": "array", "minItems": 2**70}},
    "range of 10^300": {
        "guided_json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}
    },
    "multiple of 10^18": {"guided_json": {"type": "integer", "multipleOf": 10**18 + 1}},
    "itself": {"guided_json": {"$ref": "#"}},
    "endless reference": {
        "guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    },
    "recursive tree": {
        "guided_json": {
            "type": "object",
            "properties": {name: {"$ref": "#"} for name in "abcdefgh"},
            "additionalProperties": False,
        }
    },
    "reference to a host": {"guided_json": {"$ref": "http://127.0.0.1:1/schema"}},
    "reference to a file": {"guided_json": {"$ref": "file:///etc/passwd"}},
    "long enum": {"guided_json": {"enum": ["x" * 60_000]}},
    "enum of 6,000": {"guided_json": {"enum": [f"{i:05}" for i in range(6000)]}},
    "deep enum": {"guided_json": {"enum": [[[[[[1]]]]]] * 1000}},
    "4,000 properties": {
        "guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}
    },
    "600 of 990 properties": {"guided_json": _MANY_NAMES},
    "5,000 types": {"guided_json": {"type": ["string"] * 5000}},
    "overlapping names": {
        "guided_json": {
            "type": "object",
            "patternProperties": {f"^{'a?' * i}$": {} for i in range(99)},
        }
    },
    "256 formats": {"guided_json": {"anyOf": [{"type": "string", "format": "date-time"}] * 256}},
    "optional letters": {"guided_regex": "a?" * 1500 + "a" * 1000},
    "power of automata": {"guided_regex": "(a|b)*a(a|b){200}c"},
    "million letters": {"guided_regex": "(a{1000}){1000}"},
    "no letter at all": {"guided_regex": r"[^\x00-\x{10FFFF}]"},
    "open groups": {"guided_regex": "(" * 4000},
    "letters of the world": {"guided_regex": r"\p{L}{1,900}" * 4},
    "left recursion": {"guided_grammar": "start: start"},
    "doubling rules": {"guided_grammar": _DOUBLING},
    "chain of 991 rules": {"guided_grammar": _CHAIN},
    "2,000 rules": {"guided_grammar": _TOO_MANY},
    "long word": {"guided_grammar": "start: " + "a" * 16_000},
    "3,000 groups": {"guided_grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
    "million repeats": {"guided_grammar": "start: " + '"a"~1000000'},
    "forced text without end": {"guided_grammar": 'start: /a+/ x\nx: ""'},
    "ambiguous sums": {"guided_grammar": 'start: s\ns: s s | s s s | "a"'},
    "900 ambiguous rules": {"guided_grammar": ambiguous(900).source},
    "300 ambiguous rules": {"guided_grammar": ambiguous(300).source},
    "GBNF of open groups": {"guided_grammar": "root ::= " + "(" * 30_000},
    "GBNF of both sides": {"guided_grammar": 'root ::= "a" root | root "b" root'},
    "1,000 choices": {"guided_choice": [f"{'x' * 50}{i}" for i in range(1000)]},
}


def salted(fields: Mapping[str, object], salt: str) -> dict[str, object]:
    """Returns the constraint with an alternative of its own, so that no cache knows it."""
    ((name, value),) = fields.items()
    if name == "guided_json":
        assert isinstance(value, dict)
        refers = "$ref" in json.dumps(value)
        mark: dict[str, object] = {"const": f"salt {salt}"}
        made: object = (
            {**value, "$defs": {**value.get("$defs", {}), f"salt {salt}": mark}}
            if refers
            else {"anyOf": [value, mark]}
        )
    elif name == "guided_choice":
        assert isinstance(value, list)
        made = [*value[1:], f"salt {salt}"]
    elif name == "guided_regex":
        made = f"{value}|salt {salt}"
    else:
        made = f"{value}\n# salt {salt}" if "::=" in str(value) else f"{value}\n// salt {salt}"
    return {name: made}
