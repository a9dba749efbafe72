"""Function calls on the Berkeley Function Calling Leaderboard's questions, base against adapter.

    python -m tests.benchmarks.bfcl WHEEL_OR_FOLDER [--adapter FOLDER] [--questions 100]
        [--category simple_python] [--modes auto required] [--show 0] [--out FILE]

WHEEL_OR_FOLDER is the wheel of bfcl-eval 2026.3.23 (Apache-2.0), or the folder that it unpacks to:
the questions and answers are inside, nothing of it is imported. Each question goes through the
service's own path: the body of a chat, its prompt and grammar, the engine, the parser of calls.
Sides: `base` in its own chat template, which may have no place for tools; `base_shown`, the base in
the chat template of the `tools` adapter; `adapter` in its own. A question counts as right if the
benchmark's rules find no fault in its one call (`bfcl_checker.py`); of `irrelevance`, if there is
no call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import InvalidRequestError
from engine.factory import open_engine
from engine.service import AsyncEngine
from notebooks.demo_adapters import tools
from notebooks.demo_adapters.tools_functions import bare_name
from serve_app.cli.demo.prepare import convert_base
from serve_app.config import default_home
from serve_app.openai.chat import ChatRequest
from serve_app.openai.engine_params import engine_requests, read_prompts
from serve_app.openai.tools import schemas
from serve_app.text.adapter_text import own_files, read_adapter_files
from serve_app.text.base_text import BaseText, read_files
from serve_app.text.regions import RegionParser
from tests.benchmarks.bfcl_checker import Call, Json, find_fault, public_name
from tests.benchmarks.report import Report, print_table

CATEGORIES = ("simple_python", "live_simple", "irrelevance", "live_irrelevance")
MODES = ("auto", "required")
MAX_TOKENS = 128
_ADAPTER = "tools"
_SCHEMA_TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "list": "array",
    "any": "string",
    "bool": "boolean",
}
_KEPT = ("type", "description", "enum", "properties", "items", "required")


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    messages: list[Json]
    functions: list[Json]  # as the benchmark describes them
    possible: Mapping[str, list[Any]] | None  # values by parameter; None: no call is right


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    text: BaseText
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    answer: str
    calls: tuple[Call, ...]
    fault: str  # "" if it is right


def read_questions(source: Path, category: str) -> list[Question]:
    """Raises FileNotFoundError if the wheel or folder does not hold the category."""
    name = f"BFCL_v4_{category}.json"
    answers: dict[str, Mapping[str, list[Any]]] = {}
    if "irrelevance" not in category:
        for row in _read_lines(source, f"possible_answer/{name}"):
            (truth,) = row["ground_truth"]
            answers[row["id"]] = next(iter(truth.values()))
    return [
        Question(row["id"], row["question"][0], row["function"], answers.get(row["id"]))
        for row in _read_lines(source, name)
    ]


def _read_lines(source: Path, name: str) -> list[Json]:
    path = f"bfcl_eval/data/{name}"
    if source.is_dir():
        text = (source / path).read_text(encoding="utf-8")
    else:
        with zipfile.ZipFile(source) as wheel:
            if path not in wheel.namelist():
                raise FileNotFoundError(f"{source} holds no {path}")
            text = wheel.read(path).decode("utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def tool_of(function: Json) -> Json:
    """Returns a function of the benchmark as a client of OpenAI's API writes it."""
    described = {
        "name": public_name(function["name"]),
        "description": function["description"],
        "parameters": schema_of(function["parameters"]),
    }
    return {"type": "function", "function": described}


def schema_of(described: Json) -> Json:
    """Returns the JSON schema of a description, whose types are Python's."""
    schema = {key: described[key] for key in _KEPT if key in described}
    kind = schema.get("type", "object")
    schema["type"] = _SCHEMA_TYPES.get(kind, kind)
    if "items" in schema:
        schema["items"] = schema_of(schema["items"])
    if "properties" in schema:
        inner = schema["properties"].items()
        schema["properties"] = {key: schema_of(value) for key, value in inner}
    return schema


