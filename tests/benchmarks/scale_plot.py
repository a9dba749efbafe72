"""The picture of a run of `scale`: replicas, queue and time to first token, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"running": "C0", "wanted": "C1", "draining": "C3"}


def draw(
    path: Path,
    title: str,
    samples: Sequence[Mapping[str, float]],
    streams: Sequence[tuple[float, float, str]],
) -> None:
    """`streams`: (sent, seconds to the first token, verdict)."""
    figure, (load, replicas, first) = pyplot.subplots(
        3, 1, figsize=(9, 7.5), sharex=True, height_ratios=(3, 2, 3)
    )
    times = [sample["at_s"] for sample in samples]
    load.plot(times, [one["open"] for one in samples], color="C7", label="open streams")
    load.plot(times, [one["in_batch"] for one in samples], color="C2", label="in an engine's batch")
    load.plot(times, [one["waiting"] for one in samples], color="C3", label="waiting in an engine")
    load.set_ylabel("streams")
    load.legend(loc="upper right", fontsize=8)
    for name, colour in COLOURS.items():
        values = [one[name] for one in samples]
        width = 2.5 if name == "running" else 1.2
        replicas.step(times, values, where="post", color=colour, label=name, linewidth=width)
    replicas.set_ylabel("engine replicas")
    replicas.set_ylim(bottom=0)
    replicas.yaxis.get_major_locator().set_params(integer=True)
    replicas.legend(loc="upper right", fontsize=8)
    for is_right, colour, label in ((True, "C0", "right"), (False, "C3", "wrong")):
        found = [(at_s, ttft) for at_s, ttft, word in streams if (word == "right") is is_right]
        if found:
            first.scatter(*zip(*found, strict=True), s=9, color=colour, label=label)
    first.set_yscale("log")
    first.set_ylabel("time to first token, s")
    first.set_xlabel("s")
    first.legend(loc="upper right", fontsize=8)
    load.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
