"""The norms of an adapter's deltas as a picture: a row a kind of module, a column a layer.

SVG written by hand: MLflow shows it as it shows a PNG, and no drawing library is needed to serve.
Ignorant of files and of the registry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from engine.checks.effect_report import EffectReport, ModuleNorm

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\..*?(\w+)")
_CELL_H = 22
_LEFT, _TOP, _RIGHT, _BOTTOM = 110, 78, 96, 62
_MIN_WIDTH = 560  # of the cells together: the lines of text above are so wide
_MAX_CELL_W = 40
# Light to dark in even steps of lightness, so that it reads in grey as well.
_RAMP = ((247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
_NOT_ADAPTED, _NO_CHANGE = "#eeeeee", "#d62728"


@dataclass(frozen=True, slots=True)
class _Grid:
    kinds: tuple[str, ...]  # rows
    layers: tuple[int, ...]  # columns; a module outside the layers is in the first
    cells: dict[tuple[str, int], ModuleNorm]
    is_relative: bool  # to the base's weight; else the norm itself

    def value(self, norm: ModuleNorm) -> float:
        return norm.ratio or 0.0 if self.is_relative else norm.delta

    def text(self, norm: ModuleNorm) -> str:
        value = self.value(norm)
        return f"{value:.2%}" if self.is_relative else f"{value:.3g}"

    @property
    def largest(self) -> float:
        return max((self.value(norm) for norm in self.cells.values()), default=0.0)


def norms_svg(report: EffectReport, title: str) -> str:
    grid = _grid(report)
    num_columns = max(1, len(grid.layers))
    cell_w = min(_MAX_CELL_W, max(8.0, _MIN_WIDTH / num_columns))
    inner_w = max(cell_w * num_columns, _MIN_WIDTH)
    inner_h = _CELL_H * max(1, len(grid.kinds))
    width, height = _LEFT + inner_w + _RIGHT, _TOP + inner_h + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        _text(12, 24, title, "start", size=15),
        _text(12, 44, summary(report), "start", fill="#333333"),
        _text(12, 62, _legend(grid), "start", fill="#777777"),
        *_cells(grid, cell_w),
        *_axis(grid, cell_w, _TOP + inner_h),
        *_bar(grid, _LEFT + inner_w + 24, inner_h),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def summary(report: EffectReport) -> str:
    logits = report.logits
    if logits is None:
        return f"{report.verdict}: {report.reason}"
    return (
        f"{report.verdict}: max |Δ logit| {logits.max_delta:.3g}, "
        f"mean KL {logits.mean_kl:.3g} nats, "
        f"{logits.argmax_changed:.0%} of greedy tokens differ ({logits.num_positions} positions)"
    )


def _grid(report: EffectReport) -> _Grid:
    cells: dict[tuple[str, int], ModuleNorm] = {}
    for norm in report.norms:
        match = _IN_LAYER.fullmatch(norm.module)
        layer, kind = (int(match[1]), match[2]) if match else (0, norm.module.rpartition(".")[2])
        cells[kind, layer] = norm
    in_layers = any(_IN_LAYER.fullmatch(norm.module) for norm in report.norms)
    # From the first layer to the last, though none between be adapted.
    layers = range(max((layer for _, layer in cells), default=0) + 1)
    return _Grid(
        kinds=tuple(dict.fromkeys(kind for kind, _ in cells)),
        layers=tuple(layers) if in_layers else (0,),
        cells=cells,
        is_relative=bool(report.norms) and all(norm.ratio is not None for norm in report.norms),
    )


def _cells(grid: _Grid, cell_w: float) -> Iterator[str]:
    for row, kind in enumerate(grid.kinds):
        y = _TOP + row * _CELL_H
        yield _text(_LEFT - 8, y + 15, kind, "end")
        of_kind = [layer for layer in grid.layers if (kind, layer) in grid.cells]
        is_alone = not _IN_LAYER.fullmatch(grid.cells[kind, of_kind[0]].module)
        for layer in of_kind if is_alone else grid.layers:
            norm = grid.cells.get((kind, layer))
            yield _cell(grid, norm, _LEFT + layer * cell_w, y, cell_w)
        if is_alone:
            yield _text(_LEFT + cell_w + 6, y + 15, grid.text(grid.cells[kind, 0]), "start")


def _cell(grid: _Grid, norm: ModuleNorm | None, x: float, y: float, cell_w: float) -> str:
    box = f'<rect x="{x:.1f}" y="{y}" width="{cell_w - 1:.1f}" height="{_CELL_H - 1}"'
    if norm is None:
        return f'{box} fill="{_NOT_ADAPTED}"/>'
    words = f"{norm.module}: |ΔW| {norm.delta:.4g}, rank {norm.rank}"
    if norm.ratio is not None:
        words += f", {norm.ratio:.3%} of |W|"
    fill = _colour(grid.value(norm) / grid.largest) if norm.delta else _NO_CHANGE
    return f'{box} fill="{fill}"><title>{escape(words)}</title></rect>'


def _axis(grid: _Grid, cell_w: float, y: float) -> Iterator[str]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100) if s * cell_w >= 24)
    for layer in grid.layers[::step]:
        yield _text(_LEFT + (layer + 0.5) * cell_w, y + 16, str(layer), "middle")
    yield _text(_LEFT, y + 36, "layer", "start", fill="#777777")
    x = _LEFT + 60.0
    for fill, words in ((_NOT_ADAPTED, "not adapted"), (_NO_CHANGE, "adapted, no change")):
        yield f'<rect x="{x:.0f}" y="{y + 26:.0f}" width="11" height="11" fill="{fill}"/>'
        yield _text(x + 16, y + 36, words, "start", fill="#777777")
        x += 100


def _bar(grid: _Grid, x: float, height: float) -> Iterator[str]:
    steps = 24
    for i in range(steps):
        y = _TOP + height * (1 - (i + 1) / steps)
        box = f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="{height / steps + 0.5:.1f}"'
        yield f'{box} fill="{_colour((i + 0.5) / steps)}"/>'
    top = f"{grid.largest:.2%}" if grid.is_relative else f"{grid.largest:.3g}"
    yield _text(x + 16, _TOP + 10, top, "start")
    yield _text(x + 16, _TOP + height, "0", "start")


def _legend(grid: _Grid) -> str:
    norm = "Frobenius norm of the change of each weight"
    return f"{norm}, as a share of the weight's own norm" if grid.is_relative else norm


def _colour(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    index = min(int(place), len(_RAMP) - 2)
    return _mix(_RAMP[index], _RAMP[index + 1], place - index)


def _mix(low: Sequence[int], high: Sequence[int], share: float) -> str:
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True)
    )


def _text(
    x: float, y: float, words: str, anchor: str, size: int = 12, fill: str = "#111111"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{fill}">{escape(words)}</text>'
    )
