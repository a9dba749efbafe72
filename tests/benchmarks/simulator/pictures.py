"""Pictures of results. Knows numbers and words, no scenarios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


@dataclass(frozen=True, slots=True)
class Curve:
    xs: Sequence[float]
    ys: Sequence[float]
    label: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    label: str  # of its y axis
    curves: Sequence[Curve]
    is_log: bool = False


def bars(
    path: Path,
    title: str,
    places: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    unit: str,
) -> None:
    """One group of bars at each place, one colour a name; a logarithmic scale."""
    figure, axis = pyplot.subplots(figsize=(10, 4.5))
    width = 0.8 / len(groups)
    for number, (name, values) in enumerate(groups.items()):
        lefts = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(places))]
        drawn = axis.bar(lefts, values, width, label=name)
        axis.bar_label(drawn, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(places)), places)
    axis.set_yscale("log")
    axis.set_ylabel(unit)
    axis.set_title(title)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def panels(path: Path, title: str, parts: Sequence[Panel], x_label: str = "seconds") -> None:
    """One below the other over the same x axis."""
    figure, axes = pyplot.subplots(
        len(parts), 1, figsize=(10, 1 + 2.1 * len(parts)), sharex=True, squeeze=False
    )
    for axis, part in zip(axes[:, 0], parts, strict=True):
        for curve in part.curves:
            axis.plot(curve.xs, curve.ys, label=curve.label or None, linewidth=1.3)
        axis.set_ylabel(part.label, fontsize=9)
        if part.is_log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if any(curve.label for curve in part.curves):
            axis.legend(fontsize=8)
    axes[0, 0].set_title(title)
    axes[-1, 0].set_xlabel(x_label)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
