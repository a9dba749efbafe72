"""A base with rounded keys and values against itself, before it serves them.

Rounding to e4m3 keeps three bits behind the leading one. Most bases hardly notice; where a bias
makes some keys a hundred times larger than the part that depends on the token, the token is lost in
the rounding, and no scale helps. So the base is run on a few prompts with both caches, by the
reference backend. The prompts are random tokens, which need no tokenizer. Free of text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.checks.probe import Probe, compare_rows
from engine.errors import UnsupportedModelError
from engine.model import Model
from kernels.backend import reference_only
from lora.pool import AdapterPool

logger = logging.getLogger(__name__)

_NUM_PROMPTS = 2
_PROMPT_TOKENS = 128  # 256 positions of SmolLM2-135M: two seconds of a core
# Nats, of the median position: with linears in FP8, any change moves a few positions by nats. So
# SmolLM2-135M has a mean of 0.01 to 0.05 over seeds of the prompts, with linears in FP8 of 0.05 to
# 0.16, and medians of 0.01 to 0.02 and 0.04 to 0.08. Keys that are mostly bias have 0.13 or more.
_MAX_KL = 0.1


@dataclass(frozen=True, slots=True)
class KVChange:
    """The logits with a rounded cache against those with an exact one."""

    num_positions: int
    num_without: int  # positions whose logits are not finite with the exact cache
    num_lost: int  # positions whose logits are finite with the exact cache only
    median_kl: float  # nats, over the others
    argmax_changed: float  # share of them


def check_kv_rounding(change: KVChange, dtype: torch.dtype) -> None:
    """Raises UnsupportedModelError if the base does not stand the change. `dtype`: of the
    activations."""
    if change.num_without:
        raise UnsupportedModelError(
            f"kv_cache_dtype is fp8: the base cannot be compared with itself, because "
            f"{change.num_without} of {change.num_positions} random tokens have no finite logits "
            f"in {dtype} with auto either; use kv_cache_dtype: auto"
        )
    found = (
        f"a median KL of {change.median_kl:.4f} nats, another greedy token at "
        f"{change.argmax_changed:.1%} of {change.num_positions} positions"
    )
    lost = f", {change.num_lost} without finite logits" if change.num_lost else ""
    if change.num_lost or change.median_kl > _MAX_KL:
        raise UnsupportedModelError(
            f"kv_cache_dtype is fp8, which changes this base too much on random tokens: {found}"
            f"{lost}; use kv_cache_dtype: auto"
        )
    logger.info("keys and values in FP8 change the base on random tokens by %s", found)


def measure_kv_rounding(
    model: Model, pool: AdapterPool, kv_dtype: torch.dtype, max_model_len: int
) -> KVChange:
    """Measures the change of the logits by a KV cache of this type. All ranks of the model call it
    and find the same."""
    draw = torch.Generator().manual_seed(0)
    shape = (_NUM_PROMPTS, min(_PROMPT_TOKENS, max_model_len))
    prompts = torch.randint(model.config.vocab_size, shape, generator=draw).tolist()
    kl: list[torch.Tensor] = []
    changed: list[torch.Tensor] = []
    num_exact = num_lost = 0
    with reference_only():
        for exact, rounded in Probe(model, pool).with_both_caches(prompts, kv_dtype):
            is_exact = exact.isfinite().all(dim=-1)
            found = compare_rows(exact[is_exact], rounded[is_exact])
            num_exact += int(is_exact.sum())
            num_lost += found.num_non_finite
            kl.append(found.kl)
            changed.append(found.argmax_changed)
    num_positions = shape[0] * shape[1]
    is_empty = num_exact == num_lost
    return KVChange(
        num_positions,
        num_positions - num_exact,
        num_lost,
        0.0 if is_empty else float(torch.cat(kl).median()),
        0.0 if is_empty else float(torch.cat(changed).double().mean()),
    )
