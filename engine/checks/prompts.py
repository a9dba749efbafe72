"""The prompts of a check, as token ids: cut to a length, and completed so that an adapter whose
change is at some tokens only is met by them. Free of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.activation import find_activation
from engine.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from engine.model_config import ModelConfig
from lora.adapter import Adapter
from lora.errors import AdapterError
from lora.peft_config import read_peft_config

MAX_PROMPT_TOKENS = 256
_EMBEDDING = "model.embed_tokens"
_MAX_TOUCHED = 64  # tokens of which the embedding has other rows

Prompts = Sequence[Sequence[int]]  # token ids


def cut_prompts(prompts: Prompts, config: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the beginnings of the prompts. Raises UnsupportedModelError for tokens that the base
    has not."""
    cut = [tuple(prompt)[: prompt_limit(config)] for prompt in prompts]
    for prompt in cut:
        if not prompt or not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise UnsupportedModelError(
                f"a probe prompt has no tokens, or one outside the {config.vocab_size} of the base"
            )
    return cut


def prompt_limit(config: ModelConfig) -> int:
    return min(MAX_PROMPT_TOKENS, config.usual_len)


def complete_prompts(
    prompts: Sequence[tuple[int, ...]], adapter: Adapter, limit: int
) -> list[tuple[int, ...]]:
    """Returns the prompts with the adapter's invocation tokens in the middle of each that has none,
    and one more with the tokens of which it changes the embedding, if they are few. No prompt has
    more than `limit` tokens. Raises AdapterError if the invocation leaves no room."""
    found = list(prompts)
    if tokens := _touched_tokens(adapter):
        found.append((*prompts[0], *tokens)[-limit:])
    if not adapter.invocation:
        return found
    if len(adapter.invocation) >= limit:
        raise AdapterError(
            f"alora_invocation_tokens are {len(adapter.invocation)} tokens, a prompt of the check "
            f"has at most {limit}"
        )
    return [_invoked(prompt, adapter.invocation, limit) for prompt in found]


def check_given(prompts: Prompts, folder: Path, config: ModelConfig) -> None:
    """Checks the prompts that a user gave for the adapter of `folder`. Raises ContextLengthError
    for one beyond the base's length, and InvalidRequestError for an empty one, and for one without
    the adapter's invocation tokens: the base alone would answer it."""
    try:
        invocation = read_peft_config(folder).invocation
    except AdapterError:  # the check itself reports it
        invocation = ()
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise InvalidRequestError(f"prompt {number} is empty: it has no tokens")
        if len(prompt) > config.usual_len:
            raise ContextLengthError(
                f"prompt {number} has {len(prompt)} tokens, the base takes {config.usual_len}"
            )
        if invocation and find_activation(prompt, invocation) is None:
            tokens = " ".join(map(str, invocation))
            raise InvalidRequestError(
                f"prompt {number} does not have the adapter's invocation tokens {tokens} (aLoRA): "
                "the base alone would answer it"
            )


def _touched_tokens(adapter: Adapter) -> tuple[int, ...]:
    """Returns the tokens whose rows of the embedding change, if these are some rows and not all:
    trained tokens, and rows of a saved embedding."""
    weights = adapter.modules.get(_EMBEDDING)
    if weights is None:
        return ()
    found = weights.lora_a.any(dim=0).nonzero().flatten().tolist()  # columns of [r, V]
    is_all = len(found) > weights.rank
    return () if is_all else tuple(map(int, found[:_MAX_TOUCHED]))


def _invoked(prompt: tuple[int, ...], invocation: tuple[int, ...], limit: int) -> tuple[int, ...]:
    if find_activation(prompt, invocation) is not None:
        return prompt
    prompt = prompt[: limit - len(invocation)]
    middle = len(prompt) // 2
    return (*prompt[:middle], *invocation, *prompt[middle:])
