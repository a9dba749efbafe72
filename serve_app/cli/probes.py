"""What a base is asked to see whether an adapter changes its answers: short, and of many kinds.

Any text would do: an adapter that changes weights changes every answer a little. The kinds are many
so that the share of changed tokens says something of an adapter made for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidRequestError
from serve_app.text.base_text import BaseText

PROBES = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "CREATE TABLE users (id INTEGER, name TEXT, age INTEGER);\n\nHow many users are older than 30?",
    'Extract the fields as JSON with the keys "name" and "city": Ada Byron lives in London.',
    "Traduis en français : The weather is lovely today.",
    "Once upon a time, in a village by the sea,",
)


def tokenize(text: BaseText, prompts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """As a user's message where the base has a template that takes one, else as plain text."""
    return tuple(tuple(_one(text, prompt)) for prompt in prompts)


def _one(text: BaseText, prompt: str) -> list[int]:
    if text.template is not None:
        try:
            chat = text.render_chat([{"role": "user", "content": prompt}])
        except InvalidRequestError:  # a template for other messages than this; text probes as well
            return text.encode(prompt)
        return text.encode(chat, add_special_tokens=False)
    return text.encode(prompt)
