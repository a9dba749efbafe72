"""The requests of a fleet's clients, and when the clients leave."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.fleet_engine import LETTERS, POISON

Leaving = Literal["disconnect", "cancel"]  # http.disconnect, or Serve's cancellation


@dataclass(frozen=True, slots=True)
class Wish:
    """`leaves_after`: iterations of the event loop from the request's arrival on."""

    is_chat: bool
    is_stream: bool
    model: str
    prompts: tuple[str, ...]
    n: int
    max_tokens: int
    stop: str | None
    seed: int | None
    tenant: str
    priority: int
    padding: int = 0  # spaces after the body
    body_s: float = 0.0  # the duration of its upload
    read_s: float = 0.0  # the duration of each write to the client
    leaving: Leaving | None = None
    leaves_after: int = 0

    def __str__(self) -> str:
        kind = f"{'chat' if self.is_chat else 'completion'}{' stream' if self.is_stream else ''}"
        words = f"{kind} of {self.model}, {len(self.prompts)} x {self.n} x {self.max_tokens} tokens"
        if self.stop:
            words += f", stop {self.stop!r}"
        if self.leaving:
            words += f", {self.leaving} after {self.leaves_after} iterations"
        return words

    @property
    def is_poison(self) -> bool:
        return not self.is_chat and any(prompt.startswith(POISON) for prompt in self.prompts)

    @property
    def engine_prompts(self) -> tuple[str, ...]:
        """The prompts as the engine gets them."""
        if self.is_chat:
            return tuple(f"<user>{prompt}\n<assistant>" for prompt in self.prompts)
        return self.prompts

    def body(self) -> bytes:
        fields: dict[str, object] = {
            "model": self.model,
            "stream": self.is_stream,
            "n": self.n,
            "max_tokens": self.max_tokens,
            "priority": self.priority,
        }
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": self.prompts[0]}]
        else:
            fields["prompt"] = list(self.prompts)
        if self.stop:
            fields["stop"] = self.stop
        if self.seed is not None:
            fields["seed"] = self.seed
        if self.is_stream:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields).encode() + b" " * self.padding


def draw_wish(
    draw: random.Random, number: int, models: Sequence[str], poison: float, leaving: float
) -> Wish:
    """`poison`, `leaving`: the probability of each."""
    is_chat = draw.random() < 0.4
    word = "".join(draw.choice(LETTERS) for _ in range(draw.choice((3, 20, 90))))
    count = 1 if is_chat else draw.choice((1, 1, 1, 2, 4))
    first = POISON if not is_chat and draw.random() < poison else ""
    prompts = tuple(f"{first}{word}{number}x{index}" for index in range(count))
    how: Leaving | None = None
    if draw.random() < leaving:
        how = draw.choice(("disconnect", "cancel"))
    return Wish(
        is_chat,
        draw.random() < 0.6,
        draw.choice(models),
        prompts,
        draw.choice((1, 1, 1, 2, 3)),
        draw.choice((1, 2, 8, 30, 60)),
        draw.choice(LETTERS) + (draw.choice(LETTERS) if draw.random() < 0.3 else "")
        if draw.random() < 0.3
        else None,
        None if draw.random() < 0.3 else draw.randrange(1 << 30),
        draw.choice(("", "gold", "iron", f"t{draw.randrange(4)}")),
        draw.choice((0, 0, 0, -2, 3)),
        padding=draw.choice((20_000, 90_000)) if draw.random() < 0.05 else 0,
        body_s=draw.uniform(0.0, 1.7) if draw.random() < 0.1 else 0.0,
        read_s=draw.uniform(0.0, 0.3) if draw.random() < 0.1 else 0.0,
        leaving=how,
        leaves_after=int(10 ** draw.uniform(0.0, 3.2)),
    )
