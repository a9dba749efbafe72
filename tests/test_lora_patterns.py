"""Expressions of an adapter match as `re` matches them, and within a deadline."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora.errors import AdapterError
from lora.patterns import AT_END, Limits, NameList, PatternTable, compile_pattern
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
    assert compile_pattern(pattern, "rank_pattern", Limits(), AT_END).matches(name) == at_end


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
    """Most of these would occupy `re` for years."""
    with suppress(AdapterError):
        ours = compile_pattern(pattern, "target_modules", Limits())
        assert ours.matches("!" + MODULE + "!") == (pattern == ".*" * 2000)


def test_the_time_of_all_expressions_together_is_bounded() -> None:
    limits = Limits(seconds=0.2)
    slow = compile_pattern("(?:(?:(.)|(..)|(...))+?)+?(?<=!)", "target_modules", limits)
    fast = compile_pattern("a", "exclude_modules", limits)
    assert fast.matches("a")
    began = time.process_time()
    with pytest.raises(AdapterError, match="take too long to match"):
        slow.matches("ab" * 20)
    assert time.process_time() - began < 2.0
    with pytest.raises(AdapterError, match="take too long to match"):
        fast.matches("a")


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:(?:(?:a{1000}){1000}){1000}){1000}",
        "(?:|a){60000}(?:|b){60000}",
        "(?=(?:.?){1000})" * 200,
        "(?i)" + r"[\x00-\U0010ffff]" * 150,
        "a{9999999999}",
        "(?:" * 300 + "a" + "|b)" * 300,
    ],
    ids=lambda pattern: ascii(pattern[:20]),
)
def test_expressions_that_are_slow_to_compile_are_refused(pattern: str) -> None:
    with pytest.raises(AdapterError, match=r"too many|is not a regular expression"):
        compile_pattern(pattern, "target_modules", Limits())


@pytest.mark.parametrize("pattern", ["a{e}", "(?:ab){e<=1}", "a{i<=2}b", "[[:alpha:]]", "[a[b]]"])
def test_expressions_that_re_and_regex_read_differently_are_refused(pattern: str) -> None:
    with pytest.raises(AdapterError, match="is not a regular expression"):
        compile_pattern(pattern, "target_modules", Limits())


@pytest.mark.parametrize("pattern", [r"(?:(\w)x?)\1", "(?<=a)b", "(?P<n>a)(?(n)b|c)", "(?>ab|a)b"])
def test_what_re_compiles_matches_as_re_does(pattern: str) -> None:
    ours = compile_pattern(pattern, "target_modules", Limits())
    for name in ("aa", "ab", "b", "abb", "axa"):
        assert ours.matches(name) == (re.fullmatch(pattern, name) is not None)
