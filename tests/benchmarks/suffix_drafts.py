"""The cost of drafts from earlier text: the host's time for a sequence and step, and the memory.

`SuffixDrafter` is filled up to the configured `suffix_cache_bytes` and beyond. Then so many
sequences run: each step calls `propose` for each of them and `learn` once, as the engine does, and
a sequence takes the draft's right tokens and one more. A sequence that ends makes room for another,
whose first `propose` takes its prompt in, which is told apart. The device waits for `propose` and
not for `learn`. Memory is measured in a run of its own, for tracing slows everything down. Texts
are the repository's own files in the demo's tokens, where its base is, and draws of Zipf's
distribution with parts of earlier ones.

    python -m tests.benchmarks.suffix_drafts [--out FILE] [--base FOLDER] [--sequences [1,32,256]]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path

from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.suffix_drafter import TOKEN_BYTES, SuffixDrafter
from engine.types import Request, SamplingParams, Sequence
from tests.benchmarks.report import Report, print_table, spread

ROOT = Path(__file__).parents[2]
PROMPT, OUTPUT = 256, 128  # tokens
SOURCES = ("sql", "extract", "tools", None)  # adapters of the sequences, in turns
VOCABULARY = 49_152
DRAFT_TOKENS = EngineConfig("", "").num_speculative_tokens
BUDGET = EngineConfig("", "").suffix_cache_bytes
TARGET_US = 20.0

Texts = Iterator[list[int]]


def repository_texts(base: Path, seed: int = 0) -> Texts:
    """Yields pieces of the repository's files in random order, again and again: a later pass meets
    text that it knows."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    files = sorted(path for kind in ("*.md", "*.py") for path in ROOT.rglob(kind))
    pieces: list[list[int]] = []
    for path in files:
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
            ids = tokenizer.encode(path.read_text(), add_special_tokens=False).ids
            pieces += [ids[i : i + PROMPT + OUTPUT] for i in range(0, len(ids), PROMPT + OUTPUT)]
    pieces = [piece for piece in pieces if len(piece) == PROMPT + OUTPUT]
    draw = random.Random(seed)
    while True:
        draw.shuffle(pieces)
        yield from pieces


def zipf_texts(seed: int = 0) -> Texts:
    """Yields draws of Zipf's distribution; half of a text are runs out of the newest texts."""
    draw = random.Random(seed)
    weights = [1 / rank for rank in range(1, VOCABULARY + 1)]
    total = 0.0
    cumulative = [total := total + weight for weight in weights]
    newest: list[list[int]] = []
    while True:
        text: list[int] = []
        while len(text) < PROMPT + OUTPUT:
            length = draw.randint(4, 24)
            if newest and draw.random() < 0.5:
                other = draw.choice(newest)
                start = draw.randrange(len(other) - length)
                text += other[start : start + length]
            else:
                text += draw.choices(range(VOCABULARY), cum_weights=cumulative, k=length)
        text = text[: PROMPT + OUTPUT]
        newest = [*newest[-63:], text]
        yield text


@dataclass(slots=True)
class Times:
    """Seconds of single calls (`propose_s`, `first_s`) and of whole steps; counts of drafts."""

    propose_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)  # the calls of `propose`, without first ones
    mean_s: list[float] = field(default_factory=list)  # of these calls, of each step
    learn_s: list[float] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_right: int = 0
    num_drafts: int = 0


