"""Paged attention on a GPU beside its limits: `python -m tests.benchmarks.attention`.

Decode: bytes of keys and values over time, in CUDA graphs that rotate over more caches than the L2
holds. Prefill: floating-point operations over time, beside torch's own attention over contiguous
tensors (cuDNN, FlashAttention-2), which needs no pages. Heads of Llama-3-8B, bfloat16; a cache in
e4m3 in turns with it. Other families: `--heads 8 4 256 --window 4096 --soft-cap 50` (Gemma 2),
`--heads 64 8 64 --window 128 --sinks` (gpt-oss). A window's rates count the keys in it: equal rates
mean a cost of min(keys, window).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.e4m3 import E4M3
from kernels.paged_attention import paged_attention
from kernels.paged_plan import HeadShape, PagedPlan, attention_scratch, work_size, write_work
from tests.benchmarks.report import Report

SHAPE = HeadShape(32, 8, 128)
CACHE_TOKENS = 1 << 20  # 4.3 GB of keys and values
ROTATED_BYTES = 400_000_000
Lengths = list[tuple[int, int]]  # (queries, keys)
Call = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    shape: HeadShape = SHAPE
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class Case:
    name: str
    lengths: Lengths

    def bytes_read(self, layer: Layer) -> int:
        keys = sum(min(kv, layer.window or kv) for _, kv in self.lengths)
        return keys * layer.shape.num_kv_heads * layer.shape.head_dim * 4

    def flops(self, layer: Layer) -> float:
        pairs = 0
        for q, kv in self.lengths:
            seen = np.arange(kv - q + 1, kv + 1)
            pairs += int(np.minimum(seen, layer.window or kv).sum())
        return 4.0 * layer.shape.num_heads * layer.shape.head_dim * pairs


def decode_cases() -> list[Case]:
    mixed = np.exp(np.random.default_rng(0).uniform(np.log(64), np.log(8192), 64)).astype(int)
    equal = [(1, 1024), (1, 8192), (1, 32768), (16, 2048), (64, 1024), (64, 4096), (256, 384)]
    cases = [Case(f"decode {b} x {length}", [(1, length)] * b) for b, length in equal]
    return [*cases, Case("decode 64 x 64..8192", [(1, int(n)) for n in mixed])]


def prefill_cases() -> list[Case]:
    chunks = [(2048, 2048), (4096, 4096), (8192, 8192), (2048, 8192), (2048, 32768)]
    cases = [Case(f"prefill {q} of {kv}", [(q, kv)]) for q, kv in chunks]
    cases.append(Case("prefill 32 x 256", [(256, 256)] * 32))
    return [*cases, Case("prefill 2048 + decode 63 x 1024", [(2048, 2048)] + [(1, 1024)] * 63)]


class Bench:
    def __init__(
        self, block_size: int, layer: Layer, tokens: int = CACHE_TOKENS, device: str = "cuda"
    ) -> None:
        """`tokens`: the room of the cache."""
        self.rng, self.tokens, self.device = np.random.default_rng(1), tokens, device
        self.layer, heads = layer, layer.shape
        shape = (tokens // block_size, block_size, heads.num_kv_heads, heads.head_dim)
        self.k, self.v = (random(*shape, device=device) for _ in range(2))
        self.sinks = random(heads.num_heads, device=device).float() if layer.has_sinks else None

    @cached_property
    def narrow(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k.to(E4M3), self.v.to(E4M3)

    def calls(self, case: Case, *, is_narrow: bool = False) -> list[Call]:
        """`is_narrow`: with keys and values in e4m3."""
        shape = self.layer.shape
        keys = sum(kv for _, kv in case.lengths)
        most = min(16, self.tokens // (keys + len(case.lengths) * self.k.shape[1]))
        copies = min(most, max(2, ROTATED_BYTES // case.bytes_read(self.layer)))
        block_size, blocks = self.k.shape[1], self.rng.permutation(self.k.shape[0])
        starts = np.cumsum([0, *(q for q, _ in case.lengths)]).astype(np.int32)
        kv_lens = np.array([kv for _, kv in case.lengths], np.int32)
        host = np.zeros(work_size(len(kv_lens), int(starts[-1]), shape), np.int32)
        counts = write_work(host, starts, kv_lens, shape)
        scratch = attention_scratch(len(kv_lens), shape, self.device)
        work, starts_there, kv_there = (self._put(array) for array in (host, starts, kv_lens))
        calls = []
        for _ in range(copies):
            tables = np.zeros((len(kv_lens), -(-int(kv_lens.max()) // block_size)), np.int32)
            for s, kv_len in enumerate(kv_lens):
                needed = -(-int(kv_len) // block_size)
                tables[s, :needed], blocks = blocks[:needed], blocks[needed:]
            there = self._put(tables)
            plan = PagedPlan.for_step(starts_there, kv_there, there, work, scratch, counts)
            q = random(int(starts[-1]), shape.num_heads, shape.head_dim, device=self.device)
            calls.append(self.call(q, plan, *(self.narrow if is_narrow else (self.k, self.v))))
        return calls

    def _put(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def call(self, q: torch.Tensor, plan: PagedPlan, k: torch.Tensor, v: torch.Tensor) -> Call:
        layer, scale = self.layer, self.layer.shape.head_dim**-0.5
        return lambda: paged_attention(
            q, k, v, plan, scale, layer.window, soft_cap=layer.soft_cap, sinks=self.sinks
        )


def random(*shape: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def microseconds(calls: Sequence[Call]) -> float:
    """The median time of one call, in a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = -(-8 // len(calls))
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    times = [replayed_us(graph) / (rounds * len(calls)) for _ in range(14)]
    return statistics.median(times[4:])


def both_us(bench: Bench, case: Case, most: int | None = None) -> tuple[float, float]:
    """Returns the time of a call with the whole cache, and with that in e4m3, in turns."""
    sides = [bench.calls(case, is_narrow=is_narrow)[:most] for is_narrow in (False, True)]
    times = [[microseconds(calls) for calls in sides] for _ in range(3)]
    whole, narrow = (statistics.median(side) for side in zip(*times, strict=True))
    return whole, narrow


def figures(case: Case, block_size: int, whole_us: float, narrow_us: float) -> dict[str, object]:
    return {
        "case": case.name,
        "block_size": block_size,
        "us": round(whole_us, 1),
        "e4m3_us": round(narrow_us, 1),
        "e4m3_ratio": round(narrow_us / whole_us, 3),
    }


def replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * float(begin.elapsed_time(end))


def dense(length: int, backend: SDPBackend) -> float:
    q = random(1, SHAPE.num_heads, length, SHAPE.head_dim)
    k, v = (random(1, SHAPE.num_kv_heads, length, SHAPE.head_dim) for _ in range(2))
    with sdpa_kernel(backend):
        return microseconds(
            [
                lambda: torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("QUERY", "KV", "DIM")
    )
    parser.add_argument("--window", type=int)
    parser.add_argument("--soft-cap", type=float)
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    arguments = parser.parse_args()
    shape = HeadShape(*arguments.heads)
    layer = Layer(shape, arguments.window, arguments.soft_cap, arguments.sinks)
    report = Report(arguments.out)
    report.emit_machine("attention", layer=asdict(layer))
    for block_size in arguments.block_sizes:
        bench = Bench(block_size, layer)
        for case in decode_cases():
            time_us, narrow_us = both_us(bench, case)
            rate = round(case.bytes_read(layer) / time_us / 1e6, 3)
            report.emit(**figures(case, block_size, time_us, narrow_us), tb_per_s=rate)
        for case in prefill_cases():
            time_us, narrow_us = both_us(bench, case, 2)
            rate = round(case.flops(layer) / time_us / 1e6, 1)
            report.emit(**figures(case, block_size, time_us, narrow_us), tflops=rate)
        del bench
    if layer != Layer():
        return
    for length in (2048, 4096, 8192):
        flops = Case("", [(length, length)]).flops(layer)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            time_us = dense(length, backend)
            rate = round(flops / time_us / 1e6, 1)
            report.emit(case=f"dense {length}, {backend.name}", us=round(time_us, 1), tflops=rate)


if __name__ == "__main__":
    main()
