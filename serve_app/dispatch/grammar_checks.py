"""Grammars of requests are checked in threads before the requests wait for an engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace

from engine.errors import InvalidRequestError
from engine.grammars import check_grammar, deep_threads
from engine.types import Grammar
from serve_app.errors import OverloadedError
from serve_app.openai.json_schemas import place_of_keyword
from serve_app.routing.lru import LruDict

_REFUSED_KEYWORD = re.compile(r'Unimplemented keys: \["([^"]+)"')
_NUM_THREADS = 2
_MAX_WAITING = 256  # checks: 2 MB of sources, and seconds if each of them is hostile
_MAX_RESULTS = 4096  # 32 bytes and, for a refused grammar, its reason
_MAX_TRANSLATIONS = 64  # of at most 64 KiB


class GrammarChecks:
    """The checks of an ingress replica. A check lasts a millisecond, for a hostile grammar some
    hundred, mostly without the interpreter's lock; the engine compiles the grammar again, with its
    tokenizer."""

    def __init__(self) -> None:
        self._threads = deep_threads(_NUM_THREADS, "grammar-check")
        self._results: LruDict[bytes, str] = LruDict(_MAX_RESULTS)  # the reasons of refusals
        self._translations: LruDict[bytes, str] = LruDict(_MAX_TRANSLATIONS)  # in Lark
        self._num_waiting = 0

    async def check(self, grammar: Grammar, field: str | None) -> Grammar:
        """Returns the grammar for the engine: GBNF is translated into Lark. Raises
        InvalidRequestError if it is refused; `field` is the field of the body that holds it."""
        key = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode(errors="replace")).digest()
        if (translation := self._translations.get(key)) is not None:
            return replace(grammar, kind="lark", source=translation)
        reason = self._results.get(key)
        if reason is None or (not reason and grammar.kind == "gbnf"):
            result = await self._run(grammar)
            reason = result if isinstance(result, str) else ""
            self._results.put(key, reason)
            if isinstance(result, Grammar) and result is not grammar:
                self._translations.put(key, result.source)
                return result
        if reason:
            raise InvalidRequestError(f"{field}: {reason}", field)
        return grammar

    async def _run(self, grammar: Grammar) -> Grammar | str:
        if self._num_waiting >= _MAX_WAITING:
            raise OverloadedError("Too many grammars wait to be checked.", 1)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _check, grammar)
        finally:
            self._num_waiting -= 1


def _check(grammar: Grammar) -> Grammar | str:
    """Returns the grammar for the engine, or the reason of a refusal."""
    try:
        return check_grammar(grammar)
    except InvalidRequestError as error:
        keyword = _REFUSED_KEYWORD.search(error.message)
        if keyword is None or grammar.kind != "json_schema":
            return error.message
        place = place_of_keyword(json.loads(grammar.source), keyword[1], "schema")
        return error.message if place is None else f"{error.message}, at {place}"
