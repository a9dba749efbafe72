"""The grammars of `soak`, and the faults of an answer: by expressions, not by their library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import regex
from tokenizers import Tokenizer

from engine.grammar_sources import lark_of_choices
from engine.types import Grammar

_WORDS = ("red", "green", "a choice of several words", "7")
_SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"type": "string", "pattern": "^[a-d]{1,4}$"}},
        "is_new": {"type": "boolean"},
    },
    "required": ["kind", "count", "names", "is_new"],
    "additionalProperties": False,
}
_NAME = '"[a-d]{1,4}"'
# Each grammar with an expression of the same texts, which tells beginnings, too.
EXPRESSIONS: dict[Grammar, str] = {
    Grammar("regex", "([a-d]{1,3}-){2,6}[0-9]{2}"): "([a-d]{1,3}-){2,6}[0-9]{2}",
    Grammar("lark", lark_of_choices(_WORDS)): "|".join(_WORDS),
    Grammar("json_schema", json.dumps(_SCHEMA)): (
        r'\{"kind": "(small|large)", "count": (0|[1-9][0-9]?), '
        rf'"names": \[({_NAME}(, {_NAME})*)?\], "is_new": (true|false)\}}'
    ),
}


class AnswerTexts:
    """The texts of answers, by the tokenizer of the base's folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def problem(self, grammar: Grammar, token_ids: Sequence[int], *, is_whole: bool) -> str | None:
        """Returns what is wrong with an answer of the grammar, or with the beginning of one."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        if _expression(grammar).fullmatch(text, partial=not is_whole) is None:
            return f"{text!r} is no {'answer' if is_whole else 'beginning'} of its grammar"
        return None


@cache
def _expression(grammar: Grammar) -> regex.Pattern[str]:
    return regex.compile(EXPRESSIONS[grammar])
