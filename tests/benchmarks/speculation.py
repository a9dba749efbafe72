"""Output tokens per second with and without speculation, and the acceptance of drafts.

On a CPU, or with `--device cuda`: the demo's base with the adapters sql, extract, tools, and the
base itself, on questions that training never saw, greedy; drafts come from earlier text. Variants
take turns on one runner with the same questions, new ones in each round; the first round is told
apart, because nothing is learned and no text is known yet. Every answer is compared with that of
the variant without drafts. With `--vllm` vLLM runs the same rounds before, with and without drafts
of n-grams, and the last lines compare the tokens per second.

With `--shape`: random weights of that shape, on a GPU, prompts of random tokens and drafts that are
right with a fixed probability per token (`--acceptance`), replayed from a run without drafts. All
requests of a round begin together, so the time after their prompts is told apart, and that in which
all of them run: the last ones run in a batch of few. The head is the embedding, moved by a row: the
next token is then never nearly equal to another one, and an answer does not change with the
rounding of larger steps, which would make all later drafts wrong. `launch_gap_ms` is the host's
time from the tokens of a step to the launch of the next one, in steps with drafts.

    python -m tests.benchmarks.speculation [--concurrency 1,4,16] [--rounds 5] [--threads 1]
    python -m tests.benchmarks.speculation --device cuda --vllm SITE_PACKAGES --modes off auto
    python -m tests.benchmarks.speculation --shape llama-3-8b --acceptance 0.6,0.8 --distinct 0,32
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import get_args

from engine.config import EngineConfig
from engine.core import Engine
from engine.device_step import DeviceSteps
from engine.drafts import Draft, Drafter
from engine.runner import ModelRunner
from engine.types import Request, SamplingParams, SpeculationMode
from engine.types import Sequence as Choice
from tests.benchmarks.demo_questions import ADAPTERS, ADAPTERS_DIR, demo_rounds, prepared_base
from tests.benchmarks.launch_gaps import LaunchGaps
from tests.benchmarks.memory_adapters import MemoryReader
from tests.benchmarks.our_engine import Settings
from tests.benchmarks.report import Report, emit, emit_machine
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.speculation_sides import (
    OURS,
    Case,
    Figures,
    Round,
    check_site_packages,
    compare,
    run_vllm,
)

EMBEDDING_SIZE = 16.0  # the standard deviation of its numbers
RANK = 16  # of the adapters of --shape
_MATCH_LENGTH = 4  # of a replayed draft: always the same


@dataclass(slots=True)
class ReplayedDrafter:
    """Implements `drafts.Drafter`: the recorded output of the request, each token of which is right
    with one probability."""

    acceptance: float
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def propose(self, sequence: Choice, limit: int) -> Draft | None:
        output = self.outputs.get(sequence.request.request_id, ())
        right = output[sequence.num_output_tokens :][:limit]
        ids = tuple(
            token_id if self.draw.random() < self.acceptance else (token_id + 1) % 1000
            for token_id in right
        )
        return Draft(ids, _MATCH_LENGTH) if ids else None

    def learn(self) -> None: ...

    def end(self, sequence: Choice) -> None: ...


@dataclass(frozen=True, slots=True)
class Timing:
    outputs: dict[str, tuple[int, ...]]
    num_steps: int
    seconds: float
    cpu_s: float  # of this process: with one thread, whatever else the machine does
    decode_s: float  # after the first token of every request
    # Of the steps that began with all places taken by requests that had tokens: neither prompts nor
    # the end of a round, when the luck of the last request leaves the others' places empty.
    full_tokens: int
    full_s: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

    @property
    def full_rate(self) -> float:
        """Tokens per second of full steps; not a number without any."""
        return self.full_tokens / self.full_s if self.full_s else math.nan


def run(engine: Engine, requests: Sequence[Request], concurrency: int) -> Timing:
    """Steps until all requests have ended, with so many of them at a time."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting, num_open = list(reversed(requests)), 0
    first_step = engine.load().num_steps
    begun: set[str] = set()
    decode_began_s, full_tokens, full_s, num_ended = 0.0, 0, 0.0, 0
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    step_began_s = began_s
    while waiting or engine.has_work:
        while waiting and num_open < concurrency:
            engine.add_request(waiting.pop())
            num_open += 1
        is_full = len(begun) - num_ended == concurrency
        step = engine.step()
        step_began_s, last_s = time.perf_counter(), step_began_s
        if is_full:
            full_tokens += sum(len(output.token_ids) for output in step.outputs)
            full_s += step_began_s - last_s
        for output in step.outputs:
            assert output.error is None, output.error
            outputs[output.request_id] += output.token_ids
            num_open -= output.finish_reason is not None
            num_ended += output.finish_reason is not None
            if output.request_id not in begun:
                begun.add(output.request_id)
                decode_began_s = time.perf_counter()
    ended_s = time.perf_counter()
    return Timing(
        {request_id: tuple(ids) for request_id, ids in outputs.items()},
        engine.load().num_steps - first_step,
        ended_s - began_s,
        time.process_time() - began_cpu_s,
        ended_s - decode_began_s,
        full_tokens,
        full_s,
    )


