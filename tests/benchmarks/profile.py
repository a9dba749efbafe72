"""The parts of the time of a decode step and of a prefill: a table, JSON lines, and a picture.

The real engine runs its loop (CUDA graphs, scheduling ahead) while torch's profiler watches the
device; of several ranks, the first one's. Classes: matrix products, attention, LoRA, norms and
activations, sampling, copies, and the gaps in which the device does nothing.

    python -m tests.benchmarks.profile --out FILE --picture FILE.png [--shape llama-3-8b]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")  # graphs outlive one profile
os.environ.setdefault("TEARDOWN_CUPTI", "0")

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from tests.benchmarks.arrival import wait_for_first_tokens, wait_for_steps
from tests.benchmarks.cases import Case
from tests.benchmarks.gpu_trace import (
    CLASSES,
    Breakdown,
    GpuTrace,
    break_down,
    warm_up_profiler,
)
from tests.benchmarks.our_engine import OurEngine, Settings
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import SHAPES

WATCHED_STEPS = 30
DECODE_TOKENS = 2000  # more than are drawn while the profiler starts and stops
PREFILLS = 6
TOP_KERNELS = 14
HOST_BYTES = 8 * 1024**3  # of adapters


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    requests: int
    distinct: int
    prompt: int
    is_decode: bool


SCENES = (
    Scene("decode 1", 1, 0, 256, True),
    Scene("decode 1, 1 adapter", 1, 1, 256, True),
    Scene("decode 32", 32, 0, 256, True),
    Scene("decode 32, 32 adapters", 32, 32, 256, True),
    Scene("decode 64, 32 adapters", 64, 32, 256, True),
    Scene("decode 256", 256, 0, 256, True),
    Scene("decode 256, 32 adapters", 256, 32, 256, True),
    Scene("prefill 3900", 1, 0, 3900, False),
    Scene("prefill 3900, 1 adapter", 1, 1, 3900, False),
)


async def watch(ours: OurEngine, scene: Scene) -> Breakdown:
    case = Case("on", scene.requests, scene.distinct, prompt=scene.prompt)
    await ours.load_adapters(case.adapters)
    if scene.is_decode:
        return await _watch_decode(ours, case)
    return await _watch_prefill(ours, case)


async def _watch_decode(ours: OurEngine, case: Case) -> Breakdown:
    requests = [
        ours.request(prompt, DECODE_TOKENS, _digest(case, i))
        for i, prompt in enumerate(ours.prompts(case, 0))
    ]
    trace = GpuTrace()
    with ours.watch(len(requests)) as timeline:
        await asyncio.gather(*(ours.engine.submit(request) for request in requests))
        await wait_for_first_tokens(timeline)  # prompts are cut into many steps
        await wait_for_steps(timeline, 20)
        trace.start()
        before = len(timeline.steps_s)
        await wait_for_steps(timeline, WATCHED_STEPS)
        steps = len(timeline.steps_s) - before
        trace.stop()
        assert timeline.wanted == len(requests), "the requests ended while they were watched"
        for request in requests:
            ours.engine.abort(request.request_id)
        await asyncio.to_thread(timeline.done.wait, 10)
    return break_down(trace.events, steps)


async def _watch_prefill(ours: OurEngine, case: Case) -> Breakdown:
    """One prompt after the other; the time between them, with the device idle, counts as gaps."""
    for salt in range(2):
        await ours.run(case, salt, output=1)
    trace = GpuTrace()
    trace.start()
    for salt in range(PREFILLS):
        await ours.run(case, 10 + salt, output=1)
    trace.stop()
    return break_down(trace.events, PREFILLS)


def _digest(case: Case, request: int) -> str | None:
    return case.adapters[request % case.distinct].digest if case.distinct else None


def as_line(scene: Scene, result: Breakdown) -> dict[str, object]:
    top = sorted(result.by_kernel.items(), key=lambda item: -item[1][0])[:TOP_KERNELS]
    return {
        "scene": scene.name,
        "steps": result.steps,
        "step_us": round(result.step_us, 1),
        "by_class_us": {name: round(us, 1) for name, us in result.by_class_us.items()},
        "top_kernels": [
            {"name": name[:90], "us": round(us, 1), "launches": round(count, 1)}
            for name, (us, count) in top
        ],
    }


def draw(path: Path, title: str, results: Sequence[tuple[str, Breakdown]]) -> None:
    """Two panels of stacked bars, decode and prefill: their times differ by a factor of ten."""
    panels = [
        [(name, r) for name, r in results if name.startswith(kind)]
        for kind in ("decode", "prefill")
    ]
    panels = [panel for panel in panels if panel]
    sizes = [len(panel) for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, 2.4 + 0.45 * sum(sizes)), height_ratios=sizes, squeeze=False
    )
    colours = {kind: f"C{i}" for i, kind in enumerate(CLASSES)}
    colours["gaps"] = "#dddddd"
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        names = [name for name, _ in reversed(panel)]
        left = [0.0] * len(names)
        for kind in CLASSES:
            widths = [result.by_class_us[kind] / 1000 for _, result in reversed(panel)]
            axis.barh(names, widths, left=left, color=colours[kind], label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.margins(x=0.02)
        axis.set_xlabel("ms a step")
    axes[0, 0].set_title(title)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=5, fontsize=8, loc="lower center")
    figure.tight_layout(rect=(0.0, 0.6 / figure.get_figheight(), 1.0, 1.0))
    figure.savefig(path, dpi=130)


async def main_async(args: argparse.Namespace, report: Report) -> None:
    settings = Settings(
        SHAPES[args.shape],
        args.work / args.shape,
        max_num_batched_tokens=args.batched_tokens,
        memory_fraction=args.memory,
        others={"tensor_parallel_size": args.ranks, "adapter_host_bytes": HOST_BYTES},
    )
    ours = OurEngine(settings, "on")
    results: list[tuple[str, Breakdown]] = []
    for scene in SCENES:
        if args.scenes and not any(scene.name.startswith(name) for name in args.scenes.split(";")):
            continue
        try:
            result = await watch(ours, scene)
        except (RuntimeError, TimeoutError, AssertionError) as error:
            report.emit(scene=scene.name, error=repr(error))
            continue
        report.emit(**as_line(scene, result))
        results.append((scene.name, result))
    ours.close()
    rows = [(name, r.step_us, *(r.by_class_us[kind] for kind in CLASSES)) for name, r in results]
    print_table(("us a step", "all", *CLASSES), rows)
    if args.picture and results:
        gpus = "one GPU" if args.ranks == 1 else f"the first of {args.ranks} GPUs"
        draw(args.picture, f"{args.shape}, {gpus}, bf16", results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the base")
    parser.add_argument("--scenes", default="", help="beginnings of their names, by semicolon")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the device")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "engine-bench")
    args = parser.parse_args()
    report = Report(args.out)
    report.emit_machine("profile", shape=args.shape, ranks=args.ranks, arguments=sys.argv[1:])
    warm_up_profiler()
    asyncio.run(main_async(args, report))


if __name__ == "__main__":
    main()
