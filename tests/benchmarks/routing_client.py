"""The clients of `routing`: requests at the moments that the traffic says, whatever has become of
those before; when the first token of each came.

A process of its own replays a part of them. A prompt is made of its prefixes' names, so that
prompts share tokens where the simulator's share chunks.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache

from tests.benchmarks.children import module
from tests.benchmarks.serve_client import Stream, connect
from tests.benchmarks.simulator.agreement import Plan
from tests.benchmarks.simulator.calls import Call

START_DELAY_S = 4.0  # for the processes to start and make their prompts
_IDS = range(34, 90)  # letters of the rig's tokenizer


@dataclass(frozen=True, slots=True)
class Part:
    """Every num_parts-th request of a plan."""

    plan: Plan
    port: int
    base: str
    part: int
    num_parts: int
    start_s: float  # by the monotonic clock, which is the machine's


@dataclass(slots=True)
class Seen:
    """The outcomes of the requests of a part."""

    ttft_s: list[float] = field(default_factory=list)
    late_s: float = 0.0  # the latest that a request was sent
    failures: list[str] = field(default_factory=list)


@lru_cache(20000)
def _tokens(prefix: int, chunk: int) -> list[int]:
    return random.Random(prefix).choices(_IDS, k=chunk)


def prompt_of(call: Call, chunk: int) -> list[int]:
    tokens = [token for prefix in call.prefixes for token in _tokens(prefix, chunk)]
    rest = random.Random(f"rest {call.index}").choices(_IDS, k=call.num_prompt - len(tokens))
    return tokens + rest


def body_of(base: str, call: Call, chunk: int) -> bytes:
    fields = {
        "model": base if call.adapter is None else f"{base}:{call.adapter}",
        "prompt": prompt_of(call, chunk),
        "max_tokens": call.num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    session = f"x-session-id: {call.session}\r\n" if call.session else ""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"{session}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run_part(part: Part) -> Seen:
    args = part.plan.traffic()
    calls = [call for call in part.plan.calls() if call.index % part.num_parts == part.part]
    bodies = [body_of(part.base, call, args.chunk) for call in calls]
    seen = Seen()
    async with asyncio.TaskGroup() as group:
        for call, body in zip(calls, bodies, strict=True):
            due_s = part.start_s + call.arrived_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            seen.late_s = max(seen.late_s, time.monotonic() - due_s)
            group.create_task(_send(part.port, body, seen))
    return seen


async def _send(port: int, body: bytes, seen: Seen) -> None:
    stream = Stream()
    began_s = time.monotonic()
    reader = await connect(port, stream)
    reader.send(body)
    await reader.done
    if stream.is_complete and not stream.error and " 200 " in stream.status:
        seen.ttft_s.append(stream.times_s[0] - began_s)
    else:
        seen.failures.append(f"{stream.status} {stream.error}"[:200])


async def ask_one(port: int, base: str, num_prompt: int, number: int) -> float:
    """Seconds to the first token of a request that shares nothing, alone in the service."""
    call = Call(-1 - number, 0.0, num_prompt, 1)
    seen = Seen()
    await _send(port, body_of(base, call, 32), seen)
    if seen.failures:
        raise RuntimeError(f"a request failed: {seen.failures[0]}")
    return seen.ttft_s[0]


def run_in_processes(plan: Plan, port: int, base: str, num_processes: int) -> Seen:
    start_s = time.monotonic() + START_DELAY_S
    children = [
        subprocess.Popen(
            module(
                "routing_client",
                json.dumps(asdict(Part(plan, port, base, number, num_processes, start_s))),
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(num_processes)
    ]
    parts: list[Seen] = []
    for child in children:
        output, _ = child.communicate(timeout=900)
        if child.returncode != 0:
            raise RuntimeError(f"a client process ended with {child.returncode}")
        parts.append(Seen(**json.loads(output.splitlines()[-1])))
    return _joined(parts)


def _joined(parts: Sequence[Seen]) -> Seen:
    return Seen(
        [value for part in parts for value in part.ttft_s],
        max(part.late_s for part in parts),
        [text for part in parts for text in part.failures],
    )


def main() -> None:
    fields = json.loads(sys.argv[1])
    part = Part(**(fields | {"plan": Plan(**fields["plan"])}))
    sys.stdout.write(json.dumps(asdict(asyncio.run(run_part(part)))) + "\n")


if __name__ == "__main__":
    main()
