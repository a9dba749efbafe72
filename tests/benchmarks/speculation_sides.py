"""vLLM's speculation beside ours on the demo's rounds: what vLLM reads, and the comparison.

vLLM runs before our engine takes the device's memory, once with drafts of n-grams and once without.
A rate is all tokens of the rounds over all of their seconds; the first round is apart, in which
vLLM loads the adapter and our drafts know no text.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

from safetensors.torch import load_file, save_file

from engine.model_config import read_model_config
from engine.types import Request
from tests.benchmarks.children import module, relay_vllm
from tests.benchmarks.demo_questions import ADAPTERS, ADAPTERS_DIR
from tests.benchmarks.report import Report, print_table

OURS, VLLM = "ours", "vllm"
TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Case:
    workload: str
    concurrency: int
    rounds: Sequence[Sequence[Request]]

    @property
    def key(self) -> tuple[str, int]:
        return self.workload, self.concurrency


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a case, as a side ran it."""

    num_tokens: int
    seconds: float
    answers: Mapping[str, tuple[int, ...]]


Figures = dict[tuple[str, int], list[Round]]  # by the case's key


def check_site_packages(folder: str) -> None:
    """Raises FileNotFoundError unless the folder holds vLLM."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"--vllm: there is no folder {folder}")
    if not (Path(folder) / "vllm" / "__init__.py").is_file():
        raise FileNotFoundError(f"--vllm: no package vllm in {folder}")


def cases_as_json(cases: Iterable[Case]) -> str:
    """Returns what `speculation_vllm` reads."""
    return json.dumps(
        [
            {
                "workload": case.workload,
                "concurrency": case.concurrency,
                "rounds": [[_as_fields(request) for request in one] for one in case.rounds],
            }
            for case in cases
        ]
    )


def _as_fields(request: Request) -> dict[str, object]:
    return {
        "id": request.request_id,
        "prompt": list(request.prompt_token_ids),
        "adapter": request.adapter,
        "max_tokens": request.params.max_tokens,
    }


def write_plain_adapter(source: Path, target: Path) -> None:
    """Copies an adapter. The scales of `alpha_pattern`, which vLLM ignores, go into `lora_B`."""
    config = json.loads((source / "adapter_config.json").read_text())
    assert not config.get("rank_pattern")
    alphas: dict[str, float] = config.get("alpha_pattern") or {}
    target.mkdir(parents=True)
    if not alphas:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            copyfile(source / name, target / name)
        return
    tensors = load_file(source / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        *_, linear, factor, _ = name.split(".")
        if factor == "lora_B" and linear in alphas:
            tensors[name] = tensor * (alphas[linear] / config["lora_alpha"])
    save_file(tensors, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {}}))


def run_vllm(
    cases: Sequence[Case], base: Path, args: argparse.Namespace, report: Report
) -> dict[str, Figures]:
    """Runs all cases in vLLM with and without drafts. A process that fails leaves a line with the
    error, and what it had measured."""
    sides: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()  # a child has another working folder
        for name in ADAPTERS:
            write_plain_adapter(ADAPTERS_DIR / name, work / "adapters" / name)
        (work / "rounds.json").write_text(cases_as_json(cases))
        eos_ids = json.dumps(list(read_model_config(base).eos_token_ids))
        for ngram in (1, 0):
            answers = work / f"answers-{ngram}.jsonl"
            command = module("speculation_vllm", "--model", str(base.resolve()))
            command += ["--adapters", str(work / "adapters"), "--ngram", str(ngram)]
            command += ["--rounds", str(work / "rounds.json"), "--answers", str(answers)]
            command += ["--stop-token-ids", eos_ids, "--draft-tokens", str(args.draft_tokens)]
            site_packages = str(Path(args.vllm).resolve())
            lines = relay_vllm(command, report, site_packages, work, args.vllm_timeout)
            found = answers.read_text().splitlines() if answers.exists() else []
            name = f"{VLLM} {'ngram' if ngram else 'off'}"
            sides[name] = figures(lines, [json.loads(line) for line in found])
    return sides


def figures(lines: Iterable[Mapping[str, Any]], answers: Iterable[Mapping[str, Any]]) -> Figures:
    """Returns the rounds of vLLM's lines, with their answers."""
    texts = {(a["workload"], a["concurrency"], a["round"]): a["answers"] for a in answers}
    found: Figures = {}
    for line in lines:
        if "round" not in line:
            continue  # its start
        key = line["workload"], line["concurrency"]
        ids = {name: tuple(text) for name, text in texts[*key, line["round"]].items()}
        found.setdefault(key, []).append(Round(line["output_tokens"], line["seconds"], ids))
    return found


def compare(sides: Mapping[str, Figures], report: Report) -> None:
    """Emits a line for each case, and one for all workloads of a concurrency, and a table."""
    keys = list(sides[f"{OURS} off"])
    rows: list[tuple[object, ...]] = []
    for concurrency in dict.fromkeys(number for _, number in keys):
        own = [key for key in keys if key[1] == concurrency]
        for name, chosen in [*((key[0], [key]) for key in own), (TOTAL, own)]:
            line = summary(sides, chosen)
            report.emit(compared=name, concurrency=concurrency, **line)
            rates = line["tokens_per_s"]
            assert isinstance(rates, dict)
            ratios = line["auto_to_ngram"], line["off_to_off"]
            rows.append((name, concurrency, *rates.values(), *ratios))
    print_table(("workload", "at once", *sides, "auto/ngram", "off/off"), rows)


def summary(sides: Mapping[str, Figures], keys: Sequence[tuple[str, int]]) -> dict[str, object]:
    """Compares the sides over some cases. None: a side did not run all rounds of these."""
    expected = sides[f"{OURS} off"]
    count = {key: len(expected[key]) for key in keys}
    complete = {
        name: [found[key] for key in keys]
        if all(len(found.get(k, ())) == count[k] for k in keys)
        else None
        for name, found in sides.items()
    }
    later = {name: _rate(runs, slice(1, None)) for name, runs in complete.items()}
    first = {name: _rate(runs, slice(0, 1)) for name, runs in complete.items()}
    same = {
        name: runs and _share_of_same(runs, [expected[key] for key in keys])
        for name, runs in complete.items()
        if name != f"{OURS} off"
    }
    return {
        "tokens_per_s": later,
        "first_round_tokens_per_s": first,
        "auto_to_ngram": _ratio(later.get(f"{OURS} auto"), later.get(f"{VLLM} ngram")),
        "off_to_off": _ratio(later.get(f"{OURS} off"), later.get(f"{VLLM} off")),
        "auto_to_off": _ratio(later.get(f"{OURS} auto"), later.get(f"{OURS} off")),
        "ngram_to_off": _ratio(later.get(f"{VLLM} ngram"), later.get(f"{VLLM} off")),
        "same_answers_as_ours_off": same,
    }


def _rate(runs: Sequence[Sequence[Round]] | None, chosen: slice) -> float | None:
    rounds = [one for case in runs or () for one in case[chosen]]
    if not rounds:
        return None
    return round(sum(one.num_tokens for one in rounds) / sum(one.seconds for one in rounds), 1)


def _ratio(rate: float | None, other: float | None) -> float | None:
    return round(rate / other, 3) if rate and other else None


def _share_of_same(runs: Sequence[Sequence[Round]], expected: Sequence[Sequence[Round]]) -> float:
    pairs = [
        (one.answers[name], ids)
        for case, other_case in zip(runs, expected, strict=True)
        for one, other in zip(case, other_case, strict=True)
        for name, ids in other.answers.items()
    ]
    return round(sum(found == ids for found, ids in pairs) / len(pairs), 3)