class Variant:
    """One engine; it keeps over all rounds what it has learned."""

    def __init__(
        self,
        mode: SpeculationMode,
        config: EngineConfig,
        runner: ModelRunner,
        drafter: Drafter | None,
        gaps: LaunchGaps | None = None,
    ) -> None:
        """`gaps`: of the runner; None: it has no device."""
        self.mode = mode
        self.engine = Engine(replace(config, speculation=mode), runner, drafter=drafter)
        self.timings: list[Timing] = []
        self.gaps_s: list[float] = []
        self._gaps = gaps
        self._drafted, self._accepted = 0, 0

    def run(self, requests: Sequence[Request], concurrency: int) -> Timing:
        self.timings.append(run(self.engine, requests, concurrency))
        if self._gaps is not None:
            self.gaps_s += self._gaps.take()
        return self.timings[-1]

    def acceptance(self) -> tuple[int, int]:
        """Returns the tokens of drafts, and of these the accepted, since the last call."""
        load = self.engine.load()
        found = load.num_draft_tokens - self._drafted, load.num_accepted_tokens - self._accepted
        self._drafted, self._accepted = load.num_draft_tokens, load.num_accepted_tokens
        return found


def measure(
    name: str,
    variants: Sequence[Variant],
    rounds: Sequence[Sequence[Request]],
    concurrency: int,
    drafter: ReplayedDrafter | None,
    **facts: object,
) -> None:
    """Runs the rounds, whose variants take turns, and prints the medians of all but the first.
    `facts`: more fields of the lines."""
    for variant in variants:
        variant.timings.clear()
        variant.gaps_s.clear()
        variant.acceptance()
    num_different = 0
    for number, requests in enumerate(rounds):
        expected = variants[0].run(requests, concurrency).outputs
        if drafter is not None:
            drafter.outputs = expected
        others = list(variants[1:])
        for variant in others if number % 2 else reversed(others):
            found = variant.run(requests, concurrency).outputs
            num_different += sum(found[key] != ids for key, ids in expected.items())
    plain = variants[0].timings
    for variant in variants:
        drafted, accepted = variant.acceptance()
        pairs = list(zip(variant.timings, plain, strict=True))
        later = pairs[1:] or pairs
        emit(
            workload=name,
            **facts,
            concurrency=concurrency,
            speculation=variant.mode,
            output_tokens=variant.timings[-1].num_tokens,
            tokens_per_step=_median([t.num_tokens / t.num_steps for t, _ in later]),
            tokens_per_s=_median([t.num_tokens / t.seconds for t, _ in later]),
            tokens_per_cpu_s=_median([t.num_tokens / t.cpu_s for t, _ in later]),
            speedup=_median([other.seconds / t.seconds for t, other in later]),
            decode_speedup=_median([other.decode_s / t.decode_s for t, other in later]),
            full_speedup=_median([t.full_rate / other.full_rate for t, other in later]),
            cpu_speedup=_median([other.cpu_s / t.cpu_s for t, other in later]),
            first_round_speedup=round(plain[0].seconds / variant.timings[0].seconds, 3),
            draft_tokens=drafted,
            accepted_tokens=accepted,
            acceptance=round(accepted / drafted, 3) if drafted else None,
            launch_gap_ms=_median([1000 * s for s in variant.gaps_s]) if variant.gaps_s else None,
            different_answers=num_different,
        )


def _median(values: Sequence[float]) -> float | None:
    median = statistics.median(values)
    return None if math.isnan(median) else round(median, 3)


