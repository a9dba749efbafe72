"""Python's syntax of regular expressions, as much as names of modules need, into nodes.

Taken: ASCII literals, `.`, classes, `\\d \\w \\s` and their opposites, escaped punctuation, groups,
`|`, `* + ? {m,n}` greedy or lazy, `^ $ \\A \\Z \\b \\B`, lookahead. Everything else is refused by
name: what cannot be matched in bounded time, and what names of modules never contain.
"""

from __future__ import annotations

import re

from lora.pattern_nodes import (
    Anchor,
    Atom,
    Either,
    Literal,
    Lookahead,
    Node,
    Repeat,
    Sequence,
)

_MAX_DEPTH = 40  # of groups in groups
_MAX_COUNT = 1000  # of {m,n}
_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.ASCII)
_COUNTS = re.compile(r"\{(?P<low>[0-9]*)(?P<comma>,?)(?P<high>[0-9]*)\}", re.ASCII)
_GROUP_NAME = re.compile(r"\(\?P<(?P<name>[A-Za-z_][A-Za-z0-9_]*)>", re.ASCII)
_CATEGORIES = "dDwWsS"
_ANCHORS = "AZbB"


class PatternSyntaxError(ValueError):
    pass


def parse_pattern(text: str) -> Node:
    """Raises PatternSyntaxError."""
    if not text.isascii() or not text.isprintable():
        raise PatternSyntaxError("it has characters that no name has")
    parser = _Parser(text)
    node = parser.alternatives(0)
    if parser.place < len(text):
        raise PatternSyntaxError("a ) without its (")
    return node


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self.place = 0
        self._groups: set[str] = set()

    def alternatives(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise PatternSyntaxError(f"groups are nested more than {_MAX_DEPTH} deep")
        nodes = [self._sequence(depth)]
        while self._takes("|"):
            nodes.append(self._sequence(depth))
        return nodes[0] if len(nodes) == 1 else Either(tuple(nodes))

    def _sequence(self, depth: int) -> Node:
        nodes: list[Node] = []
        while self.place < len(self._text) and self._text[self.place] not in "|)":
            node = self._quantified(self._item(depth))
            if isinstance(node, Literal) and nodes and isinstance(nodes[-1], Literal):
                nodes[-1] = Literal(nodes[-1].text + node.text)
            else:
                nodes.append(node)
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _item(self, depth: int) -> Node:
        character = self._text[self.place]
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character in "*+?" or self._counts() is not None:
            raise PatternSyntaxError("there is nothing to repeat")
        self.place += 1
        if character == ".":
            return Atom(".")
        return Anchor(character) if character in "^$" else Literal(character)

    def _group(self, depth: int) -> Node:
        named = _GROUP_NAME.match(self._text, self.place)
        is_negative = self._takes("(?!")
        is_lookahead = is_negative or self._takes("(?=")
        if named is not None:
            if named["name"] in self._groups:
                raise PatternSyntaxError("two groups have one name")
            self._groups.add(named["name"])
            self.place = named.end()
        elif not is_lookahead and not self._takes("(?:"):
            self.place += 1
            if self._takes("?"):
                raise PatternSyntaxError("(? of a kind that is not supported")
        node = self.alternatives(depth + 1)
        if not self._takes(")"):
            raise PatternSyntaxError("a ( without its )")
        # A group is no literal of the sequence around it: a quantifier takes it whole.
        return Lookahead(node, is_negative) if is_lookahead else Sequence((node,))

    def _class(self) -> Node:
        match = _CLASS.match(self._text, self.place)
        if match is None:
            raise PatternSyntaxError("a [ without its ]")
        text = match.group()
        for escaped in re.findall(r"\\(.)", text):
            if escaped.isalnum() and escaped not in _CATEGORIES:
                raise PatternSyntaxError(f"\\{escaped} is not supported")
        if re.search(r"\[\[|[^\[]\[|--|&&|~~|\|\|", text):
            raise PatternSyntaxError("sets in sets are not supported")
        try:
            re.compile(text)
        except re.error:
            raise PatternSyntaxError("a class that is none") from None
        self.place = match.end()
        return Atom(text)

    def _escape(self) -> Node:
        escaped = self._text[self.place + 1 : self.place + 2]
        self.place += 2
        if escaped in _CATEGORIES and escaped:
            return Atom(f"\\{escaped}")
        if escaped in _ANCHORS and escaped:
            return Anchor(f"\\{escaped}")
        if not escaped or escaped.isalnum():
            raise PatternSyntaxError(f"\\{escaped} is not supported")
        return Literal(escaped)

    def _quantified(self, node: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return node
        if isinstance(node, Anchor):
            raise PatternSyntaxError("there is nothing to repeat")
        least, most, end = counts
        self.place = end
        if self._takes("+"):
            raise PatternSyntaxError("possessive repeats are not supported")
        self._takes("?")  # lazy or greedy: whether it matches is the same
        if self._counts() is not None:
            raise PatternSyntaxError("a repeat of a repeat")
        if max(least, most or 0) > _MAX_COUNT or (most is not None and most < least):
            raise PatternSyntaxError(f"counts must rise and be at most {_MAX_COUNT}")
        return Repeat(node, least, most)

    def _counts(self) -> tuple[int, int | None, int] | None:
        """Of a quantifier that begins here, and where it ends."""
        here = self._text[self.place : self.place + 1]
        if here in ("*", "+", "?") and here:
            return int(here == "+"), 1 if here == "?" else None, self.place + 1
        match = _COUNTS.match(self._text, self.place)
        if match is None or match.group() == "{}":
            return None  # a brace like any other character
        low = int(match["low"] or 0)
        high = match["high"] if match["comma"] else match["low"]
        return low, int(high) if high else None, match.end()

    def _takes(self, text: str) -> bool:
        if self._text.startswith(text, self.place):
            self.place += len(text)
            return True
        return False
