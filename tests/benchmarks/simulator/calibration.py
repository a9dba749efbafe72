"""The sources of the simulator's numbers: measurements that this repository holds, or a file.

`h200()` reads the committed results of the Llama-3-8B shape on an H200. A number without a
measurement is marked `assumed` among the sources.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from engine.admission import EngineLimits
from engine.config import EngineConfig
from tests.benchmarks.simulator.pace import Pace
from tests.benchmarks.simulator.tiers import TierRoom, TierSpeeds

RESULTS = Path(__file__).parent.parent / "results"
ENGINE, PROFILE = "2026-11-21-engine-h200.jsonl", "2026-11-21-profile-h200.jsonl"
# The prompts of that workload have 256 tokens and the outputs 128: the median gap is at half.
_CONTEXT = 256 + 64
_PREFILL_TOKENS, _PREFILL_REQUESTS = 3900, 16


@dataclass(frozen=True, slots=True)
class Calibration:
    name: str
    pace: Pace
    limits: EngineLimits
    runs_ahead: bool
    speeds: TierSpeeds
    room: TierRoom
    # A request's way to the engine and its first token's way back, at idle: HTTP, Serve, the side
    # stream. Measured once, the same for every load.
    front_s: float
    stream_s: float  # from the end of a step to the ingress that reads its frame
    sources: dict[str, str] = field(default_factory=dict)
    max_decode_slowdown: float = EngineConfig("", "").max_decode_slowdown

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens, if nothing else were to be computed."""
        budget = self.limits.max_num_batched_tokens
        return budget / self.pace.step_s(budget, 0, 0)

    def requests_per_s(self, prompt: float, output: float) -> float:
        """Returns the mean of a replica at most: its steps are as full as its rows allow.

        In the time of `output` steps of n sequences n requests come and go, with their prompts.
        """
        n = self.limits.max_num_seqs
        context = min(n * (prompt + output / 2), self.limits.max_kv_tokens)
        n = int(min(n, context / (prompt + output / 2)))
        round_s = output * self.pace.step_s(0, n, int(context)) + n * prompt * self.pace.token_s
        return n / round_s


def from_content(content: object) -> Calibration:
    """Reads the result of `asdict` of a calibration."""
    fields = msgspec.convert(content, _Content)
    return Calibration(
        fields.name,
        Pace(**fields.pace),
        EngineLimits(**fields.limits),
        fields.runs_ahead,
        TierSpeeds(**fields.speeds),
        TierRoom(**fields.room),
        fields.front_s,
        fields.stream_s,
        fields.sources,
        fields.max_decode_slowdown,
    )


def from_file(path: Path) -> Calibration:
    return from_content(json.loads(path.read_text()))


class _Content(msgspec.Struct):
    name: str
    pace: dict[str, float]
    limits: dict[str, int]
    runs_ahead: bool
    speeds: dict[str, float]
    room: dict[str, int]
    front_s: float
    stream_s: float
    sources: dict[str, str] = {}
    max_decode_slowdown: float = 1e6  # engines had no bound before it was recorded


def h200() -> Calibration:
    lines = [*_lines(ENGINE), *_lines(PROFILE)]
    ours = [line for line in lines if line.get("side") == "ours" and "seconds" in line]
    cases = {str(line["case"]): line for line in ours}
    scenes = {str(line["scene"]): line for line in lines if "scene" in line}
    engines = {str(line["engine"]): line for line in lines if "num_blocks" in line}
    attention_us = scenes["decode 256, 32 adapters"]["by_class_us"]["attention"]
    kv_token_s = attention_us * 1e-6 / (256 * _CONTEXT)
    counts = (1, 32, 128, 256)
    gaps_s = [
        cases[f"on-r16x32-n{n}"]["inter_token_ms"]["p50"] / 1000 - kv_token_s * n * _CONTEXT
        for n in counts
    ]
    fixed_s, sequence_s = _line_through(counts, gaps_s)
    prefill_s = cases["on-r16x16-n16-prefill3900"]["seconds"]
    num_tokens = _PREFILL_TOKENS * _PREFILL_REQUESTS
    token_s = (prefill_s - fixed_s * num_tokens / 8192) / num_tokens
    read_s = cases["on-r16x32-n1"]["load_adapters_s"] / 32
    return Calibration(
        name="h200 llama-3-8b",
        pace=Pace(fixed_s, token_s, sequence_s, kv_token_s),
        limits=EngineLimits(8192, 128256, engines["on"]["num_blocks"] * 16, 256, 8192),
        runs_ahead=True,
        speeds=TierSpeeds(copy_s=0.002, disk_s=read_s, registry_s=0.168, registry_wait_s=0.1),
        room=TierRoom(engines["on"]["adapter_pages"], 4 * engines["on"]["adapter_pages"], 4096),
        front_s=0.005,
        stream_s=0.0005,
        sources={
            "pace.fixed_s, sequence_s": f"{ENGINE}: p50 gaps of on-r16x32-n1, 32, 128, 256, less "
            "the attention to their context; a line through them",
            "pace.kv_token_s": f"{PROFILE}: attention of 'decode 256, 32 adapters'",
            "pace.token_s": f"{ENGINE}: on-r16x16-n16-prefill3900 in steps of 8192",
            "speeds.copy_s": "lora/copies.py and lora/pool.py: 84 MB of rank 16 in 1.6 to 2 ms",
            "speeds.disk_s": f"{ENGINE}: load_adapters_s of 32 adapters of rank 16",
            "speeds.registry_s, registry_wait_s": "assumed: 84 MB at 500 MB/s, 0.1 s before",
            "room.device_pages, limits.max_kv_tokens": f"{ENGINE}: the engine 'on'",
            "room.host_pages": "EngineConfig: four times the pool",
            "room.disk_pages": "assumed: 344 GB of local copies on a node",
            "front_s, stream_s": "assumed; measured where a real run is compared",
        },
    )


def _lines(name: str) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def _line_through(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(at 0, slope), least squares of the relative errors."""
    weights = 1 / np.asarray(ys)
    columns = np.stack([np.ones(len(xs)), np.asarray(xs, dtype=float)], axis=1)
    found = np.linalg.lstsq(columns * weights[:, None], np.ones(len(xs)), rcond=None)[0]
    return float(found[0]), float(found[1])
