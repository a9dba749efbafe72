"""What the demo adapters do: 50 held-out prompts each, base against adapter, through our engine.

- extract: the answer is JSON, has exactly the keys asked for, share of values that are right;
- sql: the query runs in SQLite on the prompt's schema, gives the reference's rows on two databases;
- pirate: at least two pirate words, and the right word where the question has a known answer.

    python -m tests.benchmarks.effect [--prompts 50] [--show 0]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.factory import open_engine
from engine.service import AsyncEngine
from engine.types import Request, SamplingParams
from notebooks.demo_adapters import extract, pirate, sql
from notebooks.demo_adapters.common import Example
from notebooks.demo_adapters.score import mark_extract, mark_pirate, mark_sql
from serve_app.cli.demo.prepare import ADAPTER_NAMES, ADAPTERS_DIR, convert_base
from serve_app.config import default_home
from serve_app.text.base_text import BaseText
from tests.benchmarks.report import emit, emit_machine

SEED = 99  # of the held-out prompts; training has another
MAX_TOKENS = 96
FRANCE = "What is the capital of France?"

# What the adapter must reach.
BARS = {
    "extract": {"parses": 0.95, "has_keys": 0.95, "values_right": 0.8},
    "sql": {"executes": 0.95, "result_right": 0.7},
    "pirate": {"speaks_pirate": 0.95},
}
# The mark that shows the effect, and how far above the base the adapter must be.
EFFECTS = {"extract": "has_keys", "sql": "result_right", "pirate": "speaks_pirate"}
LEAST_GAIN = 0.5


@dataclass(frozen=True, slots=True)
class Task:
    prompts: list[str]
    mark: Callable[[int, str], dict[str, bool | float | None]]


def make_tasks(count: int) -> dict[str, Task]:
    texts = extract.held_out_examples(SEED, count)
    queries = sql.held_out_examples(SEED, count)
    questions = pirate.held_out_questions(SEED, count)
    return {
        "extract": Task(_prompts(texts), lambda i, a: asdict(mark_extract(texts[i], a))),
        "sql": Task(_prompts(queries), lambda i, a: asdict(mark_sql(queries[i], a))),
        "pirate": Task(_prompts(questions), lambda i, a: asdict(mark_pirate(questions[i], a))),
    }


async def greedy(
    engine: AsyncEngine, text: BaseText, adapter: str | None, prompts: Sequence[str]
) -> list[str]:
    """All prompts at the same time; the engine queues what it has no room for."""

    async def one(index: int, prompt: str) -> str:
        chat = text.render_chat([{"role": "user", "content": prompt}])
        request = Request(
            request_id=f"{adapter}-{index}-{prompt[:20]}",
            prompt_token_ids=tuple(text.encode(chat, add_special_tokens=False)),
            params=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
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


async def main(count: int, show: int) -> bool:
    emit_machine("effect")
    folder: Path = convert_base(default_home())
    text = BaseText.from_folder(folder)
    engine = open_engine(EngineConfig(model_path=str(folder), base_digest="effect"))
    engine.start()
    passed: dict[str, bool] = {}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name in ADAPTER_NAMES:
        await engine.load_adapter(name, name, str(ADAPTERS_DIR / name))
    for name, task in make_tasks(count).items():
        answers = {
            "base": await greedy(engine, text, None, task.prompts),
            "adapter": await greedy(engine, text, name, task.prompts),
        }
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


def _prompts(examples: Sequence[Example]) -> list[str]:
    return [example.prompt for example in examples]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=50, help="for each adapter")
    parser.add_argument("--show", type=int, default=0, help="print the first answers of each")
    arguments = parser.parse_args()
    raise SystemExit(not asyncio.run(main(arguments.prompts, arguments.show)))
