"""Packed batches over a paged cache with NaN in every unused slot, and a float64 softmax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.paged_attention import paged_attention
from kernels.paged_plan import (
    AttentionScratch,
    HeadShape,
    PagedPlan,
    attention_scratch,
    work_size,
    write_decode_work,
    write_work,
)

SCALE = 0.3
Lengths = list[tuple[int, int]]  # (queries, keys)


@dataclass
class Batch:
    shape: HeadShape
    lengths: Lengths
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor  # [S, W] int32

    @property
    def device(self) -> torch.device:
        return self.q.device

    def starts(self) -> list[int]:
        starts = [0]
        for q_len, _ in self.lengths:
            starts.append(starts[-1] + q_len)
        return starts

    def scratch(self) -> AttentionScratch:
        scratch = attention_scratch(self.q.shape[0], self.shape, self.device)
        scratch.partial.fill_(float("nan"))
        scratch.lse.fill_(float("nan"))
        return scratch

    def host_work(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedPlan]:
        """-> query_start, kv_lens, work on the host, and the plan over copies of them."""
        starts = np.array(self.starts(), np.int32)
        kv_lens = np.array([kv_len for _, kv_len in self.lengths], np.int32)
        work = np.full(work_size(len(kv_lens), int(starts[-1]), self.shape), -(10**6), np.int32)
        counts = write_work(work, starts, kv_lens, self.shape)
        host = tuple(torch.from_numpy(array) for array in (starts, kv_lens, work))
        on_device = [tensor.to(self.device, copy=True) for tensor in host]
        plan = PagedPlan.for_step(
            on_device[0], on_device[1], self.tables, on_device[2], self.scratch(), counts
        )
        return host[0], host[1], host[2], plan

    def run(
        self,
        window: int | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = self.host_work()[3]
        out = paged_attention(
            self.q, self.k_cache, self.v_cache, plan, SCALE, window, soft_cap=cap, sinks=sinks
        )
        assert not plan.scratch.arrived.any()
        assert not plan.scratch.tickets.any()
        return out

    def run_drafts(
        self, cap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs all sequences as decodes with drafts."""
        queries = np.array([q_len for q_len, _ in self.lengths], np.int32)
        kv_lens = np.array([kv_len for _, kv_len in self.lengths], np.int32)
        work = np.full(work_size(len(self.q), len(self.q), self.shape), -(10**6), np.int32)
        write_decode_work(work, kv_lens, self.shape, queries)
        starts = np.array(self.starts(), np.int32)
        tensors = [torch.from_numpy(array).to(self.device) for array in (starts, kv_lens, work)]
        plan = PagedPlan.for_graph(
            *tensors[:2], self.tables, tensors[2], self.scratch(), len(self.q), int(queries.max())
        )
        out = self.q.new_full(self.q.shape, float("nan"))
        paged_attention(
            self.q, self.k_cache, self.v_cache, plan, SCALE, out=out, soft_cap=cap, sinks=sinks
        )
        assert not plan.scratch.arrived.any()
        assert not plan.scratch.tickets.any()
        return out

    def expected(
        self,
        window: int | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes in float64, sequence by sequence; zeros for a sequence without keys."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.device)
        block_size = self.k_cache.shape[1]
        starts = self.starts()
        for s, (q_len, kv_len) in enumerate(self.lengths):
            if kv_len == 0:
                continue
            keys = torch.arange(kv_len, device=self.device)
            slots = self.tables[s].long()[keys // block_size] * block_size + keys % block_size
            # Not every device indexes e4m3.
            k = self.k_cache.float().flatten(0, 1)[slots].double()
            v = self.v_cache.float().flatten(0, 1)[slots].double()
            q = self.q[starts[s] : starts[s + 1]].double()
            q = q.view(q_len, self.shape.num_kv_heads, self.shape.group, -1)
            scores = SCALE * torch.einsum("qhgd,khd->hgqk", q, k)
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            positions = torch.arange(kv_len - q_len, kv_len, device=self.device)[:, None]
            visible = keys <= positions
            if window is not None:
                visible &= keys > positions - window
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                column = sinks.double().view(self.shape.num_kv_heads, -1, 1, 1)
                scores = torch.cat((scores, column.expand(-1, -1, q_len, 1)), dim=-1)
            weights = scores.softmax(-1)[..., :kv_len]
            attended = torch.einsum("hgqk,khd->qhgd", weights, v)
            out[starts[s] : starts[s + 1]] = attended.flatten(1, 2)
        return out


def make_batch(
    lengths: Lengths,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,  # None: dtype
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-kv_len // block_size) for _, kv_len in lengths]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.full((len(lengths), max(max(needed), 1)), int(order[-1]), dtype=torch.int32)
    filled = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    taken = 0
    for s, (_, kv_len) in enumerate(lengths):
        blocks = order[taken : taken + needed[s]]
        taken += needed[s]
        tables[s, : needed[s]] = blocks
        for i, block in enumerate(blocks.tolist()):
            filled[block, : min(kv_len - i * block_size, block_size)] = True
    caches = []
    for _ in range(2):
        cache = torch.randn(num_blocks, block_size, kv_heads, dim, generator=generator)
        cache[~filled] = float("nan")
        caches.append(cache.to(kv_dtype or dtype).to(device))
    tokens = sum(q_len for q_len, _ in lengths)
    q = torch.randn(tokens, heads, dim, generator=generator).to(dtype).to(device)
    shape = HeadShape(heads, kv_heads, dim)
    return Batch(shape, lengths, q, caches[0], caches[1], tables.to(device))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN anywhere gives NaN, which is below no tolerance."""
    return float((out.double() - expected).norm() / expected.norm())
