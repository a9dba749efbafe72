"""Log-probabilities in the two shapes of the OpenAI API, and vLLM's for prompts.

Every number is finite (JSON has no infinity), and one position's own number and its entry among
the most likely are the same float: lm-eval compares them for equality.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.types import TokenLogprobs
from serve_app.text.tokenizer import TextTokenizer

MIN_LOGPROB = -9999.0

Json = dict[str, object]


def finite(logprob: float) -> float:
    """NaN too becomes the least."""
    return logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB


def chat_entry(entry: TokenLogprobs, num_top: int, tokenizer: TextTokenizer) -> Json:
    top = entry.top[:num_top]
    return {
        **_chat_token(entry.token_id, entry.logprob, tokenizer),
        "top_logprobs": [
            _chat_token(i, entry.logprob if i == entry.token_id else logprob, tokenizer)
            for i, logprob in top
        ],
    }


def _chat_token(token_id: int, logprob: float, tokenizer: TextTokenizer) -> Json:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


@dataclass(slots=True)
class CompletionLogprobs:
    """The parallel lists of /v1/completions; positions without a distribution hold null."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(
        self,
        positions: Iterable[tuple[int, TokenLogprobs | None, int]],
        num_top: int,
        tok: TextTokenizer,
    ) -> None:
        """Ids, their numbers and their offsets. Without numbers: the first token of a prompt."""
        for token_id, entry, offset in positions:
            if entry is None:
                self.append_first(token_id, tok)
            else:
                self.append(entry, num_top, offset, tok)

    def append(self, entry: TokenLogprobs, num_top: int, offset: int, tok: TextTokenizer) -> None:
        logprob = finite(entry.logprob)
        top: dict[str, float] = {}
        # Tokens that share a text collapse: the most likely one stays. The drawn one is among them.
        for token_id, value in ((entry.token_id, logprob), *entry.top[:num_top]):
            if token_id == entry.token_id:
                value = logprob
            text = tok.token_text(token_id)
            top[text] = max(finite(value), top.get(text, MIN_LOGPROB))
        self.tokens.append(tok.token_text(entry.token_id))
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def append_first(self, token_id: int, tok: TextTokenizer) -> None:
        """The first token of a prompt: nothing came before it to predict it."""
        self.tokens.append(tok.token_text(token_id))
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.text_offset.append(0)

    def to_json(self) -> Json:
        return {**self.lists()}

    def lists(self) -> dict[str, Sequence[object]]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def prompt_entries(
    entries: Sequence[TokenLogprobs | None], num_top: int, tokenizer: TextTokenizer
) -> list[dict[str, Json] | None]:
    """vLLM's `prompt_logprobs`: a map from token id to its number, rank and text."""
    return [
        None if entry is None else _prompt_entry(entry, num_top, tokenizer) for entry in entries
    ]


def _prompt_entry(entry: TokenLogprobs, num_top: int, tokenizer: TextTokenizer) -> dict[str, Json]:
    ranked = {
        token_id: (rank, value) for rank, (token_id, value) in enumerate(entry.top[:num_top], 1)
    }
    ranked[entry.token_id] = (entry.rank, entry.logprob)
    return {
        str(token_id): {
            "logprob": finite(value),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (rank, value) in ranked.items()
    }
