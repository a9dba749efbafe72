"""Fuzzed adapter folders against registration's check and a serving engine.

Each folder begins as a valid adapter of a tiny base and is spoilt in one way. A process of its own
reads it (time and memory measured); then the engine is told to load it while it serves another
adapter. What is accepted must have PEFT's own factors and, where its greedy answer is clear, its
tokens. The result counts by class of mutation:

- refused, accepted: rightly; accepted_wrongly: PEFT disagrees, or the mutation may never pass;
- refused_wrongly: a harmless change; unclear: the reason names something else, or cannot be shown;
- crashes: any error but AdapterError; slow: more than 2 s; greedy: more than 256 MiB.

    python -m tests.benchmarks.fuzz_adapters [--count 1000] [--seed 0] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.fuzz_configs import CONFIG_MUTATIONS
from tests.benchmarks.fuzz_files import AdapterFiles, Expectation, Mutation
from tests.benchmarks.fuzz_folders import CANARY, FOLDER_MUTATIONS
from tests.benchmarks.fuzz_guard import ANSWER_TOKENS, PROMPTS, Guard
from tests.benchmarks.fuzz_judge import Finding, Judge, Oracle, Reader, difference, factors, read
from tests.benchmarks.fuzz_weights import WEIGHT_MUTATIONS
from tests.benchmarks.report import Report, spread
from tests.engine_helpers import make_adapter, make_base

MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    **WEIGHT_MUTATIONS,
    **CONFIG_MUTATIONS,
    **FOLDER_MUTATIONS,
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TEMPLATES: dict[str, tuple[int, tuple[str, ...], bool]] = {
    "queries and values": (4, ("q_proj", "v_proj"), False),
    "all linear": (8, LINEAR, False),
    "with the head": (4, ("q_proj", "lm_head"), False),
    "with the embedding": (20, ("q_proj", "embed_tokens"), True),
}
SLOW_S = 2.0
MAX_GROWN_BYTES = 256 * 1024**2
MAX_REASON = 1000  # characters; a reason ends in logs, tags and HTTP answers
RIGHT = ("refused", "accepted")
WRONG = ("accepted_wrongly", "refused_wrongly", "unclear", "crashes", "slow", "greedy")


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    group: str
    mutation: str
    template: Path
    folder: Path
    expected: Expectation


def make_templates(root: Path, base: Path) -> list[Path]:
    return [
        make_adapter(root / f"template-{i}", base, rank, targets, i, keeps_base_copy=copy)
        for i, (rank, targets, copy) in enumerate(TEMPLATES.values())
    ]


def make_cases(root: Path, templates: list[Path], count: int, seed: int) -> Iterator[Case]:
    """The groups by turns. A case depends on the seed and its number only."""
    groups = list(MUTATIONS)
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        group = groups[number % len(groups)]
        mutations = MUTATIONS[group]
        mutate = mutations[number // len(groups) % len(mutations)]
        template = rng.choice(templates)
        folder = root / f"case-{number}"
        expected = mutate(AdapterFiles(folder, template), rng)
        yield Case(number, group, mutate.__name__, template, folder, expected)


def fault_of_reason(reason: str, folder: Path, words: str) -> str | None:
    """Returns None for a reason that can be shown to anyone and names the fault."""
    if not reason.isprintable() or not reason.isascii():
        return "the reason has characters that cannot be shown"
    if len(reason) > MAX_REASON:
        return f"the reason has {len(reason)} characters"
    if str(folder) in reason:
        return "the reason tells where the folder lies"
    return None if re.search(words, reason) and reason else f"the reason lacks {words}"


class Bench:
    def __init__(self, base: Path, templates: list[Path], judge: Judge) -> None:
        self._base = base
        self._reader = judge
        self._oracle = Oracle(base)
        self.guard = Guard(base, templates[1])
        self.seconds: list[float] = []
        self.grown: list[float] = []
        self.num_reloads = 0

    async def judge(self, case: Case) -> tuple[str, str]:
        """The column that it counts in, and why."""
        finding = await asyncio.to_thread(self._reader.judge, case.folder)
        self.seconds.append(finding.seconds)
        self.grown.append(finding.grown_bytes / 1024**2)
        if finding.kind == "crash":
            return "crashes", finding.reason
        if finding.seconds > SLOW_S:
            return "slow", f"{finding.seconds:.1f} s"
        if finding.grown_bytes > MAX_GROWN_BYTES:
            return "greedy", f"{finding.grown_bytes} bytes"
        digest = f"case-{case.number}"
        try:
            refusal = await self.guard.load(digest, case.folder)
        except Exception as error:
            return "crashes", f"in the engine: {type(error).__name__}: {error}"[:500]
        if (refusal is None) != (finding.kind == "accepted"):
            return "crashes", f"registration: {finding.reason!r}, the engine: {refusal!r}"
        if refusal is None:
            return await self._judge_accepted(case, digest)
        await self._load_a_good_one(case)
        return self._judge_refused(case, finding)

    def close(self) -> None:
        self._reader.close()

    def _judge_refused(self, case: Case, finding: Finding) -> tuple[str, str]:
        fault = fault_of_reason(finding.reason, case.folder, case.expected.words)
        if case.expected.verdict in ("accepted", "unchanged"):
            return "refused_wrongly", finding.reason
        if fault is not None:
            return "unclear", f"{fault}: {finding.reason}"
        return "refused", finding.reason

    async def _judge_accepted(self, case: Case, digest: str) -> tuple[str, str]:
        if case.expected.verdict == "refused":
            return "accepted_wrongly", f"not refused for {case.expected.words}"
        is_unchanged = case.expected.verdict in ("unchanged", "unchanged or refused")
        source = case.template if is_unchanged else case.folder
        try:
            model = await asyncio.to_thread(self._oracle.load, source)
        except Exception as error:
            return "accepted_wrongly", f"PEFT: {type(error).__name__}: {error}"[:500]
        ours = await asyncio.to_thread(read, case.folder, self._base)
        if (wrong := difference(ours, factors(model))) is not None:
            return "accepted_wrongly", wrong
        prompt = PROMPTS[case.number % len(PROMPTS)]
        wanted = await asyncio.to_thread(self._oracle.greedy, model, prompt, ANSWER_TOKENS)
        answer = await self.guard.ask(digest, prompt, ANSWER_TOKENS)
        await self.guard.engine.unload_adapter(digest)
        if wanted is not None and answer != wanted:
            return "accepted_wrongly", f"answers {answer}, PEFT {wanted}"
        return "accepted", "" if wanted is not None else "the answer was not clear"

    async def _load_a_good_one(self, case: Case) -> None:
        """Under the digest just refused: nothing of the failure may stay."""
        digest = f"case-{case.number}"
        refusal = await self.guard.load(digest, case.template)
        assert refusal is None
        await self.guard.engine.unload_adapter(digest)
        self.num_reloads += 1


async def run(count: int, seed: int, report: Report) -> bool:
    report.emit_machine("fuzz_adapters", count=count, seed=seed, classes=len(MUTATIONS))
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    started_s = time.perf_counter()
    counts: dict[str, Counter[str]] = {group: Counter() for group in MUTATIONS}
    with tempfile.TemporaryDirectory(prefix="loraplex-fuzz-") as folder:
        root = Path(folder)
        base = make_base(root / "base", tie_word_embeddings=False)
        templates = make_templates(root, base)
        bench = Bench(base, templates, Reader(base))
        await bench.guard.start()
        try:
            for case in make_cases(root, templates, count, seed):
                column, why = await bench.judge(case)
                counts[case.group][column] += 1
                if column in WRONG:
                    report.emit(
                        case=case.number,
                        group=case.group,
                        mutation=case.mutation,
                        found=column,
                        why=ascii(why)[:1000],
                    )
                for path in root.glob(f"{case.folder.name}*"):
                    shutil.rmtree(path)
            is_serving = bench.guard.is_serving
        finally:
            await bench.guard.stop()
            bench.close()
        was_pickle_run = (root / CANARY).exists()
    for group, columns in counts.items():
        report.emit(group=group, **{name: columns[name] for name in (*RIGHT, *WRONG)})
    total = sum(counts.values(), Counter())
    guard = bench.guard
    ok = (
        not any(total[name] for name in WRONG)
        and guard.num_changed == 0
        and is_serving
        and not was_pickle_run
    )
    report.emit(
        benchmark="fuzz_adapters",
        cases=total.total(),
        **{name: total[name] for name in (*RIGHT, *WRONG)},
        pickles_run=int(was_pickle_run),
        reads_s=spread(bench.seconds),
        grown_mib=spread(bench.grown, 1),
        good_loads_after_a_refusal=bench.num_reloads,
        engine={
            "answers": guard.num_answers,
            "changed": guard.num_changed,
            "steps": guard.num_steps,
            "largest_gap_s": round(guard.largest_gap_s, 3),
        },
        seconds=round(time.perf_counter() - started_s, 1),
        **{"pass": ok},
    )
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    return int(not asyncio.run(run(arguments.count, arguments.seed, Report(arguments.out))))


if __name__ == "__main__":
    raise SystemExit(main())
