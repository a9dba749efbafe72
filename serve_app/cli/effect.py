"""Measures the effect of an adapter: `engine` runs the base with and without it on a few prompts;
the result becomes tags of the version and two files, `effect.json` and `norms.svg`.

A base that is too large to run in seconds is run only on request; the report states it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from engine.checks.effect import Device, examine, plan_probe
from engine.checks.effect_report import EffectReport, ProbePlan
from engine.checks.parity import measure_parity
from engine.checks.prompts import check_given
from engine.errors import InvalidRequestError, UnsupportedModelError
from engine.model_config import read_model_config
from registry.entities import BaseVersion, EffectFacts, EffectRecord
from registry.listing import NO_TEXT
from serve_app.cli.effect_plot import norms_svg
from serve_app.text.adapter_text import check_adapter_text
from serve_app.text.base_text import BaseText

REPORT_FILE = "effect.json"
PLOT_FILE = "norms.svg"

# `auto` runs the base if that lasts seconds; `never` examines the adapter alone.
ProbeMode = Literal["auto", "always", "never"]

# 135 M parameters need 4 s of a core: half a minute for 1 billion, minutes for 8 billion.
MAX_QUICK_CPU_PARAMETERS = 1_000_000_000

# Prompts of many kinds: any text would do, because an adapter that changes weights changes every
# answer a little, but the share of changed tokens then covers an adapter made for one of them.
PROBES = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "CREATE TABLE users (id INTEGER, name TEXT, age INTEGER);\n\nHow many users are older than 30?",
    'Extract the fields as JSON with the keys "name" and "city": Ada Byron lives in London.',
    "Traduis en français : The weather is lovely today.",
    "Once upon a time, in a village by the sea,",
)


def prove(
    folder: Path,
    digest: str,
    base_folder: Path,
    *,
    mode: ProbeMode = "auto",
    prompts: Sequence[str] | None = None,
    device: Device = "auto",
) -> EffectReport:
    """Measures an adapter folder. `prompts`: a user's; None: PROBES, cut and completed as the
    adapter needs it. Raises EngineMemoryError if `mode` is "always" and the base does not fit into
    memory, and InvalidRequestError for a user's prompt that cannot show the adapter."""
    plan = plan_probe(base_folder, device)
    try:
        brings = check_adapter_text(base_folder, folder)
    except UnsupportedModelError as error:  # of the adapter: the base was registered
        report = examine(folder, digest, base_folder, plan, None)
        if report.verdict == "refused":
            return report
        return replace(report, verdict="refused", reason=str(error))
    why_not = why_unprobed(plan, mode)
    tokens = None if why_not else _tokens(folder, base_folder, prompts)
    report = examine(folder, digest, base_folder, plan, tokens, why_not or "")
    return replace(report, brings=brings)


def with_parity(
    report: EffectReport,
    folder: Path,
    original: Path,
    base_folder: Path,
    bound: float,
    prompts: Sequence[str] | None = None,
) -> EffectReport:
    """Returns the report with the comparison with PEFT, see `measure_parity`."""
    tokens = _tokens(folder, base_folder, prompts)
    parity = measure_parity(folder, original, base_folder, tokens, bound)
    return replace(report, parity=parity)


def _tokens(
    folder: Path, base_folder: Path, prompts: Sequence[str] | None
) -> tuple[tuple[int, ...], ...]:
    text = BaseText.from_folder(base_folder)
    if prompts is None:
        return tokenize(text, PROBES)
    tokens = tokenize(text, prompts)
    check_given(tokens, folder, read_model_config(base_folder))
    return tokens


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
        variant=report.kind,
        parity="" if report.parity is None else report.parity.words,
        text="" if report.verdict == "refused" else ", ".join(report.brings) or NO_TEXT,
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
        "cost": report.cost,
        "warnings": report.warnings,
        "prompts": prompts if report.logits is not None else (),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def why_unprobed(plan: ProbePlan, mode: ProbeMode) -> str | None:
    if mode == "never":
        return "the base was not run, as asked"
    if mode == "always":
        return None
    if not plan.fits:
        return f"the base was not run: {plan.words()}"
    if plan.device == "cpu" and plan.num_parameters > MAX_QUICK_CPU_PARAMETERS:
        return f"the base was not run, that would last minutes: {plan.words()}"
    return None


def tokenize(text: BaseText, prompts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns token ids: of a user's message if the base has a chat template that accepts it,
    otherwise of plain text."""
    return tuple(tuple(_one(text, prompt)) for prompt in prompts)


def _one(text: BaseText, prompt: str) -> list[int]:
    if text.template is not None:
        try:
            chat = text.render_chat([{"role": "user", "content": prompt}])
        except InvalidRequestError:  # the template needs other messages: plain text serves, too
            return text.encode(prompt)
        return text.encode(chat, add_special_tokens=False)
    return text.encode(prompt)
