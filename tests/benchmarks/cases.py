"""The offline workload: which requests, over how many adapters, and in which engine.

Every request has its own random prompt and asks for exactly its number of tokens, so all sides of a
comparison yield the same number. Neither torch nor our engine here: the peers' runner reads it too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

# off: LoRA disabled; on: a pool that holds every adapter of every case; small: one of 32 pages.
EngineKind = Literal["off", "on", "small"]
SMALL_POOL_PAGES = 32
POOL_PAGES = 128
PAGE_RANK = 16


@dataclass(frozen=True, slots=True)
class Case:
    engine: EngineKind
    requests: int
    distinct: int  # adapters in use; 0: the base only
    rank: int = 16
    prompt: int = 256
    output: int = 128

    @property
    def name(self) -> str:
        who = f"r{self.rank}x{self.distinct}" if self.distinct else "base"
        what = "" if self.output > 1 else f"-prefill{self.prompt}"
        return f"{self.engine}-{who}-n{self.requests}{what}"

    @property
    def output_tokens(self) -> int:
        return self.requests * self.output


def standard_cases() -> tuple[Case, ...]:
    everywhere, some = (1, 32, 128, 256), (32, 256)
    cases = [Case("off", n, 0) for n in everywhere]
    cases += [Case("on", n, 0) for n in everywhere]
    cases += [Case("on", 8, 0), Case("on", 1, 1), Case("on", 8, 8)]  # few rows
    cases += [Case("on", n, distinct) for distinct in (1, 8) for n in some]
    cases += [Case("on", n, 32) for n in everywhere]
    cases += [Case("on", 256, 128), Case("small", 256, 128)]
    cases += [Case("on", n, 32, rank=64) for n in some]
    cases += [Case("on", 16, distinct, prompt=3900, output=1) for distinct in (0, 1, 16)]
    return tuple(cases)


def tiny(case: Case) -> Case:
    """The same case where a step takes long: for a trial of the benchmark on a CPU."""
    return replace(
        case,
        requests=min(case.requests, 4),
        distinct=min(case.distinct, 3),
        prompt=min(case.prompt, 40),
        output=min(case.output, 6),
    )


def select(cases: Sequence[Case], patterns: str) -> tuple[Case, ...]:
    """`patterns`: shell patterns of names, comma separated; one without a match is an error."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            names = " ".join(case.name for case in cases)
            raise SystemExit(f"no case is called {pattern}; there are: {names}")
    return tuple(c for c in cases if any(fnmatchcase(c.name, pattern) for pattern in wanted))


def make_prompts(case: Case, vocab_size: int, salt: int) -> list[tuple[int, ...]]:
    """Fresh ones for every salt: no prefix is ever seen twice."""
    draw = random.Random(f"{case.name}/{salt}")
    highest = vocab_size - 16  # away from the special ids
    return [
        tuple(draw.randint(10, highest) for _ in range(case.prompt)) for _ in range(case.requests)
    ]


def adapter_of(case: Case, request: int) -> int | None:
    return request % case.distinct if case.distinct else None
