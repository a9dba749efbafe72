"""A base with rounded keys and values against itself, before it serves them.

Rounding to e4m3 keeps three bits behind the leading one. Most bases hardly notice; where a bias
makes some keys a hundred times larger than the part that depends on the token, the token is lost in
the rounding, and no scale helps. So the base is run on a few prompts with both caches, by the
reference backend. The prompts are random tokens, which need no tokenizer. Free of text.
"""

from __future__ import annotations

import logging

import torch

from engine.checks.effect_report import LogitChange
from engine.checks.probe import Probe
from engine.errors import UnsupportedModelError
from engine.model_config import ModelConfig
from engine.weights import Weights
from kernels.backend import reference_only
from lora.pool import AdapterPool

logger = logging.getLogger(__name__)

_NUM_PROMPTS = 2
_PROMPT_TOKENS = 128  # 256 positions of SmolLM2-135M: two seconds of a core
# Nats. SmolLM2-135M has 0.013, Qwen-like keys with a bias of 100 beside tokens of 1 some 0.3.
_MAX_KL = 0.1


def check_kv_rounding(
    config: ModelConfig, weights: Weights, pool: AdapterPool, kv_dtype: torch.dtype
) -> LogitChange:
    """Measures the change of the logits by a KV cache of this type. Raises UnsupportedModelError if
    the base does not stand it."""
    draw = torch.Generator().manual_seed(0)
    shape = (_NUM_PROMPTS, min(_PROMPT_TOKENS, config.usual_len))
    prompts = torch.randint(config.vocab_size, shape, generator=draw).tolist()
    with reference_only():
        change = Probe(config, weights, pool).compare_kv(prompts, kv_dtype)
    found = (
        f"a mean KL of {change.mean_kl:.4f} nats, another greedy token at "
        f"{change.argmax_changed:.1%} of {change.num_positions} positions"
    )
    if change.num_non_finite or change.mean_kl > _MAX_KL:
        raise UnsupportedModelError(
            f"kv_cache_dtype is fp8, which changes this base too much on random tokens: {found}, "
            f"{change.num_non_finite} positions without finite logits; use auto"
        )
    logger.info("keys and values in FP8 change the base on random tokens by %s", found)
    return change
