"""The norms of an adapter's weight changes as a picture: one row per kind of module, one column per
layer.

An SVG, which MLflow shows as it shows a PNG. matplotlib comes with MLflow. Ignorant of files and of
the registry.
"""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from engine.checks.effect_report import EffectReport, ModuleNorm

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\..*?(\w+)")
_NOT_ADAPTED, _NO_CHANGE = "#eeeeee", "#d62728"
# Text stays text, and equal reports make equal files.
_SVG: Any = {"svg.fonttype": "none", "svg.hashsalt": "loraplex", "font.family": "sans-serif"}


def norms_svg(report: EffectReport, title: str) -> str:
    """Returns the picture. The id of a cell is the name of its module."""
    kinds, num_layers, cells = _grid(report)
    is_relative = bool(report.norms) and all(norm.ratio is not None for norm in report.norms)
    values = {
        norm.module: norm.ratio or 0.0 if is_relative else norm.delta for norm in report.norms
    }
    scale = ScalarMappable(Normalize(0.0, max(values.values(), default=0.0)), "Blues")
    with matplotlib.rc_context(_SVG):
        figure = Figure(figsize=(9, 2.2 + 0.3 * len(kinds)), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, parse_math=False)
        axes = figure.add_subplot()
        share = ", as a share of the weight's own norm" if is_relative else ""
        legend = f"Frobenius norm of the change of each weight{share}"
        heading = f"{summary(report)}\n{legend}"
        axes.set_title(heading, loc="left", fontsize=9, parse_math=False)
        axes.set(xlim=(-0.5, num_layers - 0.5), ylim=(max(1, len(kinds)), 0), xlabel="layer")
        axes.set_yticks([row + 0.5 for row in range(len(kinds))], kinds)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for row, kind in enumerate(kinds):
            of_kind = {layer: norm for (its, layer), norm in cells.items() if its == kind}
            is_in_layers = any(_IN_LAYER.fullmatch(norm.module) for norm in of_kind.values())
            for layer in range(num_layers) if is_in_layers else of_kind:
                norm = of_kind.get(layer)
                axes.add_patch(_cell(norm, layer, row, scale, values))
            if not is_in_layers:
                value = values[of_kind[0].module]
                words = f"{value:.2%}" if is_relative else f"{value:.3g}"
                axes.text(0.6, row + 0.5, words, va="center", fontsize=9)
        figure.colorbar(scale, ax=axes, format=PercentFormatter(1.0) if is_relative else None)
        figure.legend(
            handles=[Patch(color=_NOT_ADAPTED), Patch(color=_NO_CHANGE)],
            labels=["not adapted", "adapted, no change"],
            loc="outside lower left",
            ncols=2,
            frameon=False,
            fontsize=9,
        )
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def summary(report: EffectReport) -> str:
    logits = report.logits
    if logits is None:
        return f"{report.verdict}: {report.reason}"
    return (
        f"{report.verdict}: max |Δ logit| {logits.max_delta:.3g}, "
        f"mean KL {logits.mean_kl:.3g} nats, "
        f"{logits.argmax_changed:.0%} of greedy tokens differ ({logits.num_positions} positions)"
    )


def _grid(report: EffectReport) -> tuple[list[str], int, dict[tuple[str, int], ModuleNorm]]:
    """Returns the kinds (rows), the number of layers (columns) and the norm of each cell.

    A module outside the layers is in column 0. The columns reach from layer 0 to the last adapted
    layer, whether the layers between are adapted or not.
    """
    cells: dict[tuple[str, int], ModuleNorm] = {}
    for norm in report.norms:
        match = _IN_LAYER.fullmatch(norm.module)
        layer, kind = (int(match[1]), match[2]) if match else (0, norm.module.rpartition(".")[2])
        cells[kind, layer] = norm
    num_layers = 1 + max((layer for _, layer in cells), default=0)
    return list(dict.fromkeys(kind for kind, _ in cells)), num_layers, cells


def _cell(
    norm: ModuleNorm | None, layer: int, row: int, scale: ScalarMappable, values: dict[str, float]
) -> Rectangle:
    if norm is None:
        return Rectangle((layer - 0.5, row), 0.95, 0.95, color=_NOT_ADAPTED)
    fill = scale.to_rgba(np.asarray(values[norm.module])) if norm.delta else _NO_CHANGE
    return Rectangle((layer - 0.5, row), 0.95, 0.95, facecolor=fill, gid=norm.module)