def measure_demo(arguments: argparse.Namespace) -> None:
    base = arguments.model or prepared_base()
    is_cuda = arguments.device == "cuda"
    cases = [
        Case(adapter, concurrency, list(demo_rounds(base, adapter, arguments.rounds, count)))
        for adapter in arguments.workloads.split(",")
        for concurrency in _numbers(arguments.concurrency)
        for count in [max(arguments.requests, 2 * concurrency)]
    ]
    # First, while no engine of ours has the device's memory.
    vllm = run_vllm(cases, base, arguments, Report()) if arguments.vllm else {}
    config = EngineConfig(
        model_path=str(base),
        base_digest="speculation",
        device="cuda" if is_cuda else "cpu",
        dtype="bfloat16" if is_cuda else "float32",
        max_model_len=2048,
        enable_prefix_caching=False,  # the variants share the blocks' memory
        num_threads=arguments.threads,
        num_speculative_tokens=arguments.draft_tokens,
        speculation=arguments.modes[-1],  # of the runner: with room for drafts
    )
    runner = ModelRunner(config)
    for name in ADAPTERS:
        runner.load_adapter(name, ADAPTERS_DIR / name)
    ours: dict[str, Figures] = {f"{OURS} {mode}": {} for mode in arguments.modes}
    for case in cases:
        variants = [Variant(mode, config, runner, None) for mode in arguments.modes]
        measure(case.workload, variants, case.rounds, case.concurrency, None)
        for variant in variants:
            ours[f"{OURS} {variant.mode}"][case.key] = [
                Round(t.num_tokens, t.seconds, t.outputs) for t in variant.timings
            ]
    if vllm:
        compare(ours | vllm, Report())


def measure_shape(arguments: argparse.Namespace) -> None:
    draw = random.Random(1)
    counts = _numbers(arguments.distinct)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            SHAPES[arguments.shape],
            Path(folder),
            arguments.device or "cuda",
            others={
                "num_speculative_tokens": arguments.draft_tokens,
                "speculation": arguments.modes[-1],  # of the runner: with room for drafts
            },
        )
        config = settings.config("on" if max(counts) else "off")
        runner = ModelRunner(config)
        gaps = LaunchGaps(runner._steps) if isinstance(runner._steps, DeviceSteps) else None
        weights = runner._rank.weights
        weights.head.copy_(weights.embedding.roll(1, 0))
        # What the layers add, of the size 2 each, must not hide it.
        weights.embedding.mul_(EMBEDDING_SIZE / weights.embedding[:1000].float().std())
        reader = MemoryReader(runner)
        reader.prepare(RANK)
        for index in range(max(counts)):
            reader.read(f"r{RANK}-{index}", "")()
        params = SamplingParams(
            max_tokens=arguments.output_tokens, temperature=0.0, ignore_eos=True
        )
        for concurrency, count in product(_numbers(arguments.concurrency), counts):
            for acceptance in map(float, arguments.acceptance.split(",")):
                drafter = ReplayedDrafter(acceptance)
                variants = [
                    Variant(mode, config, runner, drafter, gaps) for mode in arguments.modes
                ]
                rounds = [
                    [
                        Request(
                            f"r{i}",
                            tuple(draw.choices(range(10, 1000), k=256)),
                            params,
                            f"r{RANK}-{i % count}" if count else None,
                        )
                        for i in range(concurrency)
                    ]
                    for _ in range(arguments.rounds)
                ]
                measure(
                    arguments.shape,
                    variants,
                    rounds,
                    concurrency,
                    drafter,
                    adapters=count,
                    draft_acceptance=acceptance,
                )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="sql,extract,tools,base")
    parser.add_argument("--concurrency", default="1,4,16", help="requests at a time")
    parser.add_argument("--requests", type=int, default=8, help="of a round, at least")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--modes", nargs="+", default=["off", "auto", "suffix"])
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights, replayed drafts")
    parser.add_argument("--acceptance", default="0.6", help="of a replayed draft's token, by comma")
    parser.add_argument("--distinct", default="0", help="adapters of --shape, numbers by comma")
    parser.add_argument("--output-tokens", type=int, default=128, help="of --shape")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu; of --shape: cuda")
    parser.add_argument(
        "--model", type=Path, help="folder of the demo's base, if not prepared here"
    )
    parser.add_argument("--vllm", metavar="SITE_PACKAGES", help="folder that holds vLLM")
    parser.add_argument("--vllm-timeout", type=float, default=400.0, help="seconds a process")
    return parser


def main(given: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(given)
    if arguments.vllm:
        if arguments.shape is not None or arguments.device != "cuda":
            parser.error("--vllm: only with --device cuda, without --shape")
        try:
            check_site_packages(arguments.vllm)
        except FileNotFoundError as error:
            parser.error(str(error))
    if arguments.modes[0] != "off" or not {*arguments.modes} <= {*get_args(SpeculationMode)}:
        parser.error(f"--modes: off, then others of {', '.join(get_args(SpeculationMode))}")
    emit_machine("speculation", arguments=sys.argv[1:])
    if arguments.shape is None:
        measure_demo(arguments)
    else:
        measure_shape(arguments)


if __name__ == "__main__":
    main()
