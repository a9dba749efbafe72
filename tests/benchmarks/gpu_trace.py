"""The work of the device in a stretch of time: kernels out of torch's profiler, put into classes.

A Triton kernel belongs to the file of `kernels/` that defines it, all others are recognised by
their names. Free of engines.
"""

from __future__ import annotations

import ast
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

KERNELS = Path(__file__).parents[2] / "kernels"
# The first that fits counts. Of a Triton kernel the file's name is looked at.
TRITON_CLASSES = (
    ("lora", "LoRA"),
    ("linear", "GEMM"),  # of few rows, the shrink included
    ("attention", "attention"),
    ("sampl", "sampling"),
    ("rms_norm", "norm, RoPE, SiLU"),
    ("rope", "norm, RoPE, SiLU"),
    ("silu", "norm, RoPE, SiLU"),
    ("embedding", "other"),
)
NAME_CLASSES = (
    ("flash", "attention"),
    ("fmha", "attention"),
    ("sdpa", "attention"),
    ("nvjet", "GEMM"),
    ("gemm", "GEMM"),
    ("gemv", "GEMM"),
    ("cutlass", "GEMM"),
    ("splitk", "GEMM"),
    ("cublas", "GEMM"),
    ("memcpy", "copies"),
    ("memset", "copies"),
    ("sort", "sampling"),
    ("softmax", "sampling"),
    ("argmax", "sampling"),
    ("topk", "sampling"),
    ("cumsum", "sampling"),
)
CLASSES = (
    "GEMM",
    "attention",
    "LoRA",
    "norm, RoPE, SiLU",
    "sampling",
    "adapter loading",
    "copies",
    "other",
    "gaps",
)
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    name: str
    start_us: float
    end_us: float
    launch: int  # events of one graph launch share it
    is_copy: bool


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The parts of one step, on average."""

    steps: int
    step_us: float
    by_class_us: dict[str, float]  # "gaps" included: they add up to the step
    by_kernel: dict[str, tuple[float, float]]  # name -> microseconds and launches a step


class GpuTrace:
    """`start`, let the device work, `stop`: from then on `events` are known."""

    def __init__(self) -> None:
        self.events: list[DeviceEvent] = []
        self._profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> None:
        torch.cuda.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self.events = parse_events(json.loads(path.read_text()))


def warm_up_profiler() -> None:
    """Starts the tracing library, which sees only the graphs that are captured after it."""
    trace = GpuTrace()
    trace.start()
    torch.zeros(8, device="cuda").add_(1)
    trace.stop()


def parse_events(trace: dict[str, list[dict[str, object]]]) -> list[DeviceEvent]:
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES:
            start, duration, args = event["ts"], event["dur"], event.get("args")
            assert isinstance(start, float | int)
            assert isinstance(duration, float | int)
            launch = args.get("correlation", 0) if isinstance(args, dict) else 0
            is_copy = event["cat"] != "kernel"
            found.append(
                DeviceEvent(str(event["name"]), start, start + duration, int(launch), is_copy)
            )
    return sorted(found, key=lambda event: event.start_us)


def graph_starts_us(events: Sequence[DeviceEvent]) -> list[float]:
    """Returns the starts of the graphs as large as the largest: one a decode step."""
    sizes: dict[int, int] = defaultdict(int)
    first: dict[int, float] = {}
    for event in events:
        sizes[event.launch] += 1
        first.setdefault(event.launch, event.start_us)
    largest = max(sizes.values(), default=0)
    if largest < 50:  # no graph: a launch is a kernel
        return []
    return sorted(first[launch] for launch, size in sizes.items() if size > largest // 2)


def break_down(events: Sequence[DeviceEvent], steps: int) -> Breakdown:
    """Averages over whole decode steps if they are graphs, else over all `steps`."""
    starts = graph_starts_us(events)
    if len(starts) > 2:
        steps = len(starts) - 1
        events = [event for event in events if starts[0] <= event.start_us < starts[-1]]
        span_us = starts[-1] - starts[0]
    else:
        span_us = max(e.end_us for e in events) - min(e.start_us for e in events)
    classes = triton_classes()
    by_class: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for event, duration_us in zip(events, _advances_us(events), strict=True):
        by_class[class_of(event, classes)] += duration_us
        by_kernel[event.name].append(duration_us)
    by_class["gaps"] = span_us - sum(by_class.values())
    return Breakdown(
        steps,
        span_us / steps,
        {name: us / steps for name, us in by_class.items()},
        {name: (sum(us) / steps, len(us) / steps) for name, us in by_kernel.items()},
    )


def class_of(event: DeviceEvent, triton: dict[str, str]) -> str:
    if event.is_copy:
        return "copies"
    if event.name in triton:
        return triton[event.name]
    name = event.name.lower()
    return next((kind for part, kind in NAME_CLASSES if part in name), "other")


def triton_classes(folder: Path = KERNELS) -> dict[str, str]:
    """Function -> class; one that two files of different classes define is a mistake."""
    found: dict[str, str] = {}
    for path in sorted((*folder.glob("triton_*.py"), *folder.glob("gluon_*.py"))):
        kind = next((kind for part, kind in TRITON_CLASSES if part in path.stem), "other")
        for node in ast.parse(path.read_text()).body:
            is_kernel = isinstance(node, ast.FunctionDef) and node.decorator_list
            if isinstance(node, ast.FunctionDef) and is_kernel:
                known = found.setdefault(node.name, kind)
                assert known == kind or not node.name.endswith("kernel"), f"{node.name} twice"
    return found


def _advances_us(events: Sequence[DeviceEvent]) -> list[float]:
    """Returns for how long the device waited for each event, in order of their starts: a kernel
    that was launched early, beside the end of the one before it, counts from that end."""
    advances, reached = [], 0.0
    for event in events:
        advances.append(max(0.0, event.end_us - max(event.start_us, reached)))
        reached = max(reached, event.end_us)
    return advances
