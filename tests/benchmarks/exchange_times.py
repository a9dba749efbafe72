"""The microseconds of the exchanges of several ranks, by size and way, in CUDA graphs of several;
and of exchanges of rows with the norm behind them, with and without adapters, in one kernel and in
parts: `tensor_parallel --exchange`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.collective import Collective
from kernels.exchange_norm import all_reduce_add_rms_norm, lora_all_reduce_add_rms_norm
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from kernels.rendezvous import meet
from kernels.rms_norm import add_rms_norm
from tests.lora_kernel_cases import make_case

EXCHANGE_BYTES = [8 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20]
EXCHANGES = 16  # in a graph
HIDDEN, ROWS = (4096, 8192), (1, 8, 32, 64, 128, 256)  # of exchanges with their norm
ADAPTED_ROWS, MOST_ADAPTERS = (1, 8, 32, 64), 32
REPLAYS = 20
COLUMNS = 1024
WAYS: dict[str, int | None] = {"one shot": 1 << 60, "two shot": 0, "usual": None}


def time_exchanges(rank: int, size: int, store: Path, is_cuda: bool) -> list[dict[str, Any]]:
    """Returns the microseconds of a sum, by size and way."""
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    ranks = meet(store, rank, size, device, EXCHANGE_BYTES[-1])
    lines: list[dict[str, Any]] = []
    for num_bytes in EXCHANGE_BYTES if is_cuda else EXCHANGE_BYTES[:2]:
        dtype = torch.bfloat16 if is_cuda else torch.float32
        x = torch.ones((num_bytes // (COLUMNS * dtype.itemsize), COLUMNS), dtype=dtype)
        x = x.to(device)
        found: dict[str, float] = {}
        if not is_cuda:
            found["gloo"] = _time_on_cpu(ranks, x)
        elif (nccl := getattr(ranks, "_nccl", None)) is None:
            found["nccl"] = _time_in_graph(ranks, x)
        else:
            found["nccl"] = _time_in_graph(nccl, x)
            usual = ranks._one_shot_bytes  # type: ignore[attr-defined]
            for way, one_shot_bytes in WAYS.items():
                limit = usual if one_shot_bytes is None else one_shot_bytes
                ranks._one_shot_bytes = limit  # type: ignore[attr-defined]
                found[way] = _time_in_graph(ranks, x)
            ranks._one_shot_bytes = usual  # type: ignore[attr-defined]
        lines.append({"bytes": num_bytes, **{way: round(us, 2) for way, us in found.items()}})
    return lines


def time_norms(rank: int, size: int, store: Path) -> list[dict[str, Any]]:
    """Returns the microseconds of a sum of rows with the norm behind it: torch's one-shot sum and
    our norm, our usual sum and norm, and the kernel of both."""
    device, lines = torch.device("cuda", rank), list[dict[str, Any]]()
    for number, hidden in enumerate(HIDDEN):
        ranks = meet(store.with_name(f"norms-{number}"), rank, size, device, 16 << 20, 2 * hidden)
        for rows in ROWS:
            lines.append({"hidden": hidden, "rows": rows, "adapters": 0})
            lines[-1] |= _rounded(_norm_times(ranks, rows, hidden))
        for rows in ADAPTED_ROWS:
            adapters = min(rows, MOST_ADAPTERS)
            lines.append({"hidden": hidden, "rows": rows, "adapters": adapters})
            lines[-1] |= _rounded(_adapted_norm_times(ranks, rows, adapters, hidden))
    return lines


def _rounded(us: dict[str, float]) -> dict[str, float]:
    return {way: round(value, 2) for way, value in us.items()}


def _norm_times(ranks: Any, rows: int, hidden: int) -> dict[str, float]:
    device = torch.device("cuda", ranks.rank)
    x = torch.ones((rows, hidden), dtype=torch.bfloat16, device=device)
    residual, weight = torch.zeros_like(x), torch.ones_like(x[0])

    def in_parts() -> None:
        add_rms_norm(ranks.all_reduce(x), residual, weight, 1e-5)

    def exchange(kind: int) -> None:
        all_reduce_add_rms_norm(ranks, x, residual, weight, 1e-5, 1.0, kind)

    return _times_of_ways(ranks, x, in_parts, exchange)


def _adapted_norm_times(ranks: Any, rows: int, adapters: int, hidden: int) -> dict[str, float]:
    """Returns the times of `_norm_times` for rows with adapters of rank 16, whose deltas each rank
    adds to its part where the exchange does not add them to the sum. B is in the second-level
    cache."""
    device = torch.device("cuda", ranks.rank)
    runs = [(i, rows // adapters) for i in range(adapters)]
    case = make_case(
        [16] * adapters,
        runs,
        in_features=hidden // ranks.size,
        sizes=(hidden,),
        dtype=torch.bfloat16,
        device=str(device),
    )
    plan, site = case.plan(large=False), case.site
    bridge = lora_shrink(case.x, site, plan)
    x = torch.ones((rows, hidden), dtype=torch.bfloat16, device=device)
    residual, weight = torch.zeros_like(x), torch.ones_like(x[0])

    def in_parts() -> None:
        lora_expand_(x, bridge, site, plan)
        add_rms_norm(ranks.all_reduce(x), residual, weight, 1e-5)

    def exchange(kind: int) -> None:
        lora_all_reduce_add_rms_norm(
            ranks, x, residual, weight, 1e-5, bridge, site, plan, 1.0, kind
        )

    return _times_of_ways(ranks, x, in_parts, exchange)


def _times_of_ways(
    ranks: Any, x: torch.Tensor, in_parts: Callable[[], None], exchange: Callable[[int], None]
) -> dict[str, float]:
    """Returns the times of a sum and norm of x in parts, by torch's one-shot sum and by our usual
    one, and of the kernel of both, `exchange`, which is called with each kind in turn."""

    def both_kinds() -> None:
        for kind in (0, 1):
            exchange(kind)

    usual = ranks._one_shot_bytes
    ranks._one_shot_bytes = 1 << 60
    found = {"one shot, norm": _time(in_parts)}
    ranks._one_shot_bytes = usual
    found["usual, norm"] = _time(in_parts)
    if ranks.row_memory(x, 0) is not None:
        found["one kernel"] = _time(both_kinds) / 2
    return found


def _time_in_graph(ranks: Collective, x: torch.Tensor) -> float:
    """Returns the microseconds of a sum, its copies included."""
    ranks.all_reduce(x.clone())
    return _time(lambda: ranks.all_reduce(x))


def _time(call: Callable[[], object]) -> float:
    """Returns the microseconds of a call: `EXCHANGES` in a graph."""
    call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(EXCHANGES):
            call()
        graph.capture_end()
    times = []
    for _ in range(REPLAYS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        graph.replay()  # the ranks begin the next one together
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / EXCHANGES)
    return statistics.median(times)


def _time_on_cpu(ranks: Collective, x: torch.Tensor) -> float:
    times = []
    for _ in range(REPLAYS):
        began_s = time.perf_counter()
        ranks.all_reduce(x)
        times.append(1e6 * (time.perf_counter() - began_s))
    return statistics.median(times)
