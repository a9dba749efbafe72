"""Docstrings are sentences about the code below them: a verb in the third person, or a noun with
its article, comes first. A fragment ("Of the others.") makes its reader look for the noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("serve_app", "engine", "lora", "kernels", "registry", "notebooks", "tests")
FRAGMENT = re.compile(
    r"(Of|To|By|In|From|With|Without|At|On|As|Until|Before|After|Where|Who|Whose|What|Whoever|How|"
    r"When|Why|Whether|Which|Between|Beside|Above|Below|Since|Among|Over|Through|If|That|Those|"
    r"Else|Apart|Also|Only|None)\b"
)
# "In a thread, the engine runs ..." is a sentence: a clause, then a subject.
SENTENCE = re.compile(r"[^.:;]*, (?:it|the|a|an|each|every|this|they|all|no) [\w`'-]+ ")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, words) of each docstring."""
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (words := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), " ".join(words.split())


def is_fragment(words: str) -> bool:
    first = re.split(r"(?<=[.:;]) ", words, maxsplit=1)[0]
    return FRAGMENT.match(first) is not None and SENTENCE.match(first) is None


def fragments(folder: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {words[:60]}"
        for path in sorted((ROOT / folder).glob("*.py"))
        for line, words in docstrings(ast.parse(path.read_text()))
        if is_fragment(words)
    ]


def folders() -> list[str]:
    found = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    return sorted(str(folder.relative_to(ROOT)) for folder in found)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Of the others.", True),
        ("To the replicas of one base.", True),
        ("What an engine is told at its start.", True),
        ("Whether it may.", True),
        ("None: there is none.", True),
        ("Returns the others.", False),
        ("The replicas of one base.", False),
        ("If the queue is full, the request is refused.", False),
        ("Onward messages.", False),
    ],
)
def test_a_fragment_is_recognised(words: str, expected: bool) -> None:
    assert is_fragment(words) is expected


@pytest.mark.parametrize("folder", folders())
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    assert not fragments(folder)
