"""Grammars with a dead end: texts that they allow to begin and that nothing can continue."""

from __future__ import annotations

import json

import pytest

from engine.errors import ENDLESS_GRAMMAR
from engine.types import Grammar
from tests.fakes import make_request
from tests.grammar_helpers import DeferringRunner, make_grammar_engine, run

_ITSELF = {"$ref": "#/$defs/x"}
_SCHEMA = {
    "type": "object",
    "properties": {"a": _ITSELF},
    "required": ["a"],
    "$defs": {"x": {"anyOf": [_ITSELF, _ITSELF]}},
}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", json.dumps(_SCHEMA)),
        Grammar("lark", 'start: "ab" x\nx: x "a"'),
        Grammar("lark", r'start: "ab" /[^\s\S]/'),
    ],
    ids=["schema of itself", "rule of itself", "expression of no text"],
)
def test_a_dead_end_is_a_fault_of_the_request(grammar: Grammar) -> None:
    bad = make_request("a", grammar=grammar, max_tokens=20, ignore_eos=False)
    outputs = run(make_grammar_engine(DeferringRunner()), [bad, make_request("b")])
    last = outputs["a", 0][-1]
    assert last.finish_reason == "error"
    assert last.error == f"{ENDLESS_GRAMMAR}no token may follow"
    assert outputs["b", 0][-1].finish_reason == "length"
