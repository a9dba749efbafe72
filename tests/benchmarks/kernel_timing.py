"""The time of device work inside a CUDA graph, and the LoRA problem that all sides get."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

GRAPH_REPLAYS = 20
L2_BYTES = 60e6
BANDWIDTH = 4.46e6  # bytes a microsecond that an H200 was seen to read
MAX_COPIES = 12
CHECKED_TOKENS = 64  # above, the reference in float64 takes too long
LARGEST_ERROR = 2e-2


def graph_time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds a call: all calls in one graph, median of its replays. The calls should work on
    copies of their data, or they find it in the L2 cache."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(GRAPH_REPLAYS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class LoraCase:
    name: str
    idx: tuple[int, ...]  # the adapter of each token, sorted: -1 is none
    ranks: tuple[int, ...]  # of each adapter
    is_prefill: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.idx)


class LoraProblem:
    """One linear layer with one or more slices and its adapters, drawn on the device, by the names
    that peers know: y[t, slice s] += scale[a] * (x[t] A[a][s]^T) B[a][s]^T with a = idx[t]."""

    def __init__(
        self, in_features: int, out_features: Sequence[int], case: LoraCase, device: str, seed: int
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator, device=device)
            return (drawn * scale).to(self.dtype)

        self.dtype, self.device = torch.bfloat16, device
        self.K, self.Ns, self.ranks = in_features, list(out_features), list(case.ranks)
        self.max_rank = max(16, *case.ranks)
        self.idx, self.T = list(case.idx), case.num_tokens
        self.x = draw(self.T, in_features)
        self.y0 = draw(self.T, sum(out_features))
        self.scales = [0.5 + 0.25 * (i % 3) for i in range(len(case.ranks))]
        self.A = [[draw(r, in_features, in_features**-0.5) for _ in self.Ns] for r in case.ranks]
        self.B = [[draw(n, r) for n in self.Ns] for r in case.ranks]
        self.offs = [sum(self.Ns[:s]) for s in range(len(self.Ns) + 1)]

    def reference(self) -> torch.Tensor:
        """y in float64."""
        y = self.y0.double()
        for adapter in sorted(set(self.idx) - {-1}):
            rows = [t for t, owner in enumerate(self.idx) if owner == adapter]
            for s in range(len(self.Ns)):
                bridge = self.x[rows].double() @ self.A[adapter][s].double().T
                delta = self.scales[adapter] * (bridge @ self.B[adapter][s].double().T)
                y[rows, self.offs[s] : self.offs[s + 1]] += delta
        return y

    def num_bytes(self) -> int:
        """Weights of the adapters in use, each once."""
        rows = sum(self.ranks[a] for a in set(self.idx) - {-1})
        return 2 * rows * (len(self.Ns) * self.K + sum(self.Ns))

    def floor_us(self) -> float:
        """x and the weights read once, y read and written once."""
        return (self.num_bytes() + 2 * self.T * (self.K + 2 * sum(self.Ns))) / BANDWIDTH


class LoraOp(Protocol):
    """A timed side: weights laid out when it is made, `step` once a step, `run` once a layer."""

    def step(self) -> object: ...
    def run(self, x: torch.Tensor, y: torch.Tensor) -> object: ...


def num_copies(problem: LoraProblem) -> int:
    """So many that the weights of a first one have left the L2 when its turn comes again."""
    return max(2, min(MAX_COPIES, int(4 * L2_BYTES / max(1, problem.num_bytes())) + 1))


def time_lora(
    make: Callable[[LoraProblem], LoraOp], problems: Sequence[LoraProblem], *, is_warm_up: bool
) -> tuple[float, float | None]:
    """Microseconds a layer call, and the relative error of the delta where it is checked."""
    ops = [make(problem) for problem in (problems[:1] if is_warm_up else problems)]
    for op in ops:
        op.step()
    first = problems[0]
    y = first.y0.clone()
    ops[0].run(first.x, y)
    torch.cuda.synchronize()
    if is_warm_up:
        return 0.0, None
    error = None
    if first.T <= CHECKED_TOKENS:
        wanted = first.reference() - first.y0.double()
        error = float((y.double() - first.y0.double() - wanted).norm() / wanted.norm())
    for op in ops:
        if hasattr(op, "before_capture"):
            op.before_capture()
    outs = [problem.y0.clone() for problem in problems]
    calls = [
        partial(op.run, problem.x, out)
        for op, problem, out in zip(ops, problems, outs, strict=True)
    ]
    return graph_time_us(calls), error
