"""Random schemas, a tiny tokenizer with merges, and engines that follow grammars."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.core import Engine
from engine.grammar_state import fill_masks
from engine.grammars import Grammars
from engine.types import Grammar, Request, Sample, ScheduledBatch, TokenOutput
from tests.fakes import FakeModel, FakeRunner, FakeStep, last_hash, make_config

EOS = 0
THINK_END = 1
VOCAB = 400  # more than the tokenizer has: the rest is padding
JSON_TYPES = ("string", "integer", "boolean", "null", "enum", "array", "object", "anyOf")


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 20,
        special_tokens=["<eos>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    generator = random.Random(0)
    corpus = [json.dumps({"field_a": i, "name": "value", "items": [1, 2]}) for i in range(40)]
    corpus += [json.dumps(random_schema(generator, 2)) for _ in range(40)]
    made.train_from_iterator(corpus, trainer)
    return made


@cache
def grammars() -> Grammars:
    with TemporaryDirectory() as folder:
        tokenizer().save(str(Path(folder, "tokenizer.json")))
        found = Grammars.load(Path(folder), VOCAB, (EOS,))
    assert isinstance(found, Grammars), found
    return found


def text(token_ids: Many[int]) -> str:
    return tokenizer().decode(list(token_ids))


def accepts(grammar: Grammar, text: str) -> bool:
    """Returns True if the text is a whole answer of the grammar, as engines follow it."""
    matcher = grammars().open(grammar, ()).result()
    ids = tokenizer().encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def schema_grammar(schema: object, starts_after: int | None = None) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), starts_after)


def ambiguous(num_rules: int) -> Grammar:
    """Six letters, then a word in which each letter leaves twice as many rules open."""
    names = [f"r{i}" for i in range(num_rules)]
    lines = ["start: /[xyz]{6}/ (" + " | ".join(names) + ")"]
    for i, name in enumerate(names):
        one, other = names[(i + 1) % num_rules], names[(7 * i + 1) % num_rules]
        lines.append(f'{name}: "a" {one} | "a" {other} | "b"')
    return Grammar("lark", "\n".join(lines))


def random_schema(generator: random.Random, depth: int) -> dict[str, object]:
    """Bounded, so that every answer ends within some hundred tokens."""
    kind = generator.choice(JSON_TYPES if depth else JSON_TYPES[:5])
    if kind == "string":
        return {"type": "string", "maxLength": generator.randint(0, 6)}
    if kind == "integer":
        return {"type": "integer", "minimum": -9, "maximum": generator.randint(0, 500)}
    if kind == "enum":
        return {"enum": generator.sample(["red", 7, None, "né", True, "a b"], 3)}
    if kind == "array":
        items = random_schema(generator, depth - 1)
        return {"type": "array", "items": items, "maxItems": generator.randint(1, 3)}
    if kind == "object":
        names = generator.sample(["field_a", "name", "items", "x", "é", 'q"'], 3)
        properties = {name: random_schema(generator, depth - 1) for name in names}
        required = generator.sample(names, generator.randint(0, 3))
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(generator, depth - 1), {"type": "null"}]}
    return {"type": kind}


@dataclass(slots=True)
class DeferredStep(FakeStep):
    """A step whose rows with a grammar are drawn after the commit of the step before."""

    runner: DeferringRunner | None = None
    batch: ScheduledBatch | None = None

    def draw(self) -> None:
        assert self.runner is not None
        assert self.batch is not None
        if self.runner.fail_next_draw is not None:
            error, self.runner.fail_next_draw = self.runner.fail_next_draw, None
            raise error
        self.samples = tuple(
            self.runner.draw_one(item.sequence, sample)
            for item, sample in zip(self.batch.sequences, self.samples, strict=True)
        )


class DeferringRunner(FakeRunner):
    """Draws tokens of a grammar as a function of the tokens before, seed and choice."""

    def __init__(self, num_blocks: int = 256) -> None:
        super().__init__(num_blocks, model=FakeModel(VOCAB, 4096, (EOS,)))
        self.fail_next_draw: Exception | None = None

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        step = super().launch(batch)
        return DeferredStep(step.samples, step.error, self, batch)

    def draw_one(self, sequence, sample: Sample) -> Sample:  # type: ignore[no-untyped-def]
        state = sequence.grammar_state
        if state is None or sample.token_id is None:
            return sample
        token_id = masked_draw(sequence.request, sequence.choice, sequence.token_ids, state)
        self._drawn[sequence] = token_id
        return sample._replace(token_id=token_id)


def masked_draw(request: Request, choice: int, token_ids: list[int], state) -> int:  # type: ignore[no-untyped-def]
    masks = np.zeros((1, (VOCAB + 31) // 32), dtype=np.int32)
    fill_masks([state], masks)
    allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
    last = last_hash(request, token_ids)
    value = zlib.crc32(f"{last}/{request.params.seed}/{choice}".encode())
    return int(allowed[value % len(allowed)]) % VOCAB


def make_grammar_engine(runner: FakeRunner, **config: int | bool | str | None) -> Engine:
    settings = make_config(block_size=runner.block_size, **config)
    return Engine(settings, runner, grammars=grammars())


def run(engine: Engine, requests: Many[Request]) -> dict[tuple[str, int], list[TokenOutput]]:
    for request in requests:
        engine.add_request(request)
    found: dict[tuple[str, int], list[TokenOutput]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs = found.setdefault((output.request_id, output.choice), [])
            outputs.append(output)
    return found


def token_ids(outputs: Many[TokenOutput]) -> list[int]:
    """Returns the tokens of a choice; their offsets must leave no gap."""
    start = outputs[0].offset
    found: list[int] = []
    for output in outputs:
        assert output.offset == start + len(found)
        found += output.token_ids
    return found
