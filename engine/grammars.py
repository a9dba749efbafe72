"""Grammars of llguidance: checked, compiled once per source in threads, followed token by token.

A choice follows its grammar in `engine.grammar_state`. All work is bounded by the size of the
source and by llguidance's fuel. Free of tensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import GRAMMAR_ERRORS, InvalidRequestError
from engine.grammar_sources import as_lark, ends_in_escape
from engine.grammar_state import MAX_ERROR_CHARS, NO_EXTENSION, NUM_MASK_THREADS, Lane, failure
from engine.types import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

MAX_SOURCE_BYTES = 64 * 1024
# The format of Python's `json.dumps`, which most training data has. Without free whitespace, keys
# and separators leave no choice, and no answer is an endless row of spaces.
JSON_FORMAT: JsonCompileOptions = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
# A keyword that is not enforced is refused, whatever the schema sets.
_STRICT: JsonCompileOptions = {"lenient": False}

# Two busy cores compile 1,200 formats in 1.2 s, and a multipleOf of 999,983 in 10 s.
_MAX_FORMATS, _FORMAT = 256, re.compile(r'"format"\s*:')
_MAX_MULTIPLE, _MAX_EXPONENT = 10_000, 12
_MAX_NUMBER_CHARS = 40
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')
# The library reads numbers as float64, and its ranges of int64 end the process at the least one.
_LEAST_NUMBER = -(2.0**63)
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
# llguidance recurses once per rule or reference of a chain: 8 MB of stack hold 1,100 at least.
# A rule is counted by the last character of its head, `name`, `name[attributes]` or `name.1`: an
# expression that begins at the name reads the rest of a long word at each of its characters.
_MAX_RULES, _RULE = 1000, re.compile(r"[\w\]]\s*:")
_REFERENCE = re.compile(r'"\$ref"\s*:')
_STACK_BYTES = 64 * 1024 * 1024  # virtual memory, taken where it is used
_ESCAPE = re.compile(r"\\u(00[2-7][0-9a-fA-F])")
_NUM_THREADS = 2
# Compiled grammars that are kept for further requests: one for each lane.
_MAX_PROTOTYPES = 256
_MAX_PROTOTYPE_SOURCES = 4 * 1024 * 1024  # bytes of their sources together
# A grammar with more choices at once is compiled again, if that was quick, for a further lane.
_CHOICES_OF_LANE = 8
_MAX_COMPILE_S = 0.05


@cache
def _limits() -> LLParserLimits:
    # Error texts lack the state of the parser. A mask of 50,000 items, the default, took 1.4 s.
    return LLParserLimits(verbose_errors=False, step_max_items=10_000)


def check_grammar(grammar: Grammar) -> Grammar:
    """Checks a grammar without a tokenizer, in any thread: milliseconds, mostly without the GIL.
    Returns the grammar for the engine: one in GBNF as Lark, so that no engine translates it.

    Raises InvalidRequestError with the words of llguidance. A Lark grammar that names special
    tokens passes here, but may be refused by the engine of a base that lacks them.
    """
    for_engine = _in_kind_of_library(grammar)
    if error := LLMatcher.validate_grammar(_translated(for_engine), limits=_limits()):
        raise _refusal(grammar, error)
    return for_engine


def _in_kind_of_library(grammar: Grammar) -> Grammar:
    if grammar.kind != "gbnf":
        return grammar
    _check_bytes(grammar)
    try:
        return as_lark(grammar)
    except ValueError as error:
        raise _refusal(grammar, str(error)) from None


def _check_bytes(grammar: Grammar) -> None:
    size = len(grammar.source.encode(errors="surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise _refusal(grammar, f"it has {size} bytes, but {MAX_SOURCE_BYTES} are allowed")


def _translated(grammar: Grammar) -> str:
    """Returns the grammar in llguidance's own format. Raises InvalidRequestError."""
    grammar = _in_kind_of_library(grammar)
    _check_bytes(grammar)
    _check_costs(grammar)
    try:
        if grammar.kind == "json_schema":
            if not isinstance(json.loads(grammar.source), dict):
                raise _refusal(grammar, "the schema is not a JSON object")
            return LLMatcher.grammar_from_json_schema(grammar.source, JSON_FORMAT, _STRICT)
        if grammar.kind == "regex":
            if ends_in_escape(grammar.source):
                raise _refusal(grammar, "a backslash at its end escapes nothing")
            return LLMatcher.grammar_from_regex(grammar.source)
        if grammar.kind == "lark":
            return LLMatcher.grammar_from_lark(grammar.source)
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
        raise _refusal(grammar, str(error)) from None
    raise _refusal(grammar, "the kind is not known")


