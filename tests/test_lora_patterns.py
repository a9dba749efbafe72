"""Expressions of an adapter match what `re` says, in a time that the name's length bounds."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora.errors import AdapterError
from lora.pattern_nodes import Name
from lora.patterns import Limits, NameList, PatternTable, compile_pattern
from tests.benchmarks.fuzz_configs import EVIL_PATTERNS

MODULE = "model.layers.11.self_attn.q_proj"

atoms = st.sampled_from(
    ["a", "b", ".", r"\.", r"\w", r"\d", "[ab]", "[^a]", "[a-c.]", "[]a]", "^", "$", r"\b", r"\B"]
)
quantifiers = st.sampled_from(
    ["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{,2}", "{0}"]
)


def quantified(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, quantifiers).map("".join)


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3)
    opening = st.sampled_from(["(", "(?:", "(?=", "(?!"])
    group = st.tuples(opening, several.map("|".join)).map(lambda pair: f"{pair[0]}{pair[1]})")
    return st.one_of(several.map("".join), quantified(group))


patterns = st.recursive(quantified(atoms), larger, max_leaves=8)
names = st.text("ab.1", min_size=1, max_size=7)


@settings(max_examples=600, deadline=None)
@given(patterns, names)
@example(r".*\.(q|v)_proj", MODULE)
def test_matching_is_that_of_re(pattern: str, name: str) -> None:
    try:
        expected = re.compile(pattern)
    except re.error:
        with pytest.raises(AdapterError, match="is not a regular expression"):
            compile_pattern(pattern, "target_modules", Limits())
        return
    ours = compile_pattern(pattern, "target_modules", Limits())
    assert ours.matches(name) == (expected.fullmatch(name) is not None)
    at_end = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert ours.matches_end(Name(name)) == at_end


@given(st.lists(st.text("ab.q_", min_size=1, max_size=4), max_size=4), st.text("ab.q_", max_size=8))
def test_the_first_key_that_matches_the_end_is_taken_as_peft_does(
    keys: list[str], module: str
) -> None:
    table = PatternTable({key: i for i, key in enumerate(keys)}, "rank_pattern", Limits())
    order = {key: i for i, key in enumerate(keys)}
    hits = [i for key, i in order.items() if re.match(rf"(.*\.)?({key})$", module)]
    assert table.find(module, -1) == (hits[0] if hits else -1)


def test_lists_name_whole_modules_or_their_ends() -> None:
    assert NameList(frozenset({"q_proj"})).matches(MODULE)
    assert NameList(frozenset({"self_attn.q_proj"})).matches(MODULE)
    assert NameList(frozenset({MODULE})).matches(MODULE)
    assert not NameList(frozenset({"proj", "attn.q_proj", "model"})).matches(MODULE)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
        r"^(?!.*(?:visual|vision)).*(?:q_proj|v_proj).*",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
        r"model\.layers\.(?P<layer>1[0-9]|2[0-3])\.self_attn\.[qv]_proj",
    ],
)
def test_expressions_that_trainers_write_are_served(pattern: str) -> None:
    assert compile_pattern(pattern, "target_modules", Limits()).matches(MODULE)


@pytest.mark.parametrize("pattern", EVIL_PATTERNS, ids=lambda pattern: ascii(pattern[:20]))
def test_evil_expressions_are_refused_or_answered(pattern: str) -> None:
    """With `re` most of these take years."""
    with suppress(AdapterError):
        ours = compile_pattern(pattern, "target_modules", Limits())
        assert ours.matches("!" + MODULE + "!") == (pattern == ".*" * 2000)


def test_the_work_of_all_expressions_together_is_bounded() -> None:
    pattern = "."
    for _ in range(8):
        pattern = f"(?:.(?={pattern}))*"
    ours = compile_pattern(pattern, "target_modules", Limits())
    with pytest.raises(AdapterError, match="take too long to match"):
        ours.matches(MODULE)
