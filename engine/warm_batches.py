"""Steps that stand for all traffic: of every kind that a kernel's launch distinguishes.

Kernels are chosen by the number of tokens (few rows or many), by prompts or single tokens, by rows
with and without an adapter and by its rank. Results are discarded: all sequences share their KV
blocks, and the adapters are zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.step_inputs import StepLimits
from engine.types import Request, SamplingParams, ScheduledBatch, ScheduledSequence
from engine.types import Sequence as Choice
from lora.adapter import Adapter, ModuleWeights
from lora.pool import PAGE_ROWS, AdapterPool
from lora.sites import Site, targets_by_module

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
_CONTEXT = 3  # computed tokens before a single token
Owners = tuple[str | None, ...]  # the adapters of a step, each of the same share of sequences


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A step: sequences with one token each, and the tokens of sequences with several."""

    num_decodes: int
    prompts: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + len(self.prompts)


def step_sizes(max_tokens: int) -> tuple[int, ...]:
    """Returns each power of two and the number above it: 1 to 5, 8, 9, 16, 17, ..., and the
    largest. Both sides of each threshold "at most 2^k" or "below 2^k" are among them."""
    around = {size + offset for i in range(32) for size in (1 << i,) for offset in (0, 1)}
    return tuple(sorted({size for size in around if size < max_tokens} | {max_tokens}))


def batch_shapes(num_tokens: int, limits: StepLimits) -> tuple[BatchShape, ...]:
    """Returns steps of so many tokens: of few prompts, of as many single tokens as possible, and
    of both."""
    shapes = {
        _shape(num_tokens, num_decodes, limits) for num_decodes in (0, num_tokens // 2, num_tokens)
    }
    return tuple(sorted((shape for shape in shapes if shape), key=lambda s: s.num_decodes))


def make_batch(
    shape: BatchShape, owners: Owners, limits: StepLimits, num_blocks: int, params: SamplingParams
) -> ScheduledBatch:
    """Returns the step with sequences whose blocks are all the same: the results are discarded."""
    parts = []
    lengths = (1,) * shape.num_decodes + shape.prompts
    for i, length in enumerate(lengths):
        start = min(_CONTEXT, limits.max_model_len - 1) if length == 1 else 0
        count = -(-(start + length) // limits.block_size)
        request = Request(
            f"warm-{i}", (0,) * (start + length), params, owners[i * len(owners) // len(lengths)]
        )
        blocks = [block % num_blocks for block in range(count)]
        token_ids = [0] * (start + length)
        sequence = Choice(request, 0, i, token_ids, block_table=blocks, window_table=blocks)
        parts.append(ScheduledSequence(sequence, start, start + length, True))
    return ScheduledBatch(tuple(parts))


def _shape(num_tokens: int, num_decodes: int, limits: StepLimits) -> BatchShape | None:
    num_decodes = min(num_decodes, limits.max_seqs)
    rest = num_tokens - num_decodes
    if rest and num_decodes == limits.max_seqs:
        num_decodes, rest = num_decodes - 1, rest + 1
    if rest == 1:
        num_decodes, rest = num_decodes + 1, 0
    count = -(-rest // limits.max_model_len)
    if num_decodes + count > limits.max_seqs:
        return None
    prompts = tuple(rest // count + (i < rest % count) for i in range(count))
    return BatchShape(num_decodes, prompts)


def zero_adapters(
    sites: Sequence[Site], limits: StepLimits, *, has_affine: bool
) -> tuple[Adapter, ...]:
    """Returns adapters of each of the ranks at all sites but the optional, one of the optional
    alone, and one with affine rows: a small pool may have room for some of them only."""
    usual = [site for site in sites if not site.is_optional]
    optional = [site for site in sites if site.is_optional]
    ranks = adapter_ranks(limits)
    return (
        *(_zero_adapter(usual, rank, f"warm-up-rank-{rank}") for rank in ranks),
        _zero_adapter(optional, ranks[0], "warm-up-head"),
        *((_with_affine(_zero_adapter(usual, ranks[0], "warm-up-affine")),) if has_affine else ()),
    )


def _zero_adapter(sites: Sequence[Site], rank: int, digest: str) -> Adapter:
    """Returns an adapter of all these sites; its modules share their zeros."""
    targets = targets_by_module(sites)
    widths = [max(target.site.in_features, target.out_features) for target in targets.values()]
    zeros = torch.zeros(rank * max(widths))

    def rows(width: int) -> torch.Tensor:
        return zeros[: rank * width].view(rank, width)

    modules = {
        module: ModuleWeights(rows(target.site.in_features), rows(target.out_features), bound=0.0)
        for module, target in targets.items()
    }
    return Adapter(digest, rank, modules, 0, is_noop=True)


def _with_affine(adapter: Adapter) -> Adapter:
    modules = {
        module: replace(weights, affine=weights.lora_b.new_zeros((2, weights.lora_b.shape[1])))
        for module, weights in adapter.modules.items()
    }
    return replace(adapter, modules=modules)


def adapter_ranks(limits: StepLimits) -> tuple[int, ...]:
    """Returns ranks of one page and of several, as far as they are allowed."""
    ranks = {min(PAGE_ROWS, limits.max_lora_rank), min(2 * PAGE_ROWS, limits.max_lora_rank)}
    return tuple(sorted(ranks))


def with_fitting(pool: AdapterPool, wanted: Iterable[Owners]) -> Iterator[Owners]:
    """Yields the owners of each mix that fit together, acquired while the caller uses them."""
    for owners in wanted:
        held = [adapter for adapter in owners if adapter is not None and _acquire(pool, adapter)]
        yield tuple(owner for owner in owners if owner is None or owner in held) or (None,)
        for adapter in held:
            pool.release(adapter)


def _acquire(pool: AdapterPool, adapter: str) -> bool:
    while not pool.acquire(adapter):
        if not pool.has_pending_copies():
            return False
        pool.wait_pending()
    return True


def mixes(adapters: Sequence[str]) -> tuple[Owners, ...]:
    """Returns no adapter, each one alone, all but the last, which may be affine, and all beside
    sequences that have none."""
    alone = tuple((adapter,) for adapter in adapters)
    beside = ((None, *adapters[:-1]), (None, *adapters)) if adapters else ()
    return ((None,), *alone, *beside)
