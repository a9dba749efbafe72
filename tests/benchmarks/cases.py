"""The offline workload: the requests, the adapters that they use, and the kind of engine.

Every request has its own random prompt and asks for exactly its number of tokens, so all sides of a
comparison yield the same number. Free of torch and of our engine: the peers' runner reads it too.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, cast, get_args

from tests.benchmarks.shapes import ALL_LINEARS

# off: LoRA disabled; on: a pool that holds every adapter of every case; small: a quarter of that.
EngineKind = Literal["off", "on", "small"]
SMALL_POOL_PAGES = 32
POOL_PAGES = 128
PAGE_RANK = 16
# plain: LoRA; bias: LoRA with biases of lora_B; alora: active from `INVOCATION` on.
AdapterKind = Literal["plain", "dora", "bias", "alora"]
INVOCATION = (3, 4, 5)  # in no prompt of `make_prompts`
_KINDS = "|".join(kind for kind in get_args(AdapterKind) if kind != "plain")
_SPEC = re.compile(rf"r(\d+)(?:-({_KINDS}))?(?:-([{ALL_LINEARS}]+))?(?:/(\d+))?-(\d+)")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A random adapter, given in full by its name: the digest under which an engine has it."""

    rank: int
    index: int  # adapters that differ in nothing else hold other numbers
    targets: str = ALL_LINEARS  # letters of `shapes.LINEARS`
    every: int = 1  # 2: the first, third, fifth ... layer only
    kind: AdapterKind = "plain"

    @property
    def digest(self) -> str:
        kind = "" if self.kind == "plain" else f"-{self.kind}"
        targets = "" if self.targets == ALL_LINEARS else f"-{self.targets}"
        every = f"/{self.every}" if self.every > 1 else ""
        return f"r{self.rank}{kind}{targets}{every}-{self.index}"

    @classmethod
    def parse(cls, digest: str) -> AdapterSpec:
        found = _SPEC.fullmatch(digest)
        if found is None:
            raise ValueError(
                f"{digest!r} names no random adapter (r16-0, r16-qv-0, r16-qv/2-0, r16-dora-0)"
            )
        rank, kind, targets, every, index = found.groups()
        adapter_kind = cast(AdapterKind, kind or "plain")
        return cls(int(rank), int(index), targets or ALL_LINEARS, int(every or 1), adapter_kind)


@dataclass(frozen=True, slots=True)
class Case:
    engine: EngineKind
    requests: int
    distinct: int  # adapters in use; 0: the base only
    rank: int = 16
    prompt: int = 256
    output: int = 128
    targets: str = ALL_LINEARS  # letters of `shapes.LINEARS`
    ranks: tuple[int, ...] = ()  # of the adapters in turn, instead of `rank`

    @property
    def name(self) -> str:
        adapters = "base"
        if self.distinct:
            ranks = "+".join(map(str, self.ranks or (self.rank,)))
            targets = "" if self.targets == ALL_LINEARS else f"-{self.targets}-"
            adapters = f"r{ranks}{targets}x{self.distinct}"
        sizes = "" if self.output > 1 else f"-prefill{self.prompt}"
        if self.output > 1 and (self.prompt, self.output) != (256, 128):
            sizes = f"-{self.prompt}+{self.output}"
        return f"{self.engine}-{adapters}-n{self.requests}{sizes}"

    @property
    def output_tokens(self) -> int:
        return self.requests * self.output

    @property
    def max_rank(self) -> int:
        return max(self.ranks, default=self.rank)

    @property
    def base(self) -> Case:
        """The same requests without adapters, on the same engine."""
        return replace(self, distinct=0, rank=16, ranks=(), targets=ALL_LINEARS)

    @property
    def adapters(self) -> tuple[AdapterSpec, ...]:
        ranks = self.ranks or (self.rank,)
        return tuple(
            AdapterSpec(ranks[i % len(ranks)], i, self.targets) for i in range(self.distinct)
        )

    @property
    def num_pages(self) -> int:
        """The room of its adapters in a pool, in sixteen rank rows of the whole model."""
        return sum(-(-spec.rank // PAGE_RANK) for spec in self.adapters)


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


def cost_cases() -> tuple[Case, ...]:
    """The cost of adapters of several forms beside the base: an adapter of few modules or of a low
    rank should cost what it holds."""
    few = [Case("on", n, 32, targets="qv") for n in (32, 256)]
    low = [Case("on", 32, 32, rank=8), Case("on", 32, 32, ranks=(8, 16, 32, 64))]
    whole = [Case("on", 32, 1), Case("on", 32, 32), Case("on", 256, 32), Case("on", 1, 1)]
    prompts = [Case("on", 16, distinct, prompt=3900, output=1) for distinct in (1, 16)]
    return (*few, *low, *whole, *prompts)


def shape_cases() -> tuple[Case, ...]:
    """The comparison of one shape: 32 adapters beside the base, one request to many."""
    return tuple(Case("on", n, 32) for n in (1, 32, 256))


CASE_SETS = {"standard": standard_cases, "cost": cost_cases, "shape": shape_cases}


def groups_of(cases: Sequence[Case]) -> tuple[tuple[Case, ...], ...]:
    """Returns the cases that run in turns, in their order: the base first, then those of equal
    requests whose adapters are on the device together. Cases with adapters get a base."""
    by_base: dict[Case, list[Case]] = {}
    for case in cases:
        by_base.setdefault(case.base, []).append(case)
    groups: list[tuple[Case, ...]] = []
    for base, of_base in by_base.items():
        group: list[Case] = [base]
        # Fewest first: what a case of more adapters brings to the device is then its own.
        for case in sorted((c for c in of_base if c.distinct), key=lambda c: c.distinct):
            if len(group) > 1 and sum(c.num_pages for c in (*group, case)) > POOL_PAGES:
                groups.append(tuple(group))
                group = [base]
            group.append(case)
        groups.append(tuple(group))
    return tuple(groups)


def cases_as_json(cases: Sequence[Case]) -> str:
    return json.dumps([asdict(case) for case in cases])


def cases_from_json(text: str) -> tuple[Case, ...]:
    return tuple(Case(**(one | {"ranks": tuple(one["ranks"])})) for one in json.loads(text))


def tiny(case: Case) -> Case:
    """Returns the same case where a step takes long: for a trial of the benchmark on a CPU."""
    return replace(
        case,
        requests=min(case.requests, 4),
        distinct=min(case.distinct, 3),
        prompt=min(case.prompt, 40),
        output=min(case.output, 6),
    )


def select(cases: Sequence[Case], patterns: str) -> tuple[Case, ...]:
    """Returns the cases whose names match one of `patterns`: shell patterns by comma. A pattern
    without a match ends the program."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            names = " ".join(case.name for case in cases)
            raise SystemExit(f"no case is called {pattern}; there are: {names}")
    return tuple(c for c in cases if any(fnmatchcase(c.name, pattern) for pattern in wanted))


def make_prompts(case: Case, vocab_size: int, salt: int) -> list[tuple[int, ...]]:
    """Returns fresh prompts for every salt: no prefix is ever seen twice."""
    draw = random.Random(f"{case.name}/{salt}")
    highest = vocab_size - 16  # away from the special ids
    return [
        tuple(draw.randint(10, highest) for _ in range(case.prompt)) for _ in range(case.requests)
    ]


def adapter_of(case: Case, request: int) -> int | None:
    return request % case.distinct if case.distinct else None
