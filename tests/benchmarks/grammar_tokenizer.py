"""A tokenizer for bases of random weights, and grammars that last longer than a measured output.

Byte-level BPE as most models have it: the bytes, then words of letters with and without a space,
numbers and punctuation, then special tokens up to the vocabulary's size. Free of torch.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

from tests.benchmarks.shapes import ModelShape

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"enum": ["small", "large", "none"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "minItems": 300, "items": _ITEM})
# The costliest kind of mask: half of the vocabulary, with counters. 256 of them take 100 times as
# long as those of the schema. No token holds the end of two words.
REGEX = r"([A-Za-z]{1,12}[ ,.;]){300,999}"
NUM_FIELDS = 40
NUM_FORMS = 20
_NUM_SPECIAL = 2  # the last ids: the shape's bos and eos
_SPACE = "\u0120"  # byte-level BPE's letter for a space


def form_schema(seed: int, num_fields: int = NUM_FIELDS) -> str:
    """Returns the schema of a form as programs ask for it: an object with `num_fields` required
    fields of several kinds, and no other. Its answers end, after some hundred tokens."""
    draw = random.Random(seed)
    properties: dict[str, object] = {}
    while len(properties) < num_fields:
        name = "_".join(_word(draw) for _ in range(draw.randint(1, 3)))
        properties[name] = draw.choice(
            (
                {"type": "string", "maxLength": 24},
                {"type": "integer", "minimum": 0, "maximum": 100_000},
                {"type": "boolean"},
                {"enum": [_word(draw) for _ in range(4)]},
                {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 12}},
            )
        )
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps(schema)


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(4, 8)))


# The text of each grammar by the name of a choice. With several, constrained requests take turns.
GRAMMARS: dict[str, tuple[str, ...]] = {
    "json": (SCHEMA,),
    "form": (form_schema(0),),
    "mixed": tuple(form_schema(seed) for seed in range(NUM_FORMS)),
    "regex": (REGEX,),
}


def write_tokenizer(folder: Path, shape: ModelShape) -> None:
    """Writes tokenizer.json and tokenizer_config.json; the same files for the same shape."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _tokens(shape.vocab_size - _NUM_SPECIAL)
    bos, eos = shape.vocab_size - 2, shape.vocab_size - 1
    special = [
        {
            "id": token_id,
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token_id, name in ((bos, "<s>"), (eos, "</s>"))
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)} | {"<s>": bos, "</s>": eos},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def _tokens(count: int) -> list[str]:
    tokens = dict.fromkeys(_byte_letters())
    assert len(tokens) == 256
    draw = random.Random(0)
    while len(tokens) < count:
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8)))
        kind = draw.random()
        if kind < 0.1:
            word = "".join(draw.choices(string.digits + string.punctuation, k=draw.randint(2, 4)))
        elif kind < 0.2:
            word = word.capitalize()
        tokens[word if draw.random() < 0.5 else _SPACE + word] = None
    return list(tokens)[:count]


def _byte_letters() -> list[str]:
    """Returns GPT-2's letters of the 256 bytes."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
