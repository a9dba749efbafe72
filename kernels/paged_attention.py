"""Causal attention of packed queries over a paged KV cache: softmax(scale * q k^T) v.

Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", arXiv 2309.06180;
grouped queries as in Ainslie et al., arXiv 2305.13245. Soft caps as in Gemma 2, arXiv 2408.00118;
sinks, logits that weigh in the softmax and have no value, as in gpt-oss. The queries of a sequence
are the last of its positions. Values that depend on lengths and block tables only are built once
per step (`plan_attention`) and shared by all layers. Uses tensors and numbers only; computes in
float32 for every cache type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kernels.backend import is_hopper, uses_triton
from kernels.e4m3 import E4M3, indexable
from kernels.paged_plan import PagedPlan

_GROUP_KEYS = 8192  # 64 sequences of 1000: 260 ms for 30 layers, 427 in one group
_GROUP_QUERIES = 9  # of a sequence: a token and its draft; more are a chunk of a prompt


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of few queries, the same number each, and of similar length, computed in one padded
    batch."""

    rows: torch.Tensor  # [n * num_queries] rows of q
    slots: torch.Tensor  # [n * length] rows of the flat cache; padding repeats a slot of its own
    kv_lens: torch.Tensor  # [n]
    max_kv_len: int
    num_padded: int
    num_queries: int = 1  # of each sequence


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence with several queries."""

    start: int  # rows of q: [start, end)
    end: int
    slots: torch.Tensor  # [kv_len]
    kv_len: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The lengths and slots of one step, for all its layers."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]
    # Masks by (kind, index, window): made by the first layer that needs them, reused by the others.
    masks: dict[tuple[str, int, int | None], torch.Tensor | None] = field(default_factory=dict)
    # Gathered K and V of one group at a time: fresh memory for every layer would cost page faults,
    # up to four times the gather itself (64 sequences of 300 tokens: 17 ms a layer against 4).
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)


def plan_attention(
    query_start: torch.Tensor | Sequence[int],  # [S + 1]
    kv_lens: torch.Tensor | Sequence[int],  # [S]
    block_tables: torch.Tensor,  # [S, max_blocks]
    block_size: int,
) -> AttentionPlan:
    """Builds the plan. Pass `query_start` and `kv_lens` as CPU tensors or lists: on a device they
    cost a sync."""
    starts, lengths = _to_list(query_start), _to_list(kv_lens)
    prefills: list[PrefillChunk] = []
    decodes: dict[int, list[int]] = {}  # by their queries
    for s, kv_len in enumerate(lengths):
        if kv_len == 0:  # padding, in a PagedPlan
            continue
        num_queries = starts[s + 1] - starts[s]
        if num_queries == 1 or 1 < num_queries <= min(_GROUP_QUERIES, kv_len - 1):
            decodes.setdefault(num_queries, []).append(s)
        elif num_queries:
            slots = _slots(block_tables[s], kv_len, block_size)
            prefills.append(PrefillChunk(starts[s], starts[s + 1], slots, kv_len))
    groups = tuple(
        _decode_group(bucket, num_queries, starts, lengths, block_tables, block_size)
        for num_queries, members in decodes.items()
        for bucket in _buckets(members, lengths)
    )
    return AttentionPlan(groups, tuple(prefills))


def paged_attention(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor,
    plan: AttentionPlan | PagedPlan,
    scale: float,
    sliding_window: int | None = None,
    out: torch.Tensor | None = None,  # [T, Hq, D]
    *,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq] float32
) -> torch.Tensor:
    """Returns [T, Hq, D]. A window of w lets a query see itself and the w - 1 positions before it.
    A soft cap of c turns a logit x = scale * q k into c * tanh(x / c). A head's sink is one more
    logit in the denominator of its softmax, neither scaled nor capped."""
    assert soft_cap is None or soft_cap > 0
    if isinstance(plan, PagedPlan):
        if uses_triton(q):
            return _paged_attention_triton(
                q, k_cache, v_cache, plan, scale, sliding_window, out, soft_cap, sinks
            )
        plan = _plan_on_host(plan, k_cache.shape[1])
    attended = paged_attention_reference(
        q, k_cache, v_cache, plan, scale, sliding_window, soft_cap, sinks
    )
    return attended if out is None else out.copy_(attended)


def _paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: PagedPlan,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    prefill: Callable[..., None]
    decode: Callable[..., None]
    if _fits_hopper(q, k_cache):
        from kernels import gluon_decode_attention, gluon_prefill_attention

        prefill = gluon_prefill_attention.paged_prefill
        decode = gluon_decode_attention.paged_decode
    else:
        from kernels import triton_decode_attention, triton_prefill_attention

        prefill = triton_prefill_attention.paged_prefill
        decode = triton_decode_attention.paged_decode
    out = q.new_empty(q.shape) if out is None else out
    arguments = (q, k_cache, v_cache, out, plan, scale, sliding_window)
    if plan.max_tiles:
        prefill(*arguments, soft_cap=soft_cap, sinks=sinks)
    if plan.max_items:
        decode(*arguments, soft_cap=soft_cap, sinks=sinks)
    return out


def max_item_queries(k_cache: torch.Tensor, num_heads: int, dtype: torch.dtype) -> int:
    """Returns the most queries, of this type, of a sequence that the decode kernel of this cache
    takes at once, in layers without a window: their keys are read once for all of them."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    if not _fits_hopper(k_cache.new_empty((0, num_heads, head_dim), dtype=dtype), k_cache):
        return 1
    from kernels.gluon_decode_attention import ROWS

    return ROWS * num_kv_heads // num_heads


