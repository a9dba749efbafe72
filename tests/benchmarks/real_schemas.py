"""JSON schemas that people wrote: accepted and right, or refused with the reason, never wrong.

    python -m tests.benchmarks.real_schemas PATH... [--draws 3] [--part 0/1] [--out FILE]

PATH is a folder, a wheel or a tar with JSON files: plain schemas, JSON-Schema-Test-Suite (the sdist
of jsonschema has it), or MaskBench of guidance-ai/jsonschemabench. Each schema passes the service's
own limits and checks. A grammar is wrong if it accepts an instance that is invalid, or if random
tokens under its masks end as an answer that jsonschema refuses, with the formats that jsonschema
knows. A valid instance that a grammar refuses is counted as narrower: objects are closed, the
properties have one order, and JSON has one form.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend, validator_for
from llguidance import LLMatcher

from engine.errors import InvalidRequestError
from engine.grammars import check_grammar, deep_threads
from engine.types import Grammar
from serve_app.openai.json_body import FieldError
from serve_app.openai.json_schemas import grammar_of_schema
from tests.benchmarks.report import Report
from tests.benchmarks.schema_files import Instance, SchemaFile, read_schemas
from tests.benchmarks.schema_order import in_order_of_schema
from tests.grammar_helpers import EOS, accepts, grammars, tokenizer

_MAX_TOKENS = 1500  # of one draw
_HASTE = (0.02, 0.3, 0.7)  # the probability of a closing character where one is allowed
_JUDGE_S = 2.0  # for one instance
_PROGRESS = 500  # schemas between two lines on standard error
_CLOSING = frozenset('"}]')
_PASSING_REASONS = 12  # reported per source, the others together


class Judge:
    """Follows one schema after the other and counts."""

    def __init__(self, report: Report, draws: int) -> None:
        self._report = report
        self._draws = draws
        self._threads = deep_threads(1, "checks")
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)  # by source
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)
        self.narrower: list[str] = []
        self.slowest: tuple[float, str] = (0.0, "")

    def judge(self, file: SchemaFile) -> None:
        counts = self.counts[file.source]
        counts["schemas"] += 1
        started_s = time.perf_counter()
        try:
            grammar = grammar_of_schema(file.schema, "schema")
            self._threads.submit(check_grammar, grammar).result()
            grammars().open(grammar, ()).result()
        except (FieldError, InvalidRequestError) as error:
            counts["refused"] += 1
            self.reasons[file.source][reason_of(str(error))] += 1
            return
        finally:
            self.slowest = max(self.slowest, (time.perf_counter() - started_s, file.name))
        try:
            validator = _Validator(file.schema)
        except SchemaError as error:
            counts["no_schema"] += 1  # accepted, but jsonschema refuses the schema itself
            self._report.emit(no_schema=file.name, reason=error.message[:200])
            return
        is_right = all([self._accepts(file, validator, one, grammar) for one in file.instances])
        is_right &= all([self._draw(file, validator, grammar, seed) for seed in range(self._draws)])
        counts["right" if is_right else "wrong"] += 1

    def _accepts(
        self, file: SchemaFile, validator: _Validator, instance: Instance, grammar: Grammar
    ) -> bool:
        """Returns False for an invalid instance that the grammar accepts."""
        counts = self.counts[file.source]
        text = _json(in_order_of_schema(instance.data, file.schema))
        is_accepted = text is not None and accepts(grammar, text)
        if instance.is_valid:
            counts["valid_accepted" if is_accepted else "valid_narrower"] += 1
            if not is_accepted:
                self.narrower.append(f"{file.name}: {text and text[:300]}")
            return True
        if not is_accepted:
            counts["invalid_refused"] += 1
            return True
        problem = validator.problem(instance.data)
        if problem is None:
            counts["disputed"] += 1  # jsonschema finds that it is valid
            self._report.emit(disputed=file.name, instance=text and text[:300])
            return True
        self._report.emit(wrong=file.name, instance=text and text[:500], problem=problem)
        return False

    def _draw(self, file: SchemaFile, validator: _Validator, grammar: Grammar, seed: int) -> bool:
        """Returns False for an ended answer that is not of the schema."""
        counts = self.counts[file.source]
        matcher = grammars().open(grammar, ()).result()
        haste = _HASTE[seed % len(_HASTE)]
        end, ids = draw_answer(matcher, random.Random(f"{file.name} {seed}"), haste)
        counts[f"draws_{end}"] += 1
        if end != "ended":
            return True
        text = tokenizer().decode(ids, skip_special_tokens=False)
        try:
            problem = validator.problem(json.loads(text))
        except ValueError as error:
            problem = f"no JSON: {error}"
        if problem is not None and problem.startswith("unjudged"):
            counts["draws_unjudged"] += 1
            problem = None
        if problem is not None:
            self._report.emit(wrong=file.name, seed=seed, answer=text[:500], problem=problem)
        return problem is None

    def summary(self) -> bool:
        """Reports all counts. Returns True if nothing was wrong."""
        for source, counts in sorted(self.counts.items()):
            common = self.reasons[source].most_common()
            self._report.emit(source=source, **counts, reasons=dict(common[:_PASSING_REASONS]))
        total = sum(self.counts.values(), Counter[str]())
        reasons = sum(self.reasons.values(), Counter[str]())
        is_right = not total["wrong"]
        self._report.emit(
            benchmark="real_schemas",
            **total,
            reasons=dict(reasons.most_common()),
            slowest_check_s=round(self.slowest[0], 3),
            slowest_schema=self.slowest[1],
            **{"pass": is_right},
        )
        return is_right


class _Validator:
    """Judges with the schema's own draft, 2020-12 if it names none, and without other documents."""

    def __init__(self, schema: dict[str, Any]) -> None:
        kind = validator_for(schema)
        kind.check_schema(schema)
        own = extend(kind, {"pattern": _pattern, "multipleOf": _multiple_of})
        self._validator = own(schema, format_checker=kind.FORMAT_CHECKER)

    def problem(self, data: Any) -> str | None:
        try:
            with _time_limit(_JUDGE_S):
                self._validator.validate(data)
        except ValidationError as error:
            return f"{error.json_path}: {error.message[:200]}"
        except Exception as error:  # of its own: an expression that Python lacks, a large float
            return f"unjudged: {type(error).__name__}: {str(error)[:200]}"
        return None


