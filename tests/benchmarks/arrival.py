"""An adapter arrives from host memory while others decode: the longest pause that they see.

32 requests decode throughout; one that comes to its end is replaced between two newcomers, never
beside one. Newcomers come one at a time: of the base (the cost of any arrival), and of an adapter
that is on the host but not on the device. The pause is the longest gap between two tokens of any
other request from the submission to the newcomer's third token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import pairwise

from engine.types import Request
from tests.benchmarks.cases import AdapterSpec, Case
from tests.benchmarks.our_engine import STUCK_S, OurEngine, Timeline
from tests.benchmarks.report import percentile

NUM_OTHERS = 32
RANK = 16
FIRST_INDEX = 1000  # no case of the offline workload has used these adapters
NEWCOMER_TOKENS = 8
QUIET_STEPS = 40  # between two arrivals
_MARGIN_TOKENS = 64  # of a newcomer's wait for its copy and its prompt, on top of its tokens


class Others:
    """The requests that decode throughout."""

    def __init__(self, ours: OurEngine, timeline: Timeline, count: int, prompt: int) -> None:
        limit = ours.engine.model_limits.max_model_len
        self._ours, self._timeline = ours, timeline
        self._prompts = ours.prompts(Case("on", count, 0, prompt=prompt), 0)
        self._length = limit - prompt
        self._running: list[Request] = []
        self.known: set[str] = set()

    async def start(self) -> None:
        self._running = [self._ours.request(p, self._length, None) for p in self._prompts]
        await self._submit(self._running)

    async def renew(self, tokens: int) -> bool:
        """Replaces the requests that have fewer tokens left. Returns True if there were some; they
        are running then."""
        for place, request in enumerate(self._running):
            if self._length - len(self._timeline.times_s[request.request_id]) < tokens:
                self._stop(request)
                self._running[place] = self._ours.request(
                    request.prompt_token_ids, self._length, None
                )
        new = [r for r in self._running if r.request_id not in self.known]
        await self._submit(new)
        times = self._timeline.times_s
        await _until(self._timeline, lambda: all(len(times[r.request_id]) > 2 for r in new))
        return bool(new)

    def stop(self) -> None:
        for request in self._running:
            self._stop(request)

    def check_running(self) -> None:
        """Raises RuntimeError if one of them has come to its end by itself."""
        ended = [
            request.request_id
            for request in self._running
            if len(self._timeline.times_s[request.request_id]) >= self._length
        ]
        if ended:
            raise RuntimeError(f"{len(ended)} of the others ended beside a newcomer: {ended[0]}")

    async def _submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._timeline.wanted += 1
            self.known.add(request.request_id)
            await self._ours.engine.submit(request)

    def _stop(self, request: Request) -> None:
        self._timeline.stopped.add(request.request_id)
        self._ours.engine.abort(request.request_id)


async def measure_arrivals(
    ours: OurEngine, count: int, *, is_tiny: bool = False
) -> dict[str, object]:
    """Measures `count` newcomers of each kind, in turns, all while the same number of requests
    decodes."""
    num_others, quiet = (4, 4) if is_tiny else (NUM_OTHERS, QUIET_STEPS)
    adapters = [AdapterSpec(RANK, FIRST_INDEX + i) for i in range(count)]
    await ours.load_adapters(adapters)
    prompt = 64 if is_tiny else 256
    wait_tokens = quiet + NEWCOMER_TOKENS + _MARGIN_TOKENS
    pauses: dict[str, list[float]] = {"base": [], "adapter": []}
    first_s: dict[str, list[float]] = {"base": [], "adapter": []}
    renewals = 0
    with ours.watch(2 * count) as timeline:
        others = Others(ours, timeline, num_others, prompt)
        await others.start()
        await wait_for_steps(timeline, 2 * quiet)
        usual = _gaps(timeline, others.known, timeline.steps_s[quiet // 2], timeline.steps_s[-1])
        for i, spec in enumerate(adapters):
            for kind, adapter in (("base", None), ("adapter", spec.digest)):
                if await others.renew(wait_tokens):
                    renewals += 1
                    await wait_for_steps(timeline, quiet)
                case = Case("on", 1, 0, prompt=prompt)
                ids = ours.prompts(case, 2 * i + bool(adapter))[0]
                newcomer = ours.request(ids, NEWCOMER_TOKENS, adapter)
                pause_s, ttft_s = await _pause(ours, timeline, others.known, newcomer)
                others.check_running()
                pauses[kind].append(pause_s)
                first_s[kind].append(ttft_s)
                await wait_for_steps(timeline, quiet)
        others.stop()
    for spec in adapters:
        await ours.engine.unload_adapter(spec.digest)
    p99 = percentile(usual, 99)
    return {
        "others": num_others,
        "renewals": renewals,
        "usual_gap_ms": {"p50": _ms(percentile(usual, 50)), "p99": _ms(p99)},
        "pause_base_ms": [_ms(value) for value in pauses["base"]],
        "pause_adapter_ms": [_ms(value) for value in pauses["adapter"]],
        "ttft_base_ms": [_ms(value) for value in first_s["base"]],
        "ttft_adapter_ms": [_ms(value) for value in first_s["adapter"]],
        "worst_adapter_to_usual_p99": round(max(pauses["adapter"]) / p99, 3),
        "worst_base_to_usual_p99": round(max(pauses["base"]) / p99, 3),
    }


async def _pause(
    ours: OurEngine, timeline: Timeline, known: set[str], newcomer: Request
) -> tuple[float, float]:
    """Returns the longest gap of the others, and the newcomer's time to its first token."""
    began_s = time.perf_counter()
    await ours.engine.submit(newcomer)
    times = timeline.times_s[newcomer.request_id]
    await _until(timeline, lambda: len(times) >= 3)
    return max(_gaps(timeline, known, began_s, times[2])), times[0] - began_s


async def wait_for_steps(timeline: Timeline, count: int) -> None:
    goal = len(timeline.steps_s) + count
    await _until(timeline, lambda: len(timeline.steps_s) >= goal)


async def wait_for_first_tokens(timeline: Timeline) -> None:
    await _until(timeline, lambda: len(timeline.times_s) >= timeline.wanted)


async def _until(timeline: Timeline, condition: Callable[[], bool]) -> None:
    deadline_s = time.perf_counter() + STUCK_S
    while not condition():
        if timeline.errors:
            raise RuntimeError(f"a request failed: {timeline.errors[0]}")
        if time.perf_counter() > deadline_s:
            raise TimeoutError("the engine makes no steps")
        await asyncio.sleep(0.001)


def _gaps(timeline: Timeline, known: set[str], first_s: float, last_s: float) -> list[float]:
    """Returns the gaps of the known requests that overlap the window."""
    return [
        b - a
        for request_id in tuple(known)
        for a, b in pairwise(tuple(timeline.times_s[request_id]))
        if b >= first_s and a <= last_s
    ]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
