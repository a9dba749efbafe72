"""The clients of `chaos`, a program of its own: first every case undisturbed, then the cases in
random order for so long, each answer judged. One JSON object at the end; "reference" on a line of
its own when the disturbances may begin.

    python -m tests.benchmarks.chaos_client PORT '{"models": [...], "tokens": 40, "clients": 6}'
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from tests.benchmarks.chaos_http import Exchange, post
from tests.benchmarks.chaos_judge import (
    VERDICTS,
    Told,
    is_constrained,
    judge,
    make_cases,
    path_and_body,
    problem_of_constraint,
    read_answer,
)
from tests.benchmarks.report import percentile

TIMEOUT_S = 600.0
_STOP_CHARS = 8


@dataclass(frozen=True, slots=True)
class Wish:
    models: tuple[str, ...]
    tokens: int
    clients: int
    can_chat: bool = True  # the base has a template
    seed: int = 0
    key: str = ""  # the API key; "": none
    is_free: bool = False  # no answer has a constraint


@dataclass(slots=True)
class Received:
    """All answers that had a usage, undisturbed ones included: the client's side of the ledger."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, told: Told) -> None:
        if told.usage_tokens is not None:
            self.requests += 1
            self.prompt_tokens += told.prompt_tokens
            self.output_tokens += told.usage_tokens


RECEIVED = Received()


@dataclass(slots=True)
class Tally:
    verdicts: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)  # between two events of one stream
    longest_gaps_s: list[float] = field(default_factory=list)  # of each stream
    seconds: list[float] = field(default_factory=list)
    problems: list[dict[str, object]] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)


async def ask(port: int, case: dict[str, object], key: str) -> tuple[Exchange, Told]:
    path, body = path_and_body(case)
    exchange = await post(port, path, body, TIMEOUT_S, key)
    told = read_answer(exchange)
    RECEIVED.add(told)
    return exchange, told


async def take_references(
    port: int, cases: list[dict[str, object]], clients: int, key: str
) -> list[Told]:
    """Twice each, in different company: a case that is not the same twice proves nothing."""
    slots = asyncio.Semaphore(clients)

    async def one(case: dict[str, object]) -> Told:
        async with slots:
            if case.get("stop"):
                del case["stop"]
                _, told = await ask(port, case, key)
                middle = len(told.texts[0]) // 2
                case["stop"] = told.texts[0][middle : middle + _STOP_CHARS]
            _, told = await ask(port, case, key)
            if told.error:
                raise RuntimeError(f"an undisturbed answer failed: {told.error}")
            if problem := problem_of_constraint(case, told):
                raise RuntimeError(f"an undisturbed answer of {case} is not valid: {problem}")
            return told

    first = await asyncio.gather(*(one(case) for case in cases))
    order = list(range(len(cases)))
    random.Random(1).shuffle(order)
    again = await asyncio.gather(*(one(cases[index]) for index in order))
    for index, told in zip(order, again, strict=True):
        if told.token_ids != first[index].token_ids:
            raise RuntimeError(f"undisturbed, case {cases[index]} differs from itself")
    return first


async def run_load(
    port: int, wish: Wish, cases: list[dict[str, object]], right: list[Told], until: asyncio.Event
) -> Tally:
    tally, draw = Tally(), random.Random(wish.seed)

    async def client() -> None:
        while not until.is_set():
            index = draw.randrange(len(cases))
            exchange, told = await ask(port, cases[index], wish.key)
            verdict, details = judge(told, exchange, right[index], cases[index])
            count(tally, cases[index], exchange, verdict, details)

    await asyncio.gather(*(client() for _ in range(wish.clients)))
    return tally


def count(
    tally: Tally, case: dict[str, object], exchange: Exchange, verdict: str, details: str
) -> None:
    tally.verdicts[verdict] += 1
    tally.by_kind["stream" if case["stream"] else "whole"] += 1
    tally.by_kind["constrained" if is_constrained(case) else "free"] += 1
    tally.seconds.append(exchange.done_s - exchange.sent_s)
    gaps_s = [after - before for (before, _), (after, _) in pairwise(exchange.events)]
    if gaps_s:
        tally.gaps_s += gaps_s
        tally.longest_gaps_s.append(max(gaps_s))
    if verdict != "ok":
        tally.problems.append(
            {"at_s": exchange.done_s, "verdict": verdict, "details": details, "case": case}
        )


def summary(tally: Tally) -> dict[str, object]:
    def of(values: list[float]) -> dict[str, float]:
        if not values:
            return {}
        return {
            "p50": round(percentile(values, 50), 3),
            "p99": round(percentile(values, 99), 3),
            "max": round(max(values), 3),
        }

    return {
        "submitted": tally.verdicts.total(),
        **{name: tally.verdicts[name] for name in VERDICTS},
        **tally.by_kind,
        "gap_s": of(tally.gaps_s),
        "longest_gap_of_a_stream_s": of(tally.longest_gaps_s),
        "request_s": of(tally.seconds),
        "received": asdict(RECEIVED),
        "problems": tally.problems[:20],
    }


async def run(port: int, wish: Wish) -> None:
    cases = make_cases(wish.models, wish.tokens, can_chat=wish.can_chat, is_free=wish.is_free)
    right = await take_references(port, cases, wish.clients, wish.key)
    print_line({"reference": len(right), "tokens": sum(one.num_tokens for one in right)})
    until = asyncio.Event()
    loop = asyncio.get_running_loop()
    stop = loop.run_in_executor(None, sys.stdin.readline)  # a line says that it is enough
    stop.add_done_callback(lambda _: until.set())
    began_s = time.monotonic()
    tally = await run_load(port, wish, cases, right, until)
    print_line({"seconds": round(time.monotonic() - began_s, 1), **summary(tally)})


def print_line(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    fields = json.loads(sys.argv[2])
    asyncio.run(run(int(sys.argv[1]), Wish(**(fields | {"models": tuple(fields["models"])}))))


if __name__ == "__main__":
    main()
