"""An effect report as the terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.text import Text

from engine.checks.effect_report import EffectReport, LoadCost, LogitChange, ModuleNorm
from serve_app.cli.commands.common import console, print_facts

_COLOURS = {"changes": "green", "unprobed": "yellow"}
_MIB = 1024**2


def print_effect(report: EffectReport) -> None:
    colour = _COLOURS.get(report.verdict, "red")
    console.print(f"[bold]effect[/]: [{colour}]{report.verdict}[/],", Text(report.reason))
    print_facts(_rows(report))


def _rows(report: EffectReport) -> Iterator[tuple[str, str]]:
    if report.kind:
        yield "kind", report.kind
    modules = f", {len(report.norms)} of the base's {report.num_targets} modules"
    yield (
        "tensors",
        f"{report.num_matched} matched, {len(report.unmatched)} not"
        f"{modules if report.norms else ''}",
    )
    for reason in report.unmatched[:3]:
        yield "", reason
    if report.brings:
        yield "brings", f"its own {', '.join(report.brings)}"
    if report.norms:
        share = "" if report.ratio is None else f", {report.ratio:.2%} of the weights it changes"
        yield "norm of the delta", f"{report.delta_norm:.4g}{share}"
        yield from (("", words) for words in _by_kind(report.norms))
    if report.logits is not None:
        yield from _logit_rows(report.logits)
    if report.parity is not None:
        yield "parity", report.parity.words
    if report.load is not None:
        yield "to load", _load_words(report.load)
    if report.cost:
        yield "cost", report.cost
    if report.probe is not None:
        plan = report.probe
        yield "the check took", f"{report.seconds:.1f} s on {plan.device} in {plan.dtype}"


def _by_kind(norms: tuple[ModuleNorm, ...]) -> Iterator[str]:
    """Least and most of each kind of module: there are hundreds of modules."""

    def kind(norm: ModuleNorm) -> str:
        return norm.module.rpartition(".")[2]

    for name, group in groupby(sorted(norms, key=kind), key=kind):
        found = list(group)
        deltas = [norm.delta for norm in found]
        words = f"{name:<13}{min(deltas):.3g} to {max(deltas):.3g}"
        ratios = [norm.ratio for norm in found if norm.ratio is not None]
        yield f"{words}, {min(ratios):.2%} to {max(ratios):.2%}" if ratios else words


def _logit_rows(logits: LogitChange) -> Iterator[tuple[str, str]]:
    noise = "" if logits.noise is None else f" (the base against itself: {logits.noise:.2g})"
    words = f"change by {logits.mean_delta:.3g} in the mean, {logits.max_delta:.3g} at most{noise}"
    yield "logits", words
    yield "KL", f"{logits.mean_kl:.3g} nats in the mean, {logits.max_kl:.3g} at most"
    yield "greedy tokens", f"{logits.argmax_changed:.1%} differ from the base's"


def _load_words(load: LoadCost) -> str:
    peak = load.peak_host_bytes
    highest = "" if peak is None else f", {peak / _MIB:.1f} MiB at the peak"
    pages = "1 page" if load.num_pages == 1 else f"{load.num_pages} pages"
    return (
        f"{pages}, {load.device_bytes / _MIB:.1f} MiB on the device ({load.device}, {load.dtype}), "
        f"{load.host_bytes / _MIB:.1f} MiB on the host{highest}; "
        f"{load.read_s + load.copy_s:.2f} s"
    )
