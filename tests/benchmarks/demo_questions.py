"""The demo's base, its adapters, and questions to them that training never saw, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from engine.types import Request, SamplingParams
from notebooks.demo_adapters import extract, pirate, sql, tools
from notebooks.demo_adapters.common import Example
from notebooks.demo_adapters.train import chat_template, render

ADAPTERS = ("sql", "extract", "tools")
QUESTIONS: dict[str, Callable[[int, int], Sequence[Example]]] = {
    "sql": sql.held_out_examples,
    "extract": extract.held_out_examples,
    "tools": tools.held_out_examples,
    "base": pirate.held_out_questions,  # free chat: drafts are hardly ever right
}
ADAPTERS_DIR = Path(__file__).parents[2] / "serve_app/cli/demo/adapters"


def demo_prompts(base: Path, adapter: str, seed: int, count: int) -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    template = chat_template(adapter)
    if template is not None:
        tokenizer.chat_template = template
    texts = [render(tokenizer, example) for example in QUESTIONS[adapter](seed, count)]
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def demo_rounds(base: Path, adapter: str, rounds: int, count: int) -> Iterator[list[Request]]:
    params = SamplingParams(max_tokens=96, temperature=0.0)
    for number in range(rounds):
        prompts = demo_prompts(base, adapter, 100 + number, count)
        key = None if adapter == "base" else adapter
        yield [Request(f"{adapter}-{i}", ids, params, key) for i, ids in enumerate(prompts)]


def prepared_base() -> Path:
    """Returns the folder of the demo's base, made where it is missing."""
    # Only here: it needs MLflow, which a machine that measures a given folder may lack.
    from serve_app.cli.demo.prepare import base_folder, prepare
    from serve_app.config import default_home

    prepare(default_home())
    return base_folder(default_home())