def _multiple_of(_: object, factor: float, data: Any, __: object) -> Iterator[ValidationError]:
    """Computes in decimals: as binary fractions, 14.29 is no multiple of 0.01."""
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if is_number and math.isfinite(data) and Decimal(str(data)) % Decimal(str(factor)):
        yield ValidationError(f"{data!r} is not a multiple of {factor!r}")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError: Python's expressions backtrack without end."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _pattern(_: object, pattern: str, data: object, __: object) -> Iterator[ValidationError]:
    """Refuses a text that the expression finds neither with Python's Unicode classes nor with those
    of ASCII: ECMAScript's are ASCII, except for white space."""
    if isinstance(data, str) and not any(re.search(pattern, data, flag) for flag in (0, re.ASCII)):
        yield ValidationError(f"{data!r} does not match {pattern!r}")


def draw_answer(
    matcher: LLMatcher, generator: random.Random, haste: float
) -> tuple[str, list[int]]:
    """Returns how the answer came to its end, and its tokens: `ended`, `cut` at the limit, or
    `failed`, where the engine would end the request with an error."""
    ids: list[int] = []
    closing = _closing_ids()
    while len(ids) < _MAX_TOKENS:
        bits = np.unpackbits(
            np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        allowed = np.flatnonzero(bits)
        if matcher.is_error():
            return "failed", ids
        preferred = allowed[np.isin(allowed, closing)]
        if len(preferred) and generator.random() < haste:
            allowed = preferred
        token_id = int(allowed[generator.randrange(len(allowed))])
        if token_id == EOS:
            return "ended", ids
        if not matcher.consume_token(token_id):
            return "failed", ids
        ids.append(token_id)
        if matcher.is_stopped():
            return "ended", ids
    return "cut", ids


def _closing_ids() -> list[int]:
    vocabulary = tokenizer().get_vocab()
    return [EOS, *(vocabulary[one] for one in _CLOSING)]


def _json(data: Any) -> str | None:
    """Returns the text in the form of the grammars, None for data that has none."""
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, UnicodeEncodeError):
        return None
    return text


def reason_of(message: str) -> str:
    """Returns the reason of a refusal without names, numbers and places, so that equal ones count
    together."""
    keyword = re.search(r"Unimplemented keys: (\[[^]]*\])", message)
    if keyword:
        return f"keywords {keyword[1]}"
    message = re.sub(r"^the grammar \(\w+\) is refused: ", "", message)
    message = re.sub(r"^schema[^ ]*: ", "", message)
    message = re.sub(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", "...", message)
    return re.sub(r"\d+", "N", message)[:120]


def _files(paths: list[Path], part: int, parts: int) -> Iterator[SchemaFile]:
    number = 0
    for path in paths:
        for file in read_schemas(path):
            if number % parts == part:
                yield file
            number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument(
        "--part", default="0/1", help="of the schemas: the number of it, and of all"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--narrower", type=Path, help="a file for valid instances that are refused")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    report = Report(arguments.out)
    names = [path.name for path in arguments.paths]
    report.emit_machine("real_schemas", paths=names, draws=arguments.draws, part=arguments.part)
    judge = Judge(report, arguments.draws)
    for number, file in enumerate(_files(arguments.paths, part, parts)):
        judge.judge(file)
        if number % _PROGRESS == 0:
            sys.stderr.write(f"{number} schemas, the last one {file.name}\n")
    if arguments.narrower is not None:
        arguments.narrower.write_text("\n".join(judge.narrower) + "\n")
    return int(not judge.summary())


if __name__ == "__main__":
    raise SystemExit(main())
