"""The reading of hostile grammars costs no more than their length, and limits are named as such."""

from __future__ import annotations

import re

import numpy as np
import pytest

from engine import grammars as grammars_module
from engine.errors import EXCEEDED_GRAMMAR, InvalidRequestError
from engine.grammar_state import GrammarState, fill_masks
from engine.grammars import check_grammar
from engine.types import Grammar
from tests.expression_steps import steps
from tests.fakes import make_request
from tests.grammar_helpers import (
    VOCAB,
    DeferringRunner,
    ambiguous,
    grammars,
    make_grammar_engine,
    run,
    schema_grammar,
    tokenizer,
)

EXPRESSIONS = {
    name: value for name, value in vars(grammars_module).items() if isinstance(value, re.Pattern)
}
UNITS = (
    *("a", "a[", "[", "]", " ", "a ", "a  : ", "a.1", "1", "-1", "-1.", "-1e", "-", ":", "\\u0061"),
    *('"', '"format"', '"format" ', '"$ref" ', '"multipleOf"', '"multipleOf":', '"multipleOf":1'),
)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_steps_of_a_search_grow_with_the_text_alone(name: str) -> None:
    for unit in UNITS:
        for first, last in (("", ""), ("a", ""), ('"multipleOf"', "x"), ("-1", ":")):
            one, four = (
                steps(EXPRESSIONS[name], first + unit * count + last) for count in (50, 200)
            )
            assert four <= 5 * one, (unit, first, one, four)


def test_an_expression_that_begins_anew_in_each_word_takes_quadratic_steps() -> None:
    """The measure sees what it is for."""
    expression = re.compile(r"[a-z]\w*:")
    assert steps(expression, "a" * 200) > 12 * steps(expression, "a" * 50)


@pytest.mark.parametrize("head", ["r{}: ", "r{}[capture]: ", "r{} : ", "r{}[\n]: ", "R{}.1: "])
def test_rules_are_counted_however_their_heads_are_written(head: str) -> None:
    source = "start: r0\n" + "\n".join(head.format(i) + '"a"' for i in range(1100))
    with pytest.raises(InvalidRequestError, match="1101 rules or references, 1000 are allowed"):
        check_grammar(Grammar("lark", source))


def test_names_of_a_schema_within_lark_are_no_rules() -> None:
    names = ", ".join(f'"name {i}": {{"type": "null"}}' for i in range(1100))
    check_grammar(Grammar("lark", 'start: %json { "properties": {' + names + "} }"))


def test_a_limit_that_an_answer_exceeds_is_told_from_a_fault_of_ours() -> None:
    engine = make_grammar_engine(DeferringRunner())
    request = make_request("a", grammar=ambiguous(900), max_tokens=200, ignore_eos=False)
    *before, last = run(engine, [request])["a", 0]
    assert before, "the answer had begun"
    assert last.finish_reason == "error"
    assert last.error is not None
    assert last.error.startswith(EXCEEDED_GRAMMAR)
    assert re.search(r"Current row has \d+ items; max is 2000", last.error), last.error


def test_a_limit_that_the_output_of_an_earlier_engine_exceeds_is_the_requests_too() -> None:
    found = grammars()
    for grammar, output, words in (
        (ambiguous(900), "xyzxyz", f"{EXCEEDED_GRAMMAR}Parser Error: Current row has "),
        (ambiguous(300), "xyzabc", "the output so far is not of the grammar; "),
    ):
        opened = found.open(grammar, tokenizer().encode(output).ids)
        assert str(opened.exception()).startswith(words)


def test_a_limit_that_a_mask_exceeds_is_told_with_the_next_token() -> None:
    state = GrammarState(None)
    state.open(grammars().open(ambiguous(300), ()).result())
    masks = np.zeros((1, (VOCAB + 31) // 32), dtype=np.int32)
    for token_id in tokenizer().encode("xyzxyz" + "a" * 60).ids:
        fill_masks([state], masks)
        if error := state.advance(token_id):
            break
    assert str(error).startswith(f"{EXCEEDED_GRAMMAR}parser error: Too many items (limit 10000")


def test_a_token_that_is_not_of_the_grammar_is_no_limit() -> None:
    state = GrammarState(None)
    state.open(grammars().open(schema_grammar({"enum": ["one", "other"]}), ()).result())
    assert str(state.advance(77)).startswith("the grammar cannot be followed: ")
