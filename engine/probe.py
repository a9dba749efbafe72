"""A base run with and without one adapter on a few prompts: what happens to its logits.

Our own model on the reference backend, one prompt at a time, every position compared over the whole
vocabulary. The base runs twice: by how much it differs from itself is the noise that an effect has
to exceed (0 wherever a product is repeatable). Knows no text: prompts are token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.effect_report import LogitChange
from engine.errors import UnsupportedModelError
from engine.inputs import build_inputs
from engine.kv_cache import KVCache, allocate_kv_cache
from engine.model import Model
from engine.model_config import ModelConfig
from engine.types import Request, SamplingParams, ScheduledBatch, ScheduledSequence
from engine.types import Sequence as Choice
from engine.weights import LayerWeights, Weights
from lora.pool import AdapterPool
from lora.sites import Site, Slice

_BLOCK_SIZE = 16


class Probe:
    def __init__(self, config: ModelConfig, weights: Weights, pool: AdapterPool) -> None:
        self._config = config
        self._model = Model(config, weights, config.max_len)
        self._pool = pool

    @torch.inference_mode()
    def compare(self, digest: str, prompts: Sequence[Sequence[int]]) -> LogitChange:
        """The pool holds the adapter, and its caller a reference to it."""
        parts = []
        for prompt in prompts:
            base = self.logits(prompt, None)
            if not bool(base.isfinite().all()):
                raise UnsupportedModelError(
                    f"without any adapter the base gives NaN or infinite logits in {self._pool.dtype}"
                )
            noise = float((self.logits(prompt, None) - base).abs().max())
            parts.append(_compare(base, self.logits(prompt, digest), noise))
        return _join(parts)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], digest: str | None) -> torch.Tensor:
        """-> [len(prompt), V] float32"""
        request = Request("probe", tuple(prompt), SamplingParams(), digest)
        num_blocks = -(-len(prompt) // _BLOCK_SIZE)
        choice = Choice(request, 0, 0, list(prompt), block_table=list(range(num_blocks)))
        batch = ScheduledBatch((ScheduledSequence(choice, 0, len(prompt), True),))
        inputs = build_inputs(batch, _BLOCK_SIZE, self._pool.device, self._pool)
        every = replace(inputs, logit_rows=None, host_logit_rows=tuple(range(len(prompt))))
        hidden = self._model.forward(every, self._cache(num_blocks), self._pool)
        return self._model.logits(hidden, every, 0, self._pool)

    def _cache(self, num_blocks: int) -> KVCache:
        pool = self._pool
        return allocate_kv_cache(self._config, num_blocks, _BLOCK_SIZE, pool.dtype, pool.device)


def base_norms(weights: Weights, sites: Sequence[Site]) -> dict[str, float]:
    """Module -> Frobenius norm of the base's weight."""
    fused = [tensor for layer in weights.layers for tensor in _matrices(layer)]
    fused += [weights.head, weights.embedding]
    return {
        part.module: float(torch.linalg.vector_norm(rows, dtype=torch.float32))
        for site, tensor in zip(sites, fused, strict=True)
        for part, rows in _slices(site, tensor)
    }


def scratch_bytes(config: ModelConfig, num_tokens: int) -> int:
    """That comparing one prompt takes beside weights and adapter: three sets of logits, and the
    float64 of the largest moment of `_compare`."""
    return num_tokens * config.vocab_size * (3 * 4 + 5 * 8)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Of one prompt. [positions]; those that are not finite are in none of them."""

    num_non_finite: int
    max_delta: torch.Tensor
    mean_delta: torch.Tensor
    kl: torch.Tensor
    argmax_changed: torch.Tensor
    noise: float


def _compare(base: torch.Tensor, adapted: torch.Tensor, noise: float) -> _Compared:
    finite = adapted.isfinite().all(dim=-1)
    base, adapted = base[finite], adapted[finite]  # [T, V]
    delta = (adapted - base).abs()
    before, after = (x.double().log_softmax(dim=-1) for x in (base, adapted))
    return _Compared(
        num_non_finite=int((~finite).sum()),
        max_delta=delta.amax(dim=-1),
        mean_delta=delta.mean(dim=-1),
        kl=(before.exp() * (before - after)).sum(dim=-1).clamp(min=0),
        argmax_changed=base.argmax(dim=-1) != adapted.argmax(dim=-1),
        noise=noise,
    )


def _join(parts: Sequence[_Compared]) -> LogitChange:
    max_delta = torch.cat([part.max_delta for part in parts])
    kl = torch.cat([part.kl for part in parts])
    num_bad = sum(part.num_non_finite for part in parts)
    if not len(max_delta):  # nothing finite anywhere
        return LogitChange(len(parts), num_bad, num_bad, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return LogitChange(
        num_prompts=len(parts),
        num_positions=len(max_delta) + num_bad,
        num_non_finite=num_bad,
        max_delta=float(max_delta.max()),
        mean_delta=float(torch.cat([part.mean_delta for part in parts]).mean()),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        argmax_changed=float(torch.cat([p.argmax_changed for p in parts]).double().mean()),
        noise=max(part.noise for part in parts),
    )


def _matrices(layer: LayerWeights) -> tuple[torch.Tensor, ...]:
    """In the order of `lora_sites`."""
    return layer.qkv, layer.o, layer.gate_up, layer.down


def _slices(site: Site, fused: torch.Tensor) -> Iterator[tuple[Slice, torch.Tensor]]:
    if site.kind == "embedding":
        yield site.slices[0], fused  # [V, H]: its input is the row's number
        return
    sizes = [part.out_features for part in site.slices]
    yield from zip(site.slices, torch.split(fused, sizes), strict=True)