def _check_costs(grammar: Grammar) -> None:
    """Refuses the keywords whose cost llguidance does not bound, and numbers that end the process.
    Reads the text: a schema can be a part of a Lark grammar."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), grammar.source)
    if (count := len(_FORMAT.findall(plain))) > _MAX_FORMATS:
        raise _refusal(grammar, f"{count} formats are too many, {_MAX_FORMATS} are allowed")
    num_rules = len(_REFERENCE.findall(plain))
    if grammar.kind == "lark":
        num_rules += len(_RULE.findall(plain))
    if num_rules > _MAX_RULES:
        raise _refusal(grammar, f"{num_rules} rules or references, {_MAX_RULES} are allowed")
    if grammar.kind == "json_schema" or "%json" in plain:
        for number in _NEGATIVE.findall(plain):
            if float(number) <= _LEAST_NUMBER:
                raise _refusal(grammar, f"the number {number[:_MAX_NUMBER_CHARS]} is too small")
    values = set(_MULTIPLE_OF.findall(plain))
    if any(len(value) > _MAX_NUMBER_CHARS for value in values):
        raise _refusal(grammar, f"multipleOf: more than {_MAX_NUMBER_CHARS} digits")
    try:
        decimals = [Decimal(value) for value in values]
    except ArithmeticError:
        raise _refusal(grammar, f"multipleOf: not all of {sorted(values)} are numbers") from None
    if any(abs(decimal.adjusted()) > _MAX_EXPONENT for decimal in decimals):
        raise _refusal(grammar, f"multipleOf: not all of {sorted(values)} are of usual size")
    if not all(decimal > 0 for decimal in decimals):  # a zero makes every multiple 0
        raise _refusal(grammar, "multipleOf: not all are above 0")
    factors = [Fraction(decimal) for decimal in decimals]
    # An automaton of as many states as the least common multiple of all that may meet in one value.
    scale = math.lcm(*(factor.denominator for factor in factors))
    if math.lcm(*(int(factor * scale) for factor in factors)) > _MAX_MULTIPLE:
        raise _refusal(
            grammar, f"multipleOf: the least common multiple needs more than {_MAX_MULTIPLE} states"
        )


def _refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    words = " ".join(reason.split())[:MAX_ERROR_CHARS]
    if NO_EXTENSION in words:
        words = "it matches no text"
    return InvalidRequestError(f"the grammar ({grammar.kind}) is refused: {words}", "grammar")


def deep_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Returns threads whose stacks hold the recursion of the grammars that pass the checks."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_run = threading.Barrier(count + 1)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(count):  # each waits, so that each submission starts a thread
            pool.submit(all_run.wait)
    finally:
        threading.stack_size(before)
    all_run.wait()
    return pool


class Grammars:
    """Compiles the grammars of one base, once per source. Its methods are called by one thread.

    A compiled grammar is a prototype that every choice copies (6 to 67 us). Copies share its lexer:
    masks of later choices cost less than half, but one after another. So the choices of a grammar
    are spread over lanes, each with a prototype of its own.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = deep_threads(_NUM_THREADS, "grammars")
        self._prototypes: OrderedDict[bytes, tuple[list[Lane], int]] = OrderedDict()
        self._num_lanes = 0
        self._num_source_bytes = 0  # for each lane

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> Grammars | str:
        """Reads `tokenizer.json` of a base, or returns why there are no grammars for this base.

        Takes 0.3 s for 49,152 tokens and holds the GIL: only before the engine starts. `vocab_size`
        is the number of logits: the tokenizer is padded to it, masks have exactly as many bits.
        """
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            ids = sorted(eos_token_ids)
            return cls(LLTokenizer(text, n_vocab=vocab_size, eos_token=ids or None))
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:MAX_ERROR_CHARS]
            logger.warning("no grammars for this base: %s", reason)
            return reason

    def lane(self, grammar: Grammar) -> Lane:
        """Returns the lane of the next choice of the grammar: that with the fewest choices."""
        lanes = self._lanes(grammar)
        lane = min(lanes, key=lambda one: one.num_choices)
        if lane.num_choices >= _CHOICES_OF_LANE and len(lanes) < NUM_MASK_THREADS:
            lane = Lane(Future())
            lanes.append(lane)
            self._count(1, len(grammar.source))
            first = lanes[0]
            first.compiled.add_done_callback(lambda _: self._compile_again(grammar, first, lane))
        return lane

    def open(
        self, grammar: Grammar, output: Sequence[int], lane: Lane | None = None
    ) -> Future[LLMatcher]:
        """Returns a matcher of a choice's own, compiled and advanced over the output so far in
        threads. The future holds InvalidRequestError for a grammar that is refused, and
        RuntimeError for an output that is not of the grammar or takes it beyond a limit."""
        tokens = list(output)
        if grammar.starts_after is not None:
            after = grammar.starts_after
            tokens = tokens[tokens.index(after) + 1 :] if after in tokens else []
        opened: Future[LLMatcher] = Future()

        def copy(compiled: Future[LLMatcher]) -> None:
            # Not `submit` for the whole: a thread that waits for another's work is lost meanwhile.
            if not tokens:
                _fulfil(opened, compiled, tokens)
            else:
                self._threads.submit(_fulfil, opened, compiled, tokens)

        (lane or self.lane(grammar)).compiled.add_done_callback(copy)
        return opened

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _lanes(self, grammar: Grammar) -> list[Lane]:
        key = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode(errors="replace")).digest()
        found = self._prototypes.get(key)
        if found is not None and not _was_disturbed(found[0][0]):
            self._prototypes.move_to_end(key)
            return found[0]
        if found is not None:
            self._forget(key)
        lanes = [Lane(Future())]
        self._threads.submit(self._compile, grammar, lanes[0])
        self._prototypes[key] = lanes, len(grammar.source)
        self._count(1, len(grammar.source))
        return lanes

    def _count(self, num_lanes: int, num_source_bytes: int) -> None:
        """Counts new lanes, and drops the grammars that were asked for least recently."""
        self._num_lanes += num_lanes
        self._num_source_bytes += num_lanes * num_source_bytes
        while self._num_lanes > _MAX_PROTOTYPES or self._num_source_bytes > _MAX_PROTOTYPE_SOURCES:
            self._forget(next(iter(self._prototypes)))

    def _forget(self, key: bytes) -> None:
        lanes, size = self._prototypes.pop(key)
        self._num_lanes -= len(lanes)
        self._num_source_bytes -= len(lanes) * size

    def _compile_again(self, grammar: Grammar, first: Lane, lane: Lane) -> None:
        """Compiles the grammar for a further lane. If the first time took long or the second
        fails, the lane has the first prototype: its masks are right and wait for those of the first
        lane."""
        error = first.compiled.exception()
        if error is not None:
            lane.compiled.set_exception(error)
        elif first.compile_s > _MAX_COMPILE_S:
            lane.compiled.set_result(first.compiled.result())
        else:
            self._threads.submit(self._compile, grammar, lane, first.compiled.result())

    def _compile(self, grammar: Grammar, lane: Lane, otherwise: LLMatcher | None = None) -> None:
        began_s = time.perf_counter()
        try:
            matcher = LLMatcher(
                self._tokenizer, _translated(grammar), log_level=0, limits=_limits()
            )
            first = matcher.deep_copy()
            if not first.is_error():
                # The first mask touches most of the lexer, some milliseconds: not within a step.
                first.compute_bitmask()
            if first.is_error():
                raise _refusal(grammar, first.get_error())
        except BaseException as error:  # also a cancellation, and a panic of the library
            if otherwise is None:
                lane.compiled.set_exception(error)
            else:
                lane.compiled.set_result(otherwise)
        else:
            lane.compile_s = time.perf_counter() - began_s
            lane.compiled.set_result(matcher)


def _was_disturbed(lane: Lane) -> bool:
    """Returns True if the grammar was not compiled for another reason than the grammar itself."""
    error = lane.compiled.exception() if lane.compiled.done() else None
    return error is not None and not isinstance(error, InvalidRequestError)


def _fulfil(opened: Future[LLMatcher], compiled: Future[LLMatcher], output: list[int]) -> None:
    """Copies the prototype and advances the copy over the output."""
    try:
        # Not `result`, which would add frames to the traceback of one remembered refusal each time.
        if (error := compiled.exception()) is not None:
            opened.set_exception(error)
            return
        matcher = compiled.result().deep_copy()
        if output and matcher.try_consume_tokens(output) != len(output):
            reason = failure(matcher)
            if not reason.startswith(GRAMMAR_ERRORS):  # a fault of the request, as while it draws
                reason = f"the output so far is not of the grammar; {reason}"
            raise RuntimeError(reason)
    except BaseException as error:  # also a cancellation, and a panic of the library
        opened.set_exception(error)
    else:
        opened.set_result(matcher)
