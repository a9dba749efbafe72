"""An adapter folder taken apart and put together wrongly, as fuzzing needs it.

`AdapterFiles` holds the configuration, the header and the data of a good folder; a mutation changes
them, writes any bytes it likes, and says what has to follow. Ignorant of who judges the result.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Expectation:
    """The right verdict on a mutated folder. PEFT is the oracle of what is accepted ("accepted" or
    "either"); "unchanged" is the adapter that the template is, though PEFT could not say so, and
    "unchanged or refused" the same where a refusal is right too."""

    verdict: Literal["refused", "accepted", "either", "unchanged", "unchanged or refused"]
    words: str = ""  # a regular expression that the reason of a refusal must contain


def refused(words: str = "") -> Expectation:
    return Expectation("refused", words)


ACCEPTED = Expectation("accepted")
EITHER = Expectation("either")
UNCHANGED = Expectation("unchanged")
UNCHANGED_OR_REFUSED = Expectation("unchanged or refused")


class AdapterFiles:
    """A folder of its own, at first a good one."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.config: Json = json.loads((template / CONFIG).read_text())
        raw = (template / WEIGHTS).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        self.header: dict[str, Json] = json.loads(raw[8 : 8 + length])
        self.header.pop("__metadata__", None)
        self.data = raw[8 + length :]
        self.write_config()
        self.write_weights(raw)

    def write_config(self, content: bytes | None = None) -> None:
        text = json.dumps(self.config).encode() if content is None else content
        (self.folder / CONFIG).write_bytes(text)

    def change_config(self, **fields: object) -> None:
        self.config |= fields
        self.write_config()

    def write_weights(self, content: bytes) -> None:
        (self.folder / WEIGHTS).write_bytes(content)

    def write_header(self, header: bytes | None = None, data: bytes | None = None) -> None:
        """The file of a header's text and the data, the length in front of it right."""
        text = json.dumps(self.header).encode() if header is None else header
        body = self.data if data is None else data
        self.write_weights(len(text).to_bytes(8, "little") + text + body)

    @property
    def weights(self) -> bytes:
        return (self.folder / WEIGHTS).read_bytes()

    def replace(self, name: str, make: Callable[[Path], object]) -> None:
        """Puts something else in the place of a file."""
        path = self.folder / name
        path.unlink()
        make(path)

    def any_key(self, rng: random.Random, part: str = "lora_") -> str:
        return rng.choice([key for key in self.header if part in key])

    def span(self, key: str) -> tuple[int, int]:
        begin, end = self._numbers(key, "data_offsets")
        return begin, end

    def shape(self, key: str) -> list[int]:
        return self._numbers(key, "shape")

    def _numbers(self, key: str, field: str) -> list[int]:
        value = self.header[key][field]
        assert isinstance(value, list)
        return value


Mutation = Callable[[AdapterFiles, random.Random], Expectation]


def flip_bits(content: bytes, rng: random.Random, count: int, begin: int, end: int) -> bytes:
    changed = bytearray(content)
    for place in (rng.randrange(begin, end) for _ in range(count)):
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)
