"""The effect of the demo's adapters: 50 held-out prompts each, base against adapter, on our engine.

- extract: the answer is JSON, has exactly the keys asked for, share of values that are right; the
  adapter answers once more under the JSON schema of those keys;
- sql: the query runs in SQLite on the prompt's schema, gives the reference's rows on two databases;
- pirate: at least two pirate words, and the right word where the question has a known answer;
- tools: the answer calls if a call is right and the right function, calls are well
  formed, arguments are right, with tool_choice "auto"; the base reads the adapter's chat template.

    python -m tests.benchmarks.effect [--prompts 50] [--show 0] [--kv-cache-dtype fp8]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.factory import open_engine
from engine.service import AsyncEngine
from engine.types import Grammar, Request, SamplingParams
from notebooks.demo_adapters import extract, pirate, sql, tools
from notebooks.demo_adapters.common import Example
from notebooks.demo_adapters.score import mark_extract, mark_pirate, mark_sql, mark_tools
from serve_app.cli.demo.prepare import ADAPTER_NAMES, ADAPTERS_DIR, convert_base
from serve_app.config import default_home
from serve_app.text.adapter_text import read_adapter_files
from serve_app.text.base_text import BaseText
from tests.benchmarks.report import emit, emit_machine

SEED = 99  # of the held-out prompts; training has another
MAX_TOKENS = 96
MAX_CALL_TOKENS = 192  # two calls with many arguments
FRANCE = "What is the capital of France?"

# What the adapter must reach.
BARS = {
    "extract": {"parses": 0.95, "has_keys": 0.95, "values_right": 0.8},
    "sql": {"executes": 0.95, "result_right": 0.7},
    "pirate": {"speaks_pirate": 0.95},
    "tools": {"decides": 0.9, "well_formed": 0.95, "arguments_right": 0.8},
}
# The mark that shows the effect, and how far above the base the adapter must be.
EFFECTS = {
    "extract": "has_keys",
    "sql": "result_right",
    "pirate": "speaks_pirate",
    "tools": "decides",
}
LEAST_GAIN = 0.5


@dataclass(frozen=True, slots=True)
class Task:
    prompts: list[str]
    mark: Callable[[int, str], dict[str, bool | float | None]]
    chats: Sequence[tools.ToolExample] = ()  # the prompts with tools and earlier turns


def make_tasks(count: int) -> dict[str, Task]:
    """Returns the tasks of the adapters that ship."""
    texts = extract.held_out_examples(SEED, count)
    queries = sql.held_out_examples(SEED, count)
    questions = pirate.held_out_questions(SEED, count)
    chats = tools.held_out_examples(SEED, count)
    return {
        "extract": Task(_prompts(texts), lambda i, a: asdict(mark_extract(texts[i], a))),
        "sql": Task(_prompts(queries), lambda i, a: asdict(mark_sql(queries[i], a))),
        "pirate": Task(_prompts(questions), lambda i, a: asdict(mark_pirate(questions[i], a))),
        "tools": Task(_prompts(chats), lambda i, a: asdict(mark_tools(chats[i], a)), chats),
    }


async def greedy(
    engine: AsyncEngine,
    text: BaseText,
    adapter: str | None,
    prompts: Sequence[str],
    grammars: Sequence[Grammar] = (),
    chats: Sequence[tools.ToolExample] = (),
) -> list[str]:
    """Returns the answers to all prompts, sent at the same time; the engine queues what it has no
    room for. `grammars` and `chats`: one per prompt, or none at all."""

    async def one(index: int, prompt: str) -> str:
        chat = (
            text.render_chat(chats[index].messages, tools=chats[index].tools)
            if chats
            else text.render_chat([{"role": "user", "content": prompt}])
        )
        request = Request(
            request_id=f"{adapter}-{index}-{bool(grammars)}-{prompt[:20]}",
            prompt_token_ids=tuple(text.encode(chat, add_special_tokens=False)),
            params=SamplingParams(
                max_tokens=MAX_CALL_TOKENS if chats else MAX_TOKENS,
                temperature=0.0,
                grammar=grammars[index] if grammars else None,
            ),
            adapter=adapter,
        )
        ids = [i async for output in engine.generate(request) for i in output.token_ids]
        return text.tokenizer.decode(ids).strip()

    return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))


def summarise(task: Task, answers: Sequence[str]) -> dict[str, float]:
    """The mean of every mark over the answers that have it."""
    marks = [task.mark(i, answer) for i, answer in enumerate(answers)]
    means = {}
    for name in marks[0]:
        values = [float(value) for mark in marks if (value := mark[name]) is not None]
        means[name] = round(statistics.fmean(values), 3)
    return means


def passes(name: str, base: dict[str, float], adapter: dict[str, float]) -> bool:
    effect = EFFECTS[name]
    reaches = all(adapter[mark] >= least for mark, least in BARS[name].items())
    return reaches and adapter[effect] >= base[effect] + LEAST_GAIN


async def main(arguments: argparse.Namespace) -> bool:
    count, show = arguments.prompts, arguments.show
    settings = {
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
    }
    emit_machine("effect", **settings)
    folder: Path = convert_base(default_home())
    text = BaseText.from_folder(folder)
    engine = open_engine(EngineConfig(model_path=str(folder), base_digest="effect", **settings))
    engine.start()
    passed: dict[str, bool] = {}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name in ADAPTER_NAMES:
        await engine.load_adapter(name, name, str(ADAPTERS_DIR / name))
    for name, task in make_tasks(count).items():
        own = text_of(text, ADAPTERS_DIR / name)
        answers = {
            "base": await greedy(engine, own, None, task.prompts, (), task.chats),
            "adapter": await greedy(engine, own, name, task.prompts, (), task.chats),
        }
        if name == "extract":
            answers["adapter_with_schema"] = await _with_schema(engine, text, task)
        figures[name] = {who: summarise(task, said) for who, said in answers.items()}
        passed[name] = passes(name, figures[name]["base"], figures[name]["adapter"])
        for i, prompt in enumerate(task.prompts[:show]):
            emit(task=name, prompt=prompt, **{who: said[i] for who, said in answers.items()})
        emit(task=name, prompts=len(task.prompts), passes=passed[name], **figures[name])
    capital = (await greedy(engine, text, "pirate", [FRANCE]))[0]
    emit(task="pirate", prompt=FRANCE, answer=capital)
    engine.stop()
    ok = all(passed.values()) and "Paris" in capital and pirate.speaks_pirate(capital)
    emit(benchmark="effect", figures=figures, capital_of_france=capital, **{"pass": ok})
    return ok


def text_of(base: BaseText, folder: Path) -> BaseText:
    """Returns the text side of the adapter in this folder, with its own chat template if any."""
    files = read_adapter_files(folder)
    return base.with_adapter(files) if files else base


def extract_schema(answer: str) -> Grammar:
    """Returns the grammar of the objects with the keys of the reference answer; each value may be
    null, as for a field that the text does not hold."""
    kinds = {str: "string", int: "integer", float: "number", type(None): "string"}
    fields = json.loads(answer)
    schema = {
        "type": "object",
        "properties": {key: {"type": [kinds[type(fields[key])], "null"]} for key in fields},
        "required": list(fields),
        "additionalProperties": False,
    }
    return Grammar("json_schema", json.dumps(schema))


async def _with_schema(engine: AsyncEngine, text: BaseText, task: Task) -> list[str]:
    examples = extract.held_out_examples(SEED, len(task.prompts))
    grammars = [extract_schema(example.answer) for example in examples]
    seconds, steps = {}, {}
    answers: list[str] = []
    for side, chosen in (("free", []), ("schema", grammars), ("free again", [])):
        began_s, before = time.perf_counter(), engine.load().num_steps
        found = await greedy(engine, text, "extract", task.prompts, chosen)
        seconds[side] = round(time.perf_counter() - began_s, 2)
        steps[side] = engine.load().num_steps - before
        answers = found if chosen else answers
    emit(task="extract", seconds=seconds, steps=steps)
    return answers


def _prompts(examples: Sequence[Example]) -> list[str]:
    return [example.prompt for example in examples]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=50, help="for each adapter")
    parser.add_argument("--show", type=int, default=0, help="print the first answers of each")
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    raise SystemExit(not asyncio.run(main(parser.parse_args())))