def _fits_hopper(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    return (
        k_cache.dtype in (q.dtype, E4M3)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128)
        and k_cache.shape[1] in (16, 32, 64, 128)
        and q.shape[1] // k_cache.shape[2] <= 64  # the rows that one warpgroup holds
        and is_hopper(q)
    )


def _plan_on_host(plan: PagedPlan, block_size: int) -> AttentionPlan:
    tables = plan.block_tables[: plan.num_sequences]
    query_start = plan.query_start[: plan.num_sequences + 1]
    return plan_attention(query_start, plan.kv_lens[: plan.num_sequences], tables, block_size)


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.zeros_like(q)
    k_flat, v_flat = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [slots, Hkv, D]
    num_kv_heads, head_dim = k_flat.shape[1:]
    for i, group in enumerate(plan.decodes):
        n, num_queries = group.kv_lens.shape[0], group.num_queries
        shape = (n, group.max_kv_len, num_kv_heads, head_dim)
        k = _gather(k_flat, group.slots, plan, "k").view(shape).transpose(1, 2)
        v = _gather(v_flat, group.slots, plan, "v").view(shape).transpose(1, 2)
        # The queries of one KV head are one batch of G rows each: K and V are never repeated.
        q_group = q.index_select(0, group.rows).view(n, num_queries, num_kv_heads, -1, head_dim)
        q_group = q_group.transpose(1, 2).reshape(n, num_kv_heads, -1, head_dim).float()
        mask = _decode_mask(plan, i, sliding_window, q_group.shape[2])
        if soft_cap is None and sinks is None:
            attended = torch.nn.functional.scaled_dot_product_attention(
                q_group, k, v, attn_mask=mask, scale=scale
            )
        else:
            head_sinks = None
            if sinks is not None:
                head_sinks = sinks.view(num_kv_heads, -1, 1).repeat(1, num_queries, 1)
            attended = _capped_attention(q_group, k, v, mask, scale, soft_cap, head_sinks)
        by_query = attended.view(n, num_kv_heads, num_queries, -1, head_dim).transpose(1, 2)
        attended = by_query.reshape(n * num_queries, -1, head_dim)
        out.index_copy_(0, group.rows, attended.to(q.dtype))
    for i, chunk in enumerate(plan.prefills):
        k = _gather(k_flat, chunk.slots, plan, "k").transpose(0, 1)[:, None]  # [Hkv, 1, L, D]
        v = _gather(v_flat, chunk.slots, plan, "v").transpose(0, 1)[:, None]
        length = chunk.end - chunk.start
        q_chunk = q[chunk.start : chunk.end].view(length, num_kv_heads, -1, head_dim)
        q_chunk = q_chunk.permute(1, 2, 0, 3).float()  # [Hkv, G, length, D]
        if soft_cap is None and sinks is None:
            mask = _prefill_mask(plan, i, sliding_window)
            attended = torch.nn.functional.scaled_dot_product_attention(
                q_chunk,
                k.expand(-1, q_chunk.shape[1], -1, -1),
                v.expand(-1, q_chunk.shape[1], -1, -1),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
        else:
            mask = _prefill_mask(plan, i, sliding_window, is_needed=True)
            head_sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)
            attended = _capped_attention(q_chunk, k, v, mask, scale, soft_cap, head_sinks)
        out[chunk.start : chunk.end] = attended.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


def _capped_attention(
    q: torch.Tensor,  # [..., queries, D]
    k: torch.Tensor,  # [..., keys, D]
    v: torch.Tensor,
    mask: torch.Tensor | None,  # [..., queries, keys], added after the cap
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [..., queries or 1, 1]
) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if mask is not None:
        scores = scores + mask
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return torch.matmul(weights / total, v)


