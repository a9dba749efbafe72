"""A streaming parser of response templates: text in, pieces of a message's fields out.

A pure state machine. Its result depends on the text alone, not on its division into chunks. A
delimiter that may still be completed holds the text back from its beginning. A region whose text
is not in its format, or a search that exceeds its time, yields text, never an error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from serve_app.text.cut_calls import cut_calls
from serve_app.text.response_template import (
    MATCH_SECONDS,
    REASONING_FIELDS,
    Delimiter,
    Region,
    ResponseTemplate,
)

logger = logging.getLogger(__name__)

_KEPT_CHARS = 256  # of the text before a search, for look-behinds
_MAX_REGION_CHARS = 1 << 22
# Name, arguments, own id. The arguments of a call that is cut are the beginning of their JSON.
Call: TypeAlias = tuple[str, dict[str, Any] | str, str | None]

_BAD_FORMAT = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(slots=True)
class Piece:
    """The next text or the next calls of an answer, in their order."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class RegionParser:
    def __init__(
        self,
        template: ResponseTemplate,
        turn_start: str = "",
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        is_constrained: bool = False,
    ) -> None:
        """`turn_start` is the part of the answer in the prompt, see `ResponseTemplate.turn_start`;
        it is not part of the result. `schemas` maps the names of tools to their parameters. If
        `is_constrained`, a grammar constrains the content: no region follows its beginning."""
        self._template = template
        self._schemas = schemas or {}
        self._buffer = ""
        self._position = 0  # of the first character that no region has
        self._region: Region | None = template.implicit
        self._captures: dict[str, str] = {}
        self._opening = ""  # the delimiter that opened the region
        self._body: list[str] = []  # of a region that is no text
        self._num_body = 0
        self._is_opened = False
        self._is_fresh = False  # the region follows another: leading space is no part of it
        self._held_space = ""  # at the end of a reasoning so far
        self._is_broken = False
        self._is_constrained = is_constrained
        self._has_content = False
        self._is_cut = False
        if turn_start:
            self.push(turn_start)
            self._held_space = ""

    @property
    def is_reasoning(self) -> bool:
        """Returns True if the text at this place is reasoning."""
        region = self._region
        return region is not None and region.name in REASONING_FIELDS

    def push(self, text: str) -> list[Piece]:
        return self._advance(text, is_end=False)

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Returns the rest, which was held back. Call once, at the end. `is_cut`: the limit of
        tokens ended the text, which may be inside a call."""
        self._is_cut = is_cut
        return self._advance("", is_end=True)

    def _advance(self, text: str, *, is_end: bool) -> list[Piece]:
        if self._is_broken:
            return [Piece(content=text)] if text else []
        self._buffer += text
        pieces: list[Piece] = []
        try:
            while self._step(pieces, is_end):
                pass
        except TimeoutError:
            logger.warning(
                "a response template (%s) needs too long: the rest is text", self._template.name
            )
            self._is_broken = True
            rest = "".join((self._opening, *self._body, self._buffer[self._position :]))
            pieces.append(Piece(content=rest))
        if self._position > 16 * _KEPT_CHARS:
            self._buffer = self._buffer[self._position - _KEPT_CHARS :]
            self._position = _KEPT_CHARS
        return pieces

    def _step(self, pieces: list[Piece], is_end: bool) -> bool:
        """Handles the text up to the next delimiter. Returns False if there is none."""
        found, held_from = self._find(is_end)
        if found is None:
            end = len(self._buffer) if is_end else held_from
            self._take(pieces, end)
            if is_end:
                self._close(pieces, "")
            return False
        region, match = found
        self._take(pieces, match.start())
        self._position = match.end()
        was_opened = self._is_opened
        self._close(pieces, match[0])
        if region is None:
            return was_opened or match.start() != match.end()
        self._region, self._is_opened = region, True
        self._opening = match[0]
        self._captures = {key: one for key, one in match.groupdict().items() if one is not None}
        return True

    def _find(self, is_end: bool) -> tuple[tuple[Region | None, Any] | None, int]:
        """Returns the first delimiter that is certain, with the region that it opens (None if it
        closes one), and the place from which text must be held back."""
        best: tuple[Region | None, Any] | None = None
        best_key: tuple[int, int, bool, str] | None = None
        held_from = len(self._buffer)
        for name, delimiter, opened in self._watched():
            match = self._search(delimiter, is_end)
            if match is None:
                continue
            if not is_end and (match.partial or self._can_grow(delimiter, match)):
                held_from = min(held_from, match.start())
                continue
            key = (match.start(), match.start() - match.end(), opened is None, name)
            if best_key is None or key < best_key:
                best_key, best = key, (opened, match)
        if best is not None and not is_end and best[1].start() >= held_from:
            best = None
        if self._is_constrained and self._region is self._template.implicit:
            before = self._buffer[self._position : held_from if best is None else best[1].start()]
            if self._has_content or before.strip():
                return None, len(self._buffer)
        return best, held_from

    def _search(self, delimiter: Delimiter, is_end: bool) -> Any:
        """Returns the first match, which may be partial. A partial search costs 4 us a character,
        so only the tail is searched for the beginning of a delimiter; a time limit costs 3 us."""
        search, start = delimiter.pattern.search, self._position
        num_chars = len(self._buffer) - start
        if num_chars <= _KEPT_CHARS and self._template.is_packaged:
            return search(self._buffer, start, partial=not is_end)
        if num_chars > _KEPT_CHARS or is_end:
            match = search(self._buffer, start, timeout=MATCH_SECONDS)
            if match is not None or is_end:
                return match
            start += num_chars - _KEPT_CHARS
        return search(self._buffer, start, partial=True, timeout=MATCH_SECONDS)

    def _watched(self) -> list[tuple[str, Delimiter, Region | None]]:
        region, implicit = self._region, self._template.implicit
        if region is not None and region is not implicit:
            return [] if region.close is None else [(region.name, region.close, None)]
        watched: list[tuple[str, Delimiter, Region | None]] = [
            (one.name, one.open, one) for one in self._template.regions if one.open is not None
        ]
        if implicit is not None and implicit.close is not None:
            watched.append((implicit.name, implicit.close, None))
        return watched

    def _can_grow(self, delimiter: Delimiter, match: Any) -> bool:
        if match.end() != len(self._buffer):
            return False
        return match.start() == match.end() or not delimiter.is_final

    def _take(self, pieces: list[Piece], end: int) -> None:
        """Gives the text up to `end` to the region."""
        text = self._buffer[self._position : end]
        self._position = end
        region = self._region
        if not text or region is None:
            return
        self._is_opened = True
        if region.name in REASONING_FIELDS and region.is_text:
            self._take_reasoning(pieces, text)
        elif region is self._template.implicit:
            if self._is_fresh:
                text = text.lstrip()
                self._is_fresh = not text
            self._has_content = self._has_content or bool(text.strip())
            if text:
                pieces.append(Piece(content=text))
        else:
            self._body.append(text)
            self._num_body += len(text)
            if self._num_body > _MAX_REGION_CHARS:
                raise TimeoutError

    def _take_reasoning(self, pieces: list[Piece], text: str) -> None:
        if not self._body:
            text = text.lstrip()
            if not text:
                return
            self._body.append("")  # it has begun
        text = self._held_space + text
        shown = text.rstrip()
        self._held_space = text[len(shown) :]
        if shown:
            pieces.append(Piece(reasoning=shown))

    def _close(self, pieces: list[Piece], closing: str) -> None:
        region, implicit = self._region, self._template.implicit
        if region is not None and region is not implicit:
            if region.name == "tool_calls":
                self._close_calls(pieces, region, closing)
            elif region.name == "content":
                pieces.append(Piece(content="".join(self._body)))
            self._is_fresh = True
        self._region, self._is_opened = implicit, False
        self._opening = self._held_space = ""
        self._body, self._num_body, self._captures = [], 0, {}

    def _close_calls(self, pieces: list[Piece], region: Region, closing: str) -> None:
        body = "".join(self._body)
        # JSON shows by itself that it is complete; an answer cut in another format would become a
        # call without some of its arguments.
        is_cut = not closing and region.close is not None and region.content != "json"
        try:
            if is_cut:
                raise ValueError
            value = region.value(body, self._captures)
            calls = tuple(map(self._call, value if isinstance(value, list) else [value]))
        except _BAD_FORMAT:
            calls = self._cut_calls(region, body, closing)
        if calls:
            pieces.append(Piece(calls=calls))
        else:
            pieces.append(Piece(content=self._opening + body + closing))

    def _cut_calls(self, region: Region, body: str, closing: str) -> tuple[Call, ...]:
        """Returns the calls of a region without its end. An expression may find its delimiter at
        the end of any text."""
        is_closed = bool(closing) and region.close is not None and region.close.literal is not None
        if not self._is_cut or is_closed or self._position < len(self._buffer):
            return ()
        if not body and self._opening.endswith(self._captures.get("name", " ")):
            return ()  # the name may go on
        calls: list[Call] = []
        try:
            for one in cut_calls(region, body + closing, self._captures):
                name, arguments, own_id = self._call(one.value)
                if not one.is_whole:
                    arguments = one.arguments or json.dumps(arguments, ensure_ascii=False)[:-1]
                calls.append((name, arguments, own_id))
        except _BAD_FORMAT:
            return ()
        return tuple(calls)

    def _call(self, value: Any) -> Call:
        function = value["function"]
        name, arguments, own_id = function["name"], function.get("arguments"), value.get("id")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise TypeError("not a call")
        properties = self._schemas.get(name, {}).get("properties")
        if arguments and isinstance(properties, dict):
            arguments = {key: _cast(one, properties.get(key)) for key, one in arguments.items()}
        # ValueError: Python reads NaN, which is not JSON.
        text = json.dumps([name, arguments, own_id], ensure_ascii=False, allow_nan=False)
        if not text.isascii():
            name, arguments, own_id = json.loads(_encodable(text))
        return name, arguments or {}, own_id if isinstance(own_id, str) else None


def _encodable(text: str) -> str:
    """Replaces lone surrogates: JSON can escape one, and no body of a response can hold it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _cast(value: Any, schema: Any) -> Any:
    """Returns a text as the value that the tool's schema expects, or unchanged."""
    if isinstance(value, list) and "array" not in _types(schema):
        return [_cast(item, schema) for item in value]
    if not isinstance(value, str):
        return value
    for kind in _types(schema):
        try:
            return _cast_to(value, kind)
        except ValueError:
            continue
    return value


def _types(schema: Any) -> Sequence[str]:
    if not isinstance(schema, dict):
        return ()
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared or ())
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types.extend(_types(choice))
    if schema.get("nullable"):
        types.append("null")
    return types


def _cast_to(text: str, kind: str) -> Any:
    """Raises ValueError if the text is no value of this JSON type."""
    stripped = text.strip()
    if kind == "integer" or kind == "number":
        number = float(stripped)
        if number - number != 0:  # infinite, or not a number
            raise ValueError
        if kind == "integer" and not number.is_integer():
            raise ValueError
        if kind == "integer" or (number.is_integer() and "." not in stripped):
            return int(stripped) if stripped.lstrip("+-").isdigit() else int(number)
        return number
    if kind == "boolean" and stripped.lower() in ("true", "1", "false", "0"):
        return stripped.lower() in ("true", "1")
    if kind == "null" and stripped in ("null", "None"):
        return None
    if kind in ("object", "array"):
        value = json.loads(text)
        if isinstance(value, dict if kind == "object" else list):
            return value
    raise ValueError
