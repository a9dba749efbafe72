"""A base run with and without one adapter on a few prompts, and the change of its logits.

Our own model on the reference backend, all prompts in one step, every position compared over the
whole vocabulary. A small change has to exceed the noise: the base runs twice, and its difference
from itself is no effect (0 if products are repeatable). An adapter with invocation tokens is
compared where it is active. Free of text: prompts are token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.activation import activated, adapter_at
from engine.checks.effect_report import LogitChange
from engine.errors import UnsupportedModelError
from engine.inputs import build_inputs
from engine.kv_cache import allocate_kv_cache
from engine.kv_layout import kv_layout
from engine.model import Model
from engine.model_config import ModelConfig
from engine.types import Request, SamplingParams, ScheduledBatch, ScheduledSequence
from engine.types import Sequence as Choice
from engine.weights import Weights
from kernels.matrix import Matrix
from lora.pool import AdapterPool
from lora.sites import Site, Slice

_BLOCK_SIZE = 16
_NORM_ROWS = 1024  # of a quantized weight, in float32 at a time
_ROWS = 32  # rows whose logits exist at a time: 20 MB for 150,000 tokens
_BEYOND_NOISE = 1.0  # a larger change of a logit is not rounding, in any type


class Probe:
    def __init__(self, model: Model, pool: AdapterPool) -> None:
        self._model = model
        self._pool = pool

    @torch.inference_mode()
    def compare(
        self, digest: str, prompts: Sequence[Sequence[int]], invocation: Sequence[int] = ()
    ) -> LogitChange:
        """Compares the base with the adapter, from its invocation on if it has one. The pool holds
        the adapter, and the caller a reference to it."""
        with_adapter = requests(prompts, digest, invocation)
        active = torch.cat([_active(request) for request in with_adapter])  # [rows]
        without = requests(prompts, None)

        def run(of: Sequence[Request]) -> Callable[[], Iterator[torch.Tensor]]:
            logits = self.run(of)
            return lambda: _only(logits(), active)

        base, adapted = run(without), run(with_adapter)
        change = _join(
            len(prompts), [compare_rows(x, y) for x, y in zip(base(), adapted(), strict=True)]
        )
        if change.num_non_finite or change.max_delta >= _BEYOND_NOISE:
            return change
        again = run(without)
        pairs = zip(base(), again(), strict=True)
        noise = max(float((x - y).abs().max()) for x, y in pairs if len(x))
        return replace(change, noise=noise)

    @torch.inference_mode()
    def with_both_caches(
        self, prompts: Sequence[Sequence[int]], kv_dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the base's logits, [rows, V] float32 at a time, with keys and values in the type
        of the activations and in this one."""
        without = requests(prompts, None)
        exact, rounded = self.run(without, self._pool.dtype), self.run(without, kv_dtype)
        yield from zip(exact(), rounded(), strict=True)

    @torch.inference_mode()
    def run(
        self, of: Sequence[Request], kv_dtype: torch.dtype | None = None
    ) -> Callable[[], Iterator[torch.Tensor]]:
        """Runs the prompts of all requests in one step and returns a function of the logits,
        [rows, V] float32 at a time. `kv_dtype` None: that of the activations, and rows of the base
        that are not finite raise UnsupportedModelError."""
        parts = []
        num_blocks = 0
        for request in of:
            prompt = request.prompt_token_ids
            end = num_blocks + -(-len(prompt) // _BLOCK_SIZE)
            blocks = list(range(num_blocks, end))
            choice = Choice(request, 0, 0, list(prompt), block_table=blocks)
            parts.append(ScheduledSequence(choice, 0, len(prompt), True))
            num_blocks = end
        pool = self._pool
        inputs = build_inputs(ScheduledBatch(tuple(parts)), _BLOCK_SIZE, pool.device, pool)
        num_rows = sum(len(request.prompt_token_ids) for request in of)
        every = replace(inputs, logit_rows=None, host_logit_rows=tuple(range(num_rows)))
        # Every key is kept: the layers are one group.
        layout = kv_layout(
            (None,) * self._model.config.num_layers, _BLOCK_SIZE, self._model.config.usual_len
        )
        held = kv_dtype or pool.dtype
        kv = allocate_kv_cache(self._model.config, layout, num_blocks, held, pool.device)
        hidden = self._model.forward(every, kv, pool)
        is_base = all(request.adapter is None for request in of)

        def logits() -> Iterator[torch.Tensor]:
            for first in range(0, num_rows, _ROWS):
                rows = self._model.logits(hidden[first : first + _ROWS], every, first, pool)
                if is_base and kv_dtype is None and not bool(rows.isfinite().all()):
                    raise UnsupportedModelError(
                        f"without any adapter the base gives NaN or infinite logits in {pool.dtype}"
                    )
                yield rows

        return logits


def requests(
    prompts: Sequence[Sequence[int]], digest: str | None, invocation: Sequence[int] = ()
) -> list[Request]:
    """Returns a request for each prompt; with `invocation`, its adapter is active from there on."""
    found = [Request("probe", tuple(prompt), SamplingParams(), digest) for prompt in prompts]
    return [activated(request, invocation) for request in found] if invocation else found


def _active(request: Request) -> torch.Tensor:
    """Returns, for each token of the prompt, whether the adapter is active there."""
    positions = range(len(request.prompt_token_ids))
    return torch.tensor([adapter_at(request, position) is not None for position in positions])


def _only(parts: Iterator[torch.Tensor], wanted: torch.Tensor) -> Iterator[torch.Tensor]:
    first = 0
    for rows in parts:
        chosen = wanted[first : first + len(rows)]
        first += len(rows)
        yield rows[chosen.to(rows.device)]


def base_norms(weights: Weights, sites: Sequence[Site]) -> dict[str, float]:
    """Returns the Frobenius norm of the base's weight of each module."""
    fused: list[Matrix] = []  # in the order of the sites
    for layer in weights.layers:
        fused += (layer.qkv, layer.o, layer.gate_up, layer.down)
    fused += (weights.head, weights.embedding)
    norms: dict[str, float] = {}
    for site, tensor in zip(sites, fused, strict=True):
        for part, rows in _slices(site, tensor):
            norms[part.module] = math.hypot(norms.get(part.module, 0.0), _norm(rows))
    return norms


def _norm(matrix: Matrix) -> float:
    if isinstance(matrix, torch.Tensor):
        return float(torch.linalg.vector_norm(matrix, dtype=torch.float32))
    # In parts: a whole one in float32 may not fit beside an engine.
    parts = (torch.linalg.vector_norm(part.float()) for part in matrix.split(_NORM_ROWS))
    return math.hypot(*map(float, parts))


def scratch_bytes(config: ModelConfig) -> int:
    """Returns the bytes that a comparison needs in addition to weights and adapter: two sets of
    logits, and the float64 tensors at the peak of `compare_rows`."""
    return _ROWS * config.vocab_size * (2 * 4 + 4 * 8)


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of some rows, per position; non-finite positions are in none of the fields."""

    num_non_finite: int
    max_delta: torch.Tensor
    mean_delta: torch.Tensor
    kl: torch.Tensor
    argmax_changed: torch.Tensor


def compare_rows(base: torch.Tensor, adapted: torch.Tensor) -> Compared:
    """Compares two sets of logits [rows, V], position by position."""
    finite = adapted.isfinite().all(dim=-1)
    base, adapted = base[finite], adapted[finite]  # [rows, V]
    delta = (adapted - base).abs()
    # float64: for tiny changes, float32 would find a KL of 1e-6 in its own rounding.
    before, after = (x.double().log_softmax(dim=-1) for x in (base, adapted))
    return Compared(
        num_non_finite=int((~finite).sum()),
        max_delta=delta.amax(dim=-1),
        mean_delta=delta.mean(dim=-1),
        kl=(before.exp() * (before - after)).sum(dim=-1).clamp(min=0),
        argmax_changed=base.argmax(dim=-1) != adapted.argmax(dim=-1),
    )


def _join(num_prompts: int, parts: Sequence[Compared]) -> LogitChange:
    max_delta = torch.cat([part.max_delta for part in parts])
    kl = torch.cat([part.kl for part in parts])
    num_bad = sum(part.num_non_finite for part in parts)
    if not len(max_delta):  # no position is finite
        return LogitChange(num_prompts, num_bad, num_bad, 0.0, 0.0, 0.0, 0.0, 0.0)
    return LogitChange(
        num_prompts=num_prompts,
        num_positions=len(max_delta) + num_bad,
        num_non_finite=num_bad,
        max_delta=float(max_delta.max()),
        mean_delta=float(torch.cat([part.mean_delta for part in parts]).mean()),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        argmax_changed=float(torch.cat([p.argmax_changed for p in parts]).double().mean()),
    )


def _slices(site: Site, fused: Matrix) -> Iterator[tuple[Slice, Matrix]]:
    if site.kind == "embedding":
        yield site.slices[0], fused  # [V, H]: its input is the row's number
        return
    sizes = [part.out_features for part in site.slices]
    yield from zip(site.slices, fused.split(sizes), strict=True)
