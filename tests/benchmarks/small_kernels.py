"""Microseconds of the small kernels in a CUDA graph, and of a launch from Python; JSON lines.

    python -m tests.benchmarks.small_kernels [part of a name ...]

A graph holds many calls over rotating inputs, together more than the second-level cache holds, so
that a call finds none of them there. Shapes are those of Llama-3-8B in bfloat16.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.embedding import gather_embedding
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from kernels.sampling import sample_rows
from kernels.silu_mul import silu_mul
from tests.benchmarks.report import Report

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
CACHE_BYTES = 180e6
PEAK_BYTES_S = 4.4e12
TOKENS = (1, 64, 256, 8192)
ROWS = (1, 16, 64, 256)
SAMPLING: dict[str, tuple[float, int, float, float]] = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "min_p": (0.8, 0, 1.0, 0.05),
    "top_k": (0.8, 50, 1.0, 0.0),
    "top_p": (0.8, 0, 0.9, 0.0),
    "top_k_top_p": (0.8, 50, 0.9, 0.0),
}
SPREADS = (1.0, 3.0)  # of normal logits: 61 % of all ids are top-p's at 1, 4 % at 3


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    num_bytes: int  # read and written by a call
    call: Callable[[int], object]  # of the i-th of the rotating inputs
    copies: int


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def copies_of(num_bytes: int) -> int:
    return max(2, min(64, round(CACHE_BYTES / num_bytes) + 1))


def elementwise(rows: int) -> Iterator[Case]:
    weight, row = randn(HIDDEN), 2 * rows * HIDDEN
    copies = copies_of(3 * row)
    x = randn(copies, rows, HIDDEN)
    residual = randn(copies, rows, HIDDEN)
    yield Case("rms_norm", rows, 2 * row, lambda i: rms_norm(x[i], weight, 1e-5), copies)
    yield Case(
        "add_rms_norm",
        rows,
        4 * row,
        lambda i: add_rms_norm(x[i], residual[i], weight, 1e-5),
        copies,
    )
    num_bytes = 6 * rows * INNER
    gate_up = randn(copies_of(num_bytes), rows, 2 * INNER)
    yield Case("silu_mul", rows, num_bytes, lambda i: silu_mul(gate_up[i]), len(gate_up))
    num_bytes = 4 * rows * (HEADS + 2 * KV_HEADS) * DIM
    copies = copies_of(num_bytes)
    qkv = randn(copies, rows, (HEADS + 2 * KV_HEADS) * DIM)
    caches = randn(2, copies, rows, 1, KV_HEADS, DIM)
    place = torch.arange(rows, dtype=torch.int32, device="cuda")
    cos_sin = randn(8192, 2, DIM // 2, dtype=torch.float32)
    yield Case(
        "rope_kv_write",
        rows,
        num_bytes,
        lambda i: rope_kv_write(
            qkv[i],
            RopeWrite(place, cos_sin, caches[0, i], caches[1, i], place, HEADS, KV_HEADS, DIM),
        ),
        copies,
    )
    table = randn(VOCAB, HIDDEN)
    nowhere = -1 - place
    ids = torch.randint(0, VOCAB, (64, rows), dtype=torch.int32, device="cuda")
    yield Case(
        "gather_embedding",
        rows,
        2 * row,
        lambda i: gather_embedding(ids[i], nowhere, place, table),
        64 if rows < 1024 else 4,
    )


def sampler(rows: int, spread: float) -> Iterator[Case]:
    num_bytes = 4 * rows * VOCAB
    logits = spread * randn(copies_of(num_bytes), rows, VOCAB, dtype=torch.float32)
    place = torch.arange(rows, dtype=torch.int32, device="cuda")
    out = torch.empty_like(place)
    for name, (temperature, top_k, top_p, min_p) in SAMPLING.items():
        if name in ("greedy", "temperature", "min_p") and spread != SPREADS[0]:
            continue
        parameters = (
            torch.full((rows,), temperature, device="cuda"),
            torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
            torch.full((rows,), top_p, device="cuda"),
            torch.full((rows,), min_p, device="cuda"),
            place.long(),
            place,
            place,
        )

        def call(i: int, parameters: tuple[torch.Tensor, ...] = parameters) -> None:
            sample_rows(logits[i], *parameters, out)  # type: ignore[call-arg]

        yield Case(f"sample_rows {name} spread {spread:g}", rows, num_bytes, call, len(logits))


def graph_us(case: Case, replays: int = 15) -> float:
    """Median over replays of a graph of at least 20 calls."""
    calls = -(-20 // case.copies) * case.copies
    case.call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            case.call(i % case.copies)
    times: list[float] = []
    for turn in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(1000 * start.elapsed_time(end) / calls)
    return statistics.median(times)


def host_us(case: Case, calls: int = 300) -> float:
    """Of a call in Python while the device is busy with earlier ones, the outputs freed at once."""
    times: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            case.call(i % case.copies)
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return min(times)


def main() -> None:
    report, wanted = Report(), sys.argv[1:]
    report.emit_machine("small_kernels")
    torch.manual_seed(0)

    def cases() -> Iterator[Case]:
        for rows in TOKENS:
            yield from elementwise(rows)
        for rows in ROWS:
            for spread in SPREADS:
                yield from sampler(rows, spread)

    for case in cases():
        if wanted and not any(part in case.name for part in wanted):
            continue
        us = graph_us(case)
        report.emit(
            op=case.name,
            rows=case.rows,
            us=round(us, 2),
            limit_us=round(1e6 * case.num_bytes / PEAK_BYTES_S, 2),
            gb_s=round(case.num_bytes / us / 1e3),
            host_us=round(host_us(case), 2) if case.rows == 1 else None,
        )


if __name__ == "__main__":
    main()
