"""Grammars written in other ways, as Lark grammars of llguidance, and expressions that it would
misread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.types import Grammar

# The translator reads all rules again for each rule of a chain: 0.5 s, with the GIL, at most.
_MAX_EBNF_COST = 4_000_000  # rules times characters


_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'  # the last of several declarations counts


def lark_of_choices(choices: Sequence[str]) -> str:
    """Returns the grammar of one of several texts. Lark's strings have the escapes of JSON."""
    return "start: " + " | ".join(json.dumps(one) for one in choices)


def without_forcing(source: str) -> str:
    """Returns a Lark grammar of a client whose text is never forced. The library looks for forced
    text without a limit: in `/a+/ x`, where `x` has no text, each further `a` is the only choice,
    and the search within a step never ended. Raises ValueError for one that sets this itself."""
    if "no_forcing" in source:
        raise ValueError("no_forcing is set by the server")
    return source + _NO_FORCING


def ends_in_escape(pattern: str) -> bool:
    """Returns True for an expression that ends in a backslash which escapes nothing: the library
    would leave it out and follow another expression."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def as_lark(grammar: Grammar) -> Grammar:
    """Returns a grammar in llama.cpp's GBNF, whose rules are `name ::= ...`, as a Lark grammar.
    24 ms for 14 KB, with the GIL. Raises ValueError if it is none."""
    source = grammar.source
    if source.count("::=") * len(source) > _MAX_EBNF_COST:
        raise ValueError(
            f"{source.count('::=')} rules in {len(source)} characters are too many in GBNF; "
            "Lark is read faster"
        )
    try:
        lark: str = gbnf_to_lark(source)
    # Its parser reads past the end of some texts that are no grammar, and raises a bare Exception
    # for a rule that is missing.
    except Exception as error:
        raise ValueError(f"not a grammar in GBNF: {str(error)[:200]}") from None
    return replace(grammar, kind="lark", source=without_forcing(lark))