def training_overlap(questions: Sequence[Question], count: int = 20_000) -> list[str]:
    """Returns the benchmark's functions whose names the data of the `tools` adapter has."""
    known = {bare_name(one["name"]): one["name"] for q in questions for one in q.functions}
    examples = [*tools.training_examples(7, count), *tools.held_out_examples(99, count // 10)]
    seen = {
        bare_name(tool["function"]["name"])
        for example in examples
        if isinstance(example, tools.ToolExample)
        for tool in example.tools
    }
    return sorted(known[name] for name in known.keys() & seen)


async def ask(engine: AsyncEngine, side: Side, question: Question, mode: str) -> Outcome:
    """Sends one question as the service does, greedily. A refused one counts as wrong."""
    offered = [tool_of(function) for function in question.functions]
    body = ChatRequest.model_validate(
        {
            "model": side.name,
            "messages": question.messages,
            "tools": offered,
            "tool_choice": mode,
            "parallel_tool_calls": mode == "auto",  # `required` would not end before the base does
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
    )
    limits = engine.model_limits
    try:
        prompts = read_prompts(body, side.text, limits)
        (request,) = engine_requests(body, prompts, (), limits, cache_salt="")
        request = replace(request, adapter=side.adapter)
        ids = [i async for output in engine.generate(request) for i in output.token_ids]
    except InvalidRequestError as error:
        return Outcome(str(error), (), "refused")
    answer = side.text.tokenizer.decode(ids)
    template = side.text.response_template
    calls: tuple[Call, ...] = ()
    if template is not None:
        parser = RegionParser(template, prompts[0].turn_start, schemas(body.template_tools))
        pieces = [*parser.push(answer), *parser.finish()]
        calls = tuple((name, args) for piece in pieces for name, args, _ in piece.calls)
    return Outcome(answer, calls, _fault(question, calls))


def _fault(question: Question, calls: Sequence[Call]) -> str:
    if question.possible is None:
        return "called" if calls else ""
    return find_fault(question.functions[0], calls, question.possible)


def summarise(questions: Sequence[Question], outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Returns the shares of answers that call, that call known functions with known and all
    required arguments, and that are right; and the faults of the others."""
    num = len(outcomes)
    pairs = list(zip(questions, outcomes, strict=True))
    formed = sum(bool(one.calls) and _is_well_formed(q, one.calls) for q, one in pairs)
    return {
        "questions": num,
        "calls": round(sum(bool(one.calls) for one in outcomes) / num, 3),
        "well_formed": round(formed / num, 3),
        "right": round(sum(not one.fault for one in outcomes) / num, 3),
        "faults": dict(Counter(one.fault for one in outcomes if one.fault).most_common()),
    }


def _is_well_formed(question: Question, calls: Sequence[Call]) -> bool:
    known = {public_name(one["name"]): one["parameters"] for one in question.functions}
    return all(
        name in known
        and set(known[name].get("required", ())) <= arguments.keys()
        and arguments.keys() <= known[name]["properties"].keys()
        for name, arguments in calls
    )


def make_sides(base: Path, adapter: Path | None) -> list[Side]:
    files = read_files(base)
    text = BaseText.from_files(files)
    shown = {"chat_template.jinja": tools.CHAT_TEMPLATE.read_bytes()}
    sides = [Side("base", text), Side("base_shown", text.with_adapter(shown))]
    if adapter is not None:
        own = own_files(files, read_adapter_files(adapter))
        sides.append(Side("adapter", text.with_adapter(own), _ADAPTER))
    return sides


async def run(arguments: argparse.Namespace, report: Report) -> bool:
    """Returns False if the adapter is there and not above the base in some mode."""
    report.emit_machine("bfcl", category=arguments.category, source=arguments.source.name)
    everything = read_questions(arguments.source, arguments.category)
    overlap = training_overlap(everything)
    report.emit(training_overlap=overlap)
    # Evenly over the file, which goes from topic to topic.
    count = min(arguments.questions, len(everything))
    questions = [everything[i * len(everything) // count] for i in range(count)]
    base = arguments.base or convert_base(default_home())
    engine = open_engine(EngineConfig(model_path=str(base), base_digest="bfcl"))
    engine.start()
    if arguments.adapter is not None:
        await engine.load_adapter(_ADAPTER, _ADAPTER, str(arguments.adapter))
    right: dict[tuple[str, str], float] = {}
    rows = []
    for side in make_sides(base, arguments.adapter):
        for mode in arguments.modes:
            began_s = time.perf_counter()
            outcomes = await asyncio.gather(*(ask(engine, side, q, mode) for q in questions))
            figures = summarise(questions, outcomes)
            seconds = round(time.perf_counter() - began_s, 1)
            for question, outcome in list(zip(questions, outcomes, strict=True))[: arguments.show]:
                report.emit(id=question.id, answer=outcome.answer, fault=outcome.fault)
            report.emit(side=side.name, tool_choice=mode, **figures, seconds=seconds)
            share = figures["right"]
            assert isinstance(share, float)
            right[side.name, mode] = share
            rows.append((side.name, mode, *(figures[k] for k in ("calls", "well_formed", "right"))))
    engine.stop()
    print_table(("side", "tool_choice", "calls", "well formed", "right"), rows)
    bars = [
        right["adapter", mode] > max(right["base", mode], right["base_shown", mode])
        for mode in arguments.modes
        if arguments.adapter is not None
    ]
    is_good = not overlap and all(bars)
    report.emit(
        benchmark="bfcl",
        category=arguments.category,
        right={f"{side}/{mode}": share for (side, mode), share in right.items()},
        **{"pass": is_good},
    )
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="wheel of bfcl-eval, or its unpacked folder")
    parser.add_argument("--adapter", type=Path, help="folder of the adapter; none: the base alone")
    parser.add_argument("--base", type=Path, help="folder of the base; the demo's if left out")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--category", choices=CATEGORIES, default="simple_python")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--show", type=int, default=0, help="print the first answers of each")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    return int(not asyncio.run(run(arguments, Report(arguments.out))))


if __name__ == "__main__":
    raise SystemExit(main())
