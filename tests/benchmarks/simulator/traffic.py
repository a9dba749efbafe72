"""The requests of a simulation: arrivals, popularity, lengths, shared prefixes, sessions, tenants.

No trace is in the repository; the defaults are parameters that papers publish of theirs:
    arrivals    Gamma gaps (coefficient of variation above 1: bursts), as S-LoRA (arXiv 2311.03285)
                and BurstGPT (arXiv 2401.17644) model them; a diurnal curve over it
    popularity  a power law over adapters, as S-LoRA and dLoRA draw them from Azure's function trace
    lengths     log-normal: Azure's conversation trace (Splitwise, arXiv 2311.18677) has medians of
                1,020 prompt and 129 output tokens; ShareGPT (vLLM, arXiv 2309.06180) means of 161
                and 338
Everything is a function of the seed.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from tests.benchmarks.simulator.calls import Call

_SESSION_BITS = 24  # a session's chunks are numbered: its history is a run of numbers


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: float
    sigma: float
    lowest: int = 1
    highest: int = 1 << 20

    @property
    def mean(self) -> float:
        """The mean without the limits."""
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, rng: random.Random) -> int:
        value = self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        return int(min(self.highest, max(self.lowest, value)))


@dataclass(frozen=True, slots=True)
class Change:
    """From `at_s` on, an adapter is asked for `factor` times as often as its place says."""

    at_s: float
    adapter: int
    factor: float


@dataclass(frozen=True, slots=True)
class TrafficArgs:
    num_requests: int
    rate: float  # requests a second, on the mean
    seed: int = 0
    burstiness: float = 1.0  # coefficient of variation of the gaps; 1: Poisson
    # (seconds, share of the rate) of a curve that repeats after its last point; linear between
    curve: tuple[tuple[float, float], ...] = ()
    num_adapters: int = 100
    popularity: float = 1.0  # exponent of the power law; 0: all alike
    drift_s: float = 0.0  # every so often the popular ones change places; 0: never
    changes: tuple[Change, ...] = ()
    base_share: float = 0.0  # requests without adapter
    ranks: tuple[int, ...] = (16,)  # of adapters, in turns
    system: LogNormal = LogNormal(512, 0.6, 32, 2048)  # an adapter's own system prompt
    message: LogNormal = LogNormal(200, 1.0, 8, 3000)
    output: LogNormal = LogNormal(129, 1.0, 1, 1000)
    turns: float = 3.0  # of a session, on the mean; 1: none has a second
    think: LogNormal = LogNormal(20, 0.8, 1)  # seconds from one turn to the next
    max_context: int = 6000  # a session that is longer begins anew
    chunk: int = 32
    tenants: tuple[float, ...] = (1.0,)  # shares


@dataclass(slots=True)
class _Session:
    number: int
    adapter: int | None
    history: int = 0  # tokens after the system prompt


@dataclass(slots=True)
class Traffic:
    args: TrafficArgs
    _rng: random.Random = field(init=False)
    _systems: list[int] = field(init=False)  # tokens, by adapter
    _prefixes: list[tuple[int, ...]] = field(init=False)
    _order: list[int] = field(init=False)  # adapters by popularity

    def __post_init__(self) -> None:
        args = self.args
        self._rng = random.Random(args.seed)
        self._systems = [args.system.draw(self._rng) for _ in range(args.num_adapters + 1)]
        self._prefixes = [
            tuple(_shared(adapter, i) for i in range(tokens // args.chunk))
            for adapter, tokens in enumerate(self._systems)
        ]
        self._order = list(range(args.num_adapters))
        self._rng.shuffle(self._order)

    def place(self, number: int) -> int:
        """The adapter that is the number-th most popular one at the start."""
        return self._order[number]

    def calls(self) -> Iterator[Call]:
        args, rng = self.args, self._rng
        weights = [(place + 1) ** -args.popularity for place in range(args.num_adapters)]
        order = list(self._order)
        totals = list(accumulate(weights))
        changes = list(args.changes)
        next_drift_s = args.drift_s or math.inf
        again: list[tuple[float, int, _Session]] = []  # sessions by their next turn's time
        share_again = 1 - 1 / max(1.0, args.turns)
        tenant_totals = list(accumulate(args.tenants))
        num_sessions = 0
        for index, now_s in enumerate(arrival_times(args)):
            while changes and changes[0].at_s <= now_s:
                change = changes.pop(0)
                weights[order.index(change.adapter)] *= change.factor
                totals = list(accumulate(weights))
            if now_s >= next_drift_s:
                next_drift_s += args.drift_s
                _drift(order, rng)
            if again and again[0][0] <= now_s and rng.random() < share_again:
                session = heapq.heappop(again)[2]
            else:
                adapter = None
                if args.num_adapters and rng.random() >= args.base_share:
                    adapter = order[bisect(totals, rng.random() * totals[-1])]
                session = _Session(num_sessions, adapter)
                num_sessions += 1
            call = self._call(index, now_s, session)
            if len(tenant_totals) > 1:
                place = bisect(tenant_totals, rng.random() * tenant_totals[-1])
                call.tenant = f"tenant-{place}"
            if args.turns > 1:
                heapq.heappush(again, (now_s + args.think.draw(rng), index, session))
            yield call

    def mean_tokens(self, count: int = 2000) -> tuple[float, float]:
        """(prompt, output) of the first requests: what the traffic asks of an engine, caches
        aside."""
        sample = Traffic(self.args).calls()
        some = [next(sample) for _ in range(min(count, self.args.num_requests))]
        prompts = sum(call.num_prompt for call in some) / len(some)
        return prompts, sum(call.num_output for call in some) / len(some)

    def _call(self, index: int, now_s: float, session: _Session) -> Call:
        args, rng = self.args, self._rng
        number = args.num_adapters if session.adapter is None else session.adapter
        system = self._systems[number]
        message, output = args.message.draw(rng), args.output.draw(rng)
        if system + session.history + message + output > args.max_context:
            session.history = 0
            session.number += 1 << 40  # its old chunks are not asked for again
        prompt = system + session.history + message
        shared = self._prefixes[number]
        first = session.number << _SESSION_BITS
        num_own = prompt // args.chunk - len(shared)
        num_after = (prompt + output - 1) // args.chunk - len(shared)
        session.history += message + output
        return Call(
            index,
            now_s,
            prompt,
            output,
            None if session.adapter is None else name_of(session.adapter),
            args.ranks[number % len(args.ranks)],
            (*shared, *range(first, first + num_own)),
            (*shared, *range(first, first + num_after)),
            f"session-{session.number}" if args.turns > 1 else None,
        )


def name_of(adapter: int) -> str:
    return f"adapter-{adapter:05}"


def arrival_times(args: TrafficArgs) -> Iterator[float]:
    """Gamma gaps of unit mean, stretched where the curve is low."""
    draw = np.random.default_rng(args.seed)
    shape = args.burstiness**-2
    gaps = draw.gamma(shape, 1 / shape, args.num_requests)
    due = np.cumsum(gaps) / args.rate  # in units of mean seconds
    if args.curve:
        due = _bend(due, args.curve)
    yield from due.tolist()


def _bend(due: np.ndarray, curve: Sequence[tuple[float, float]]) -> np.ndarray:
    """The times at which the curve's integral reaches `due`: its value is a share of the rate."""
    times = np.asarray([point[0] for point in curve])
    grid = np.linspace(0, times[-1], 2001)
    shares = np.interp(grid, times, [point[1] for point in curve])
    steps = (shares[1:] + shares[:-1]) / 2 * np.diff(grid)
    integral = np.concatenate([[0.0], np.cumsum(steps)])
    rounds, rest = np.divmod(due, integral[-1])
    return np.asarray(rounds * times[-1] + np.interp(rest, integral, grid))


def _shared(adapter: int, index: int) -> int:
    return -((adapter << _SESSION_BITS) + index + 1)


def _drift(order: list[int], rng: random.Random) -> None:
    """A tenth of them change places, popular ones too."""
    places = rng.sample(range(len(order)), max(2, len(order) // 10))
    moved = [order[place] for place in places]
    rng.shuffle(moved)
    for place, adapter in zip(places, moved, strict=True):
        order[place] = adapter
