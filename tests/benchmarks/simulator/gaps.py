"""The gaps between tokens while prompts arrive: the real engine and scheduler over a device that is
a formula, in virtual time.

    burst   n requests at once, prompts of 256 tokens, outputs of 128, as `tests.benchmarks.serve`
    open    arrivals at random times, prompts of 512 to 2,048 tokens, outputs of 64 to 192
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Engine
from engine.kv_layout import kv_layout
from engine.types import Request, Sample, SamplingParams, ScheduledBatch
from tests.benchmarks.report import Report, percentile, print_table, spread
from tests.benchmarks.simulator.setting import Setting
from tests.timed_engine import TimedModel, TimedPool, Times

OFF = 1e6  # as `max_decode_slowdown`: no bound but `max_num_batched_tokens`
_SINGLES = 8  # requests before those that count: the engine measures its steps
_REST_S = 5.0
_NOISE = 0.02  # standard deviation of a step's duration, as a share
_SOURCE = "2026-11-22-even_streams-h200.jsonl: the measured steps of 256 streams"


def h200_step_s(num_prompt: int, num_decoding: int) -> float:
    """Returns the seconds of a step of the Llama-3-8B shape, whose larger products fill the device
    better."""
    tokens = num_prompt + num_decoding
    if tokens < 512:
        return 0.0042 + 24.5e-6 * tokens
    return 0.0025 + 22.6e-6 * tokens


@dataclass(slots=True)
class VirtualClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(frozen=True, slots=True)
class _Step:
    clock: VirtualClock
    due_s: float
    samples: tuple[Sample, ...]

    def draw(self) -> None: ...

    def collect(self) -> tuple[Sample, ...]:
        self.clock.now_s = max(self.clock.now_s, self.due_s)
        return self.samples


class VirtualRunner:
    """A device that runs ahead; `steps` are its (prompt tokens, decoding sequences, seconds)."""

    runs_ahead = True
    num_blocks = 43_342
    kv_layout = kv_layout((None,), 16, 8192)
    max_model_len = 8192
    max_draws = 256
    graph_sizes = ()
    num_late_compilations = 0
    kv_copies = None

    def __init__(
        self,
        clock: VirtualClock,
        seed: int,
        noise: float = _NOISE,
        step_s: Callable[[int, int], float] = h200_step_s,
    ) -> None:
        """`step_s`: the seconds of a step of so many prompt tokens and decoding sequences."""
        self.model_config = TimedModel()
        self.adapters = TimedPool(Times(0.0, 0.0, 0.0, 0.0, 0.0, 1, 1, 1))
        self.steps: list[tuple[int, int, float]] = []
        self._clock = clock
        self._draw = random.Random(seed)
        self._noise = noise
        self._step_s = step_s
        self._due_s = 0.0

    def launch(self, batch: ScheduledBatch) -> _Step:
        num_decoding = batch.num_decoding
        num_prompt = batch.num_tokens - num_decoding
        seconds = self._step_s(num_prompt, num_decoding)
        seconds *= self._draw.lognormvariate(0.0, self._noise)
        self.steps.append((num_prompt, num_decoding, seconds))
        self._due_s = max(self._due_s, self._clock.now_s) + seconds
        samples = tuple(Sample(64 if item.samples else None) for item in batch.sequences)
        return _Step(self._clock, self._due_s, samples)

    def is_out_of_memory(self, error: Exception) -> bool:
        return False

    def free_cache(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class Seen:
    """The token times and the arrival of each request, and the device's steps."""

    times_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    arrived_s: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, int, float]] = field(default_factory=list)

    def gaps_s(self) -> list[float]:
        return [b - a for times in self.times_s.values() for a, b in pairwise(times)]

    def ttft_s(self) -> list[float]:
        return [times[0] - self.arrived_s[name] for name, times in self.times_s.items()]

    def tokens_per_s(self) -> float:
        last_s = max(times[-1] for times in self.times_s.values())
        return sum(map(len, self.times_s.values())) / (last_s - min(self.arrived_s.values()))