def _gather(
    flat: torch.Tensor, slots: torch.Tensor, plan: AttentionPlan, name: str
) -> torch.Tensor:
    """Returns [len(slots), Hkv, D] float32, valid until the next call with this name."""
    shape = (slots.shape[0], *flat.shape[1:])
    rows = _scratch(plan, name, shape, flat.dtype, flat.device)
    torch.index_select(indexable(flat), 0, slots, out=indexable(rows))
    if flat.dtype == torch.float32:
        return rows
    return _scratch(plan, name + "_wide", shape, torch.float32, flat.device).copy_(rows)


def _scratch(
    plan: AttentionPlan,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    size = math.prod(shape)
    kept = plan.scratch.get(name)
    if kept is None or kept.numel() < size:
        kept = torch.empty(size, dtype=dtype, device=device)
        plan.scratch[name] = kept
    return kept[:size].view(shape)


def _to_list(values: torch.Tensor | Sequence[int]) -> list[int]:
    return [int(v) for v in (values.tolist() if isinstance(values, torch.Tensor) else values)]


def _buckets(decodes: list[int], lengths: list[int]) -> list[list[int]]:
    """Groups sequences by length, longest first; begins a new bucket where padding would cost over
    a quarter, or where the keys would leave the CPU cache between their gather and their use."""
    buckets: list[list[int]] = []
    for s in sorted(decodes, key=lambda s: -lengths[s]):
        longest = lengths[buckets[-1][0]] if buckets else 0
        full = bool(buckets) and (len(buckets[-1]) + 1) * longest > _GROUP_KEYS
        if not buckets or full or lengths[s] * 4 < longest * 3:
            buckets.append([])
        buckets[-1].append(s)
    return buckets


def _decode_group(
    bucket: list[int],
    num_queries: int,
    starts: list[int],
    lengths: list[int],
    block_tables: torch.Tensor,
    block_size: int,
) -> DecodeGroup:
    device = block_tables.device
    rows = torch.tensor([starts[s] + i for s in bucket for i in range(num_queries)], device=device)
    kv_lens = torch.tensor([lengths[s] for s in bucket], device=device)
    longest = lengths[bucket[0]]
    tables = block_tables.index_select(0, torch.tensor(bucket, device=device)).long()
    # Positions past the end repeat position 0: an unused slot (it may hold NaN) is never read.
    positions = torch.arange(longest, device=device).expand(len(bucket), -1)
    positions = torch.where(positions < kv_lens[:, None], positions, 0)
    slots = tables.gather(1, positions // block_size) * block_size + positions % block_size
    padded = sum(longest - lengths[s] for s in bucket)
    return DecodeGroup(rows, slots.flatten(), kv_lens, longest, padded, num_queries)


def _slots(table: torch.Tensor, kv_len: int, block_size: int) -> torch.Tensor:
    positions = torch.arange(kv_len, device=table.device)
    return table.long()[positions // block_size] * block_size + positions % block_size


def _decode_mask(
    plan: AttentionPlan, index: int, window: int | None, num_rows: int
) -> torch.Tensor | None:
    """Returns [n, 1, 1 or num_rows, length]; `num_rows`: of a KV head, query by query."""
    group = plan.decodes[index]
    if window is not None and window >= group.max_kv_len:
        window = None
    key = ("decode", index, window)
    if key not in plan.masks:
        mask: torch.Tensor | None = None
        if group.num_padded or window is not None or group.num_queries > 1:
            keys = torch.arange(group.max_kv_len, device=group.rows.device)
            before = torch.arange(group.num_queries - 1, -1, -1, device=group.rows.device)
            ends = group.kv_lens[:, None, None] - before[:, None]  # [n, queries, 1]
            seen = keys < ends
            if window is not None:
                seen &= keys >= ends - window
            if group.num_queries > 1:
                seen = seen.repeat_interleave(num_rows // group.num_queries, 1)
            mask = _additive(seen)[:, None]
        plan.masks[key] = mask
    return plan.masks[key]


def _prefill_mask(
    plan: AttentionPlan, index: int, window: int | None, is_needed: bool = False
) -> torch.Tensor | None:
    """Returns [length, kv_len], or None where the causal mask of a whole sequence is not needed as
    a tensor."""
    chunk = plan.prefills[index]
    if window is not None and window >= chunk.kv_len:
        window = None
    key = ("whole prefill" if is_needed else "prefill", index, window)
    if key not in plan.masks:
        mask: torch.Tensor | None = None
        length = chunk.end - chunk.start
        if length < chunk.kv_len or window is not None or is_needed:
            keys = torch.arange(chunk.kv_len, device=chunk.slots.device)
            queries = keys[chunk.kv_len - length :, None]
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            mask = _additive(seen)  # [length, kv_len]
        plan.masks[key] = mask
    return plan.masks[key]


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
