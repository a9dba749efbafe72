"""The effect check as every caller does it: the engine room measures, here the prompts are made and
the answer becomes what the registry keeps, tags and two files, `effect.json` and `norms.svg`.

A base too large to run in seconds is not run unasked, and that is said.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from engine.checks.effect import Device, examine, plan_probe
from engine.checks.effect_report import EffectReport, ProbePlan
from registry.cache import Cache
from registry.client import Registry
from registry.entities import AdapterVersion, BaseVersion, EffectFacts, EffectRecord
from serve_app.cli.effect_plot import norms_svg
from serve_app.cli.probes import PROBES, tokenize
from serve_app.text.base_text import BaseText

REPORT_FILE = "effect.json"
PLOT_FILE = "norms.svg"

# `auto` runs the base where it takes seconds; `never` looks at the adapter alone.
Wish = Literal["auto", "always", "never"]

# 135 M parameters take 4 s of one core: half a minute for a billion, minutes for 8.
MAX_QUICK_CPU_PARAMETERS = 1_000_000_000


def prove(
    folder: Path,
    digest: str,
    base_folder: Path,
    *,
    wish: Wish = "auto",
    prompts: Sequence[str] = PROBES,
    device: Device = "auto",
) -> EffectReport:
    """`always` raises EngineMemoryError where the base does not fit."""
    plan = plan_probe(base_folder, device)
    why_not = why_unprobed(plan, wish)
    if why_not is not None:
        return examine(folder, digest, base_folder, plan, None, why_not)
    tokens = tokenize(BaseText.from_folder(base_folder), prompts)
    return examine(folder, digest, base_folder, plan, tokens)


def prove_registered(
    registry: Registry,
    adapter: AdapterVersion,
    base: BaseVersion,
    *,
    cache: Cache,
    prompts: Sequence[str] = PROBES,
    device: Device = "auto",
    wish: Wish = "always",
) -> EffectReport:
    base_folder = registry.fetch(base, cache)
    folder = registry.fetch(adapter, cache)
    return prove(folder, adapter.digest, base_folder, wish=wish, prompts=prompts, device=device)


def record(
    report: EffectReport, name: str, base: BaseVersion, prompts: Sequence[str] = PROBES
) -> EffectRecord:
    now_s = int(time.time())
    logits, load = report.logits, report.load
    facts = EffectFacts(
        verdict=report.verdict,
        checked_s=now_s,
        is_noop=report.verdict != "refused" and report.delta_norm == 0,
        delta_norm=report.delta_norm if report.norms else None,
        max_logit_change=None if logits is None else logits.max_delta,
        mean_kl=None if logits is None else logits.mean_kl,
        argmax_changed=None if logits is None else logits.argmax_changed,
        num_pages=None if load is None else load.num_pages,
        device_bytes=None if load is None else load.device_bytes,
        load_s=None if load is None else load.read_s + load.copy_s,
        reason=report.reason if report.verdict == "refused" else "",
    )
    title = f"{name} on {base.name}@{base.version}"
    files = (
        (REPORT_FILE, report_json(report, name, base, prompts, now_s)),
        (PLOT_FILE, norms_svg(report, title).encode()),
    )
    return EffectRecord(facts, files)


def report_json(
    report: EffectReport, name: str, base: BaseVersion, prompts: Sequence[str], now_s: int
) -> bytes:
    fields = msgspec.to_builtins(report)
    fields["norms"] = [{**msgspec.to_builtins(norm), "ratio": norm.ratio} for norm in report.norms]
    if report.load is not None:
        fields["load"]["device_bytes"] = report.load.device_bytes
    document = {
        "adapter": name,
        "base": f"{base.name}@{base.version}",
        "base_digest": base.digest,
        "checked": datetime.fromtimestamp(now_s, UTC).isoformat(),
        **fields,
        "delta_norm": report.delta_norm,
        "ratio": report.ratio,
        "sites": report.sites,
        "warnings": report.warnings,
        "prompts": prompts if report.logits is not None else (),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def why_unprobed(plan: ProbePlan, wish: Wish) -> str | None:
    """None: run the base."""
    if wish == "never":
        return "the base was not run, as asked"
    if wish == "always":
        return None
    if not plan.fits:
        return f"the base was not run: {plan.words()}"
    if plan.device == "cpu" and plan.num_parameters > MAX_QUICK_CPU_PARAMETERS:
        return f"the base was not run, it would take minutes: {plan.words()}"
    return None
