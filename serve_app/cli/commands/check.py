"""`loraplex check`: measures the effect of a registered adapter and stores it with the version."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import typer
from rich.text import Text

from engine.checks.effect import Device
from engine.checks.effect_report import EffectReport
from engine.checks.parity import check_parity
from registry.errors import NotFoundError
from serve_app.cli import effect
from serve_app.cli.commands.common import Failure, console
from serve_app.cli.commands.effect_table import print_effect
from serve_app.cli.commands.store import open_cache, open_existing
from serve_app.cli.effect import PROBES
from serve_app.config import RegistryArgs

_DEVICES: dict[str, Device] = {"auto": "auto", "cpu": "cpu", "cuda": "cuda"}


def check(
    name: str,
    json: bool,
    prompt: list[str] | None,
    device: str,
    out: Path | None,
    store: bool,
    if_quick: bool,
    parity: bool,
    parity_bound: float,
    tracking_uri: str | None,
) -> None:
    if device not in _DEVICES:
        raise Failure(f"--device is {device!r}; it can be {', '.join(_DEVICES)}")
    registry = open_existing(RegistryArgs(tracking_uri=tracking_uri))
    try:
        found = registry.snapshot().resolve(name)
    except NotFoundError as error:
        raise Failure(f"{error}; loraplex models lists what is registered") from None
    if found.adapter is None:
        raise Failure(f"{name!r} is a base model; check takes an adapter")
    adapter, base = found.adapter, found.base
    prompts = tuple(prompt) if prompt else None
    words = f"Running {base.name} with and without {adapter.name}@{adapter.version}"
    with nullcontext() if json else console.status(words):
        cache = open_cache()
        base_folder = registry.fetch(base, cache)
        folder = registry.fetch(adapter, cache)
        if parity:
            check_parity(folder, base_folder, len(prompts or PROBES))
        report = effect.prove(
            folder,
            adapter.digest,
            base_folder,
            mode="auto" if if_quick else "always",
            prompts=prompts,
            device=_DEVICES[device],
        )
        if parity and report.verdict != "refused":
            report = effect.with_parity(report, folder, folder, base_folder, parity_bound, prompts)
    record = effect.record(report, f"{adapter.name}@{adapter.version}", base, prompts or PROBES)
    if json:
        typer.echo(dict(record.files)[effect.REPORT_FILE].decode(), nl=False)
    else:
        pair = f"Adapter [bold]{adapter.name}@{adapter.version}[/] on {base.name}@{base.version}"
        console.print(pair, highlight=False)
        print_effect(report)
        for warning in report.warnings:
            console.print("[yellow]warning:[/]", Text(warning))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in record.files:
            (out / name).write_bytes(content)
    if store:
        registry.attach_effect(adapter, record)
        if not json:
            files = " and ".join(name for name, _ in record.files)
            console.print(f"Kept with the version in MLflow: tags, {files} in the folder effect")
    _check_result(report, f"{adapter.name}@{adapter.version}")


def _check_result(report: EffectReport, name: str) -> None:
    """Raises Failure if the adapter has no effect, or if its results differ from PEFT's."""
    if report.verdict != "changes":
        raise Failure(f"adapter {name}: {report.reason}")
    parity = report.parity
    if parity is not None and not parity.is_within:
        raise Failure(f"adapter {name}: {parity.words}; the bound is {parity.bound:g}")
