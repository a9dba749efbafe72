"""An adapter arrives from host memory while others decode: the longest pause that they see.

32 requests decode; now and then one more comes, once of the base (what an arrival costs anyway) and
once of an adapter that is on the host but not on the device. The pause is the longest gap between
two tokens of any other request from the submission to the newcomer's third token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise

from engine.types import Request
from tests.benchmarks.cases import Case
from tests.benchmarks.our_engine import STUCK_S, OurEngine, Timeline
from tests.benchmarks.report import percentile

NUM_OTHERS = 32
RANK = 16
NEWCOMER_TOKENS = 8
QUIET_STEPS = 40  # between two arrivals


async def measure_arrivals(
    ours: OurEngine, count: int, *, is_tiny: bool = False
) -> dict[str, object]:
    """`count` of each kind, in turns, all while the same requests decode."""
    num_others, quiet = (4, 4) if is_tiny else (NUM_OTHERS, QUIET_STEPS)
    names = [f"arrival-{i}" for i in range(count)]
    ours.reader.prepare(RANK)
    for name in names:
        await ours.engine.load_adapter(name, name, str(RANK))
    case = Case("on", num_others, 0, prompt=64 if is_tiny else 256)
    length = 2 * (quiet + NEWCOMER_TOKENS) * (2 * count + 3)  # they outlive all newcomers
    pauses: dict[str, list[float]] = {"base": [], "adapter": []}
    with ours.watch(num_others + 2 * count) as timeline:
        others = [ours.request(p, length, None) for p in ours.prompts(case, 0)]
        known = {request.request_id for request in others}
        await asyncio.gather(*(ours.engine.submit(request) for request in others))
        await wait_for_steps(timeline, 2 * quiet)
        usual = _gaps(timeline, known, timeline.steps_s[quiet // 2], timeline.steps_s[-1])
        for i, name in enumerate(names):
            for kind, adapter in (("base", None), ("adapter", name)):
                prompt = ours.prompts(Case("on", 1, 0, prompt=case.prompt), 2 * i + bool(adapter))
                newcomer = ours.request(prompt[0], NEWCOMER_TOKENS, adapter)
                pauses[kind].append(await _pause(ours, timeline, known, newcomer))
                await wait_for_steps(timeline, quiet)
        for request in others:
            ours.engine.abort(request.request_id)
            timeline.wanted -= 1
    for name in names:
        await ours.engine.unload_adapter(name)
    p99 = percentile(usual, 99)
    return {
        "others": num_others,
        "usual_gap_ms": {"p50": _ms(percentile(usual, 50)), "p99": _ms(p99)},
        "pause_base_ms": [_ms(value) for value in pauses["base"]],
        "pause_adapter_ms": [_ms(value) for value in pauses["adapter"]],
        "worst_adapter_to_usual_p99": round(max(pauses["adapter"]) / p99, 3),
        "worst_base_to_usual_p99": round(max(pauses["base"]) / p99, 3),
    }


async def _pause(ours: OurEngine, timeline: Timeline, known: set[str], newcomer: Request) -> float:
    began_s = time.perf_counter()
    await ours.engine.submit(newcomer)
    times = timeline.times_s[newcomer.request_id]
    await _until(timeline, lambda: len(times) >= 3)
    return max(_gaps(timeline, known, began_s, times[2]))


async def wait_for_steps(timeline: Timeline, count: int) -> None:
    goal = len(timeline.steps_s) + count
    await _until(timeline, lambda: len(timeline.steps_s) >= goal)


async def _until(timeline: Timeline, condition: Callable[[], bool]) -> None:
    deadline_s = time.perf_counter() + STUCK_S
    while not condition():
        if timeline.errors:
            raise RuntimeError(f"a request failed: {timeline.errors[0]}")
        if time.perf_counter() > deadline_s:
            raise TimeoutError("the engine makes no steps")
        await asyncio.sleep(0.001)


def _gaps(timeline: Timeline, known: set[str], first_s: float, last_s: float) -> list[float]:
    """Of the known requests, those that overlap the window."""
    return [
        b - a
        for request_id in known
        for a, b in pairwise(tuple(timeline.times_s[request_id]))
        if b >= first_s and a <= last_s
    ]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