class Runs:
    """Sequences that run at once over one drafter."""

    def __init__(self, drafter: SuffixDrafter, texts: Texts, num_sequences: int) -> None:
        self.drafter = drafter
        self._texts = texts
        self._numbers = count()
        self._running: list[tuple[Sequence, list[int]]] = []
        for index in range(num_sequences):
            # Not all end in one step.
            self._running.append(self._begin(1 + index * (OUTPUT - 1) // num_sequences))

    def _begin(self, num_output: int = 1) -> tuple[Sequence, list[int]]:
        """Returns a sequence that has its first tokens, and its whole text."""
        text, number = next(self._texts), next(self._numbers)
        adapter = SOURCES[number % len(SOURCES)]
        params = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
        request = Request(f"r{number}", tuple(text[:PROMPT]), params, adapter)
        return Sequence(request, 0, 0, text[: PROMPT + num_output]), text

    def step(self, times: Times) -> None:
        clock, drafter = time.perf_counter, self.drafter
        drafts, spent_s, num_known = [], 0.0, 0
        for sequence, _ in self._running:
            is_first = len(sequence.token_ids) == PROMPT + 1
            began_s = clock()
            draft = drafter.propose(sequence, DRAFT_TOKENS)
            took_s = clock() - began_s
            drafts.append(draft)
            (times.first_s if is_first else times.propose_s).append(took_s)
            if not is_first:
                spent_s += took_s
                num_known += 1
        times.step_s.append(spent_s)
        if num_known:
            times.mean_s.append(spent_s / num_known)
        began_s = clock()
        drafter.learn()
        times.learn_s.append(clock() - began_s)
        for index, (draft, (sequence, text)) in enumerate(zip(drafts, self._running, strict=True)):
            known = len(sequence.token_ids)
            guessed = draft.token_ids if draft is not None else ()
            right = next((i for i, t in enumerate(guessed) if text[known:][i : i + 1] != [t]), None)
            num_right = len(guessed) if right is None else right
            times.num_drafts += draft is not None
            times.num_draft_tokens += len(guessed)
            times.num_right += num_right
            sequence.token_ids += text[known : known + num_right + 1]
            if len(sequence.token_ids) >= len(text) - 1:  # as the last token, which needs no draft
                drafter.end(sequence)
                self._running[index] = self._begin()


def run_to_the_end(drafter: SuffixDrafter, texts: Iterable[list[int]]) -> None:
    """Lets sequences begin and end, one after the other."""
    for number, text in enumerate(texts):
        sequence = _sequence(number, text)
        drafter.propose(sequence, DRAFT_TOKENS)
        drafter.end(sequence)


def measure_times(
    texts: Texts, num_sequences: int, num_steps: int, max_bytes: int
) -> dict[str, object]:
    drafter = SuffixDrafter(max_bytes)
    # Until the index has dropped text.
    num_texts = 2 * drafter.max_tokens // (PROMPT + OUTPUT) + 1
    run_to_the_end(drafter, islice(texts, num_texts))
    runs, times = Runs(drafter, texts, num_sequences), Times()
    runs.step(Times())  # the prompts of all
    gc.collect()
    gc.freeze()  # as the engine does before it is ready
    for _ in range(num_steps):
        runs.step(times)
    gc.unfreeze()
    proposed_us = spread([1e6 * seconds for seconds in times.mean_s], 3)
    return {
        "sequences": num_sequences,
        "steps": num_steps,
        # Of a sequence: the mean of those in a step, so the spread is over the steps.
        "propose_us_a_step": proposed_us,
        "learn_us_a_step": spread([1e6 * s / num_sequences for s in times.learn_s], 3),
        "propose_us": _spread([1e6 * seconds for seconds in times.propose_s]),
        "step_ms": _spread([1e3 * seconds for seconds in times.step_s]),
        "learn_ms": _spread([1e3 * seconds for seconds in times.learn_s]),
        "first_propose_ms": _spread([1e3 * seconds for seconds in times.first_s]),
        "tokens": drafter.num_tokens,
        "drafts_a_proposal": round(times.num_drafts / len(times.propose_s + times.first_s), 3),
        "acceptance": round(times.num_right / max(1, times.num_draft_tokens), 3),
        "pass": proposed_us["p50"] <= TARGET_US,
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    return spread(values, 3) if values else None


def measure_bytes(work: Callable[[SuffixDrafter], object], max_bytes: int) -> dict[str, object]:
    """Returns the bytes that the index holds after the work, and at most during it."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        drafter = SuffixDrafter(max_bytes)
        result = work(drafter)
        gc.collect()
        held, most = (size - before for size in tracemalloc.get_traced_memory())
        del result
    finally:
        tracemalloc.stop()
    return {
        "budget_bytes": max_bytes,
        "held_bytes": held,
        "most_bytes": most,
        "held_to_budget": round(held / max_bytes, 3),
        "tokens": drafter.num_tokens,
        "bytes_a_token": round(held / max(1, drafter.num_tokens), 1),
        "pass": held <= max_bytes,
    }


def waiting_sequences(texts: list[list[int]]) -> Callable[[SuffixDrafter], object]:
    """Returns a work in which one of 40 sequences is asked once and never ends, as if preempted.
    Its tokens are its own, and not freed by the drafter: few against the budget."""

    def work(drafter: SuffixDrafter) -> list[Sequence]:
        waiting: list[Sequence] = []
        for number, text in enumerate(texts):
            sequence = _sequence(number, text)
            drafter.propose(sequence, DRAFT_TOKENS)
            if number % 40:
                drafter.end(sequence)
            else:
                waiting.append(sequence)
        return waiting

    return work


def many_salts(num_salts: int) -> Callable[[SuffixDrafter], object]:
    """Returns a work of as many sources, with one token each in the index."""

    def work(drafter: SuffixDrafter) -> None:
        for number in range(num_salts):
            sequence = _sequence(number, [number + 1000, 1], salt=f"{number:032}")
            drafter.propose(sequence, DRAFT_TOKENS)
            drafter.end(sequence)

    return work


def _sequence(number: int, text: list[int], salt: str = "") -> Sequence:
    token_ids = array("I", text).tolist()  # integers of its own, as those that a runner draws
    request = Request("r", tuple(token_ids), SamplingParams(), SOURCES[number % 4], salt)
    return Sequence(request, 0, 0, token_ids)


def measure_all_bytes(report: Report, name: str, texts: list[list[int]], budget: int) -> bool:
    """Runs each work over texts of twice the budget's tokens or more."""
    works = {
        "ended": partial(run_to_the_end, texts=texts),
        "waiting": waiting_sequences(4 * texts),  # over many segments
        "many_salts": many_salts(2 * budget // TOKEN_BYTES),
    }
    passed = True
    for work_name, work in works.items():
        line = measure_bytes(work, budget)
        report.emit(part="bytes", text=name, work=work_name, **line)
        passed &= bool(line["pass"])
    return passed


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--base", type=Path, help="folder of the demo's base, for its tokenizer")
    parser.add_argument("--sequences", type=json.loads, default=[1, 32, 256], help="JSON list")
    parser.add_argument("--proposals", type=int, default=64_000, help="for each number of them")
    parser.add_argument("--budget", type=int, default=BUDGET, help="bytes of the index")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    report = Report(args.out)
    report.emit_machine("suffix_drafts", arguments=sys.argv[1:])
    sources: dict[str, Callable[[], Texts]] = {"zipf": zipf_texts}
    if args.base is not None:
        sources = {"repository": partial(repository_texts, args.base)} | sources
    passed, rows = True, []
    for name, source in sources.items():
        texts = source()
        for num_sequences in args.sequences:
            num_steps = max(20, args.proposals // num_sequences)
            line = measure_times(texts, num_sequences, num_steps, args.budget)
            report.emit(part="times", text=name, **line)
            propose, learn = line["propose_us_a_step"], line["learn_us_a_step"]
            assert isinstance(propose, dict)
            assert isinstance(learn, dict)
            rows.append((name, num_sequences, *propose.values(), *learn.values()))
            passed &= bool(line["pass"])
        num_texts = 2 * args.budget // TOKEN_BYTES // (PROMPT + OUTPUT) + 1
        passed &= measure_all_bytes(report, name, list(islice(source(), num_texts)), args.budget)
    report.emit(target_us=TARGET_US, **{"pass": passed})
    columns = [f"{call} {part}" for call in ("propose", "learn") for part in ("p50", "p99", "max")]
    print_table(("text", "sequences", *columns), rows)


if __name__ == "__main__":
    main()