def run_engine(
    arrivals: Sequence[Arrival],
    slowdown: float,
    max_tokens: int,
    seed: int = 0,
    step_s: Callable[[int, int], float] = h200_step_s,
    num_singles: int = _SINGLES,
) -> Seen:
    """Runs the arrivals, ordered by time, after some single requests that do not count. `step_s`:
    of the device, as `VirtualRunner` has it."""
    clock = VirtualClock()
    runner = VirtualRunner(clock, seed, step_s=step_s)
    config = EngineConfig(
        "",
        "base",
        max_num_batched_tokens=max_tokens,
        max_num_seqs=256,
        max_decode_slowdown=slowdown,
    )
    engine, draw, seen = Engine(config, runner, clock), random.Random(seed), Seen()
    singles = [Arrival(0.4 * i, 256, 64) for i in range(num_singles)]
    start_s = 0.4 * num_singles + _REST_S
    due = singles + [Arrival(start_s + a.at_s, a.num_prompt, a.num_output) for a in arrivals]
    number = 0
    while number < len(due) or engine.has_work:
        if not engine.has_work:
            clock.now_s = max(clock.now_s, due[number].at_s)
        while number < len(due) and due[number].at_s <= clock.now_s:
            one = due[number]
            prompt = tuple(draw.randrange(256) for _ in range(one.num_prompt))
            params = SamplingParams(max_tokens=one.num_output, ignore_eos=True)
            engine.add_request(Request(str(number), prompt, params))
            if number >= num_singles:
                seen.arrived_s[str(number)] = one.at_s
            number += 1
        for output in engine.step().outputs:
            if output.request_id in seen.arrived_s:
                seen.times_s[output.request_id].append(clock.now_s)
    seen.steps = runner.steps
    return seen


def burst(num_streams: int) -> list[Arrival]:
    return [Arrival(0.0, 256, 128)] * num_streams


def open_loop(rate: float, count: int, seed: int = 1) -> list[Arrival]:
    draw, now_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += draw.expovariate(rate)
        arrivals.append(Arrival(now_s, draw.randint(512, 2048), draw.randint(64, 192)))
    return arrivals


def gaps(setting: Setting, report: Report, picture: Path | None) -> None:
    report.emit(part="steps", source=_SOURCE)
    usual = EngineConfig("", "").max_decode_slowdown
    loads = [(f"burst {n}", burst(n)) for n in (32, 128, 256)]
    loads += [(f"open {r}/s", open_loop(r, setting.count(400))) for r in (10, 20, 30)]
    rows = []
    for name, arrivals in loads:
        for max_tokens, slowdown in ((8192, OFF), (2048, OFF), (2048, usual), (8192, usual)):
            seen = run_engine(arrivals, slowdown, max_tokens, setting.seed)
            gap = spread([1000 * s for s in seen.gaps_s()], 2)
            ttft = seen.ttft_s()
            line = {
                "load": name,
                "max_num_batched_tokens": max_tokens,
                "max_decode_slowdown": None if slowdown == OFF else slowdown,
                "gap_ms": gap,
                "gap_p99_to_p50": round(gap["p99"] / gap["p50"], 2),
                "output_tokens_per_s": round(seen.tokens_per_s(), 1),
                "ttft_ms": spread([1000 * s for s in ttft], 1),
                "ttft_p95_ms": round(1000 * percentile(ttft, 95), 1),
            }
            report.emit(part="run", **line)
            bound = "-" if slowdown == OFF else slowdown
            rate, first = line["output_tokens_per_s"], line["ttft_ms"]
            rows.append((name, max_tokens, bound, *gap.values(), rate, *first.values()))
    head = ("load", "tokens", "bound", "gap p50", "p99", "max", "tok/s", "ttft p50", "p99", "max")
    print_table(head, rows)
