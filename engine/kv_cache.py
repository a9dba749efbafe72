"""The KV tensors of one base, and the number of blocks that fit.

The layout defines the content of a block; the owners of blocks are tracked elsewhere.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.kv_layout import KVLayout, num_uncommitted
from engine.memory_plan import DeviceUse, LongSequences, MemoryPlan, plan_memory
from engine.model_config import ModelConfig

logger = logging.getLogger(__name__)

_DEFAULT_CPU_BYTES = 1024**3


class Arrival(Protocol):
    """The end of a copy into blocks."""

    def wait(self) -> None:
        """Has the device begin all that is launched from now on after it."""


class LayerArrivals:
    """The copies in flight into blocks that the next step reads, in parts of consecutive layers. A
    step waits on the device for a part before it reads the part's first layer, and so computes the
    first layers while the last ones arrive."""

    def __init__(self) -> None:
        self._due: deque[tuple[int, Arrival]] = deque()

    def expect(self, parts: Iterable[tuple[int, Arrival]]) -> None:
        """`parts`: the first layer of each part, from layer 0 on, and its end. Each of them ends
        after all copies that were expected before."""
        self._due = deque(parts)

    def wait(self, layer: int) -> None:
        """Called before a step reads a layer."""
        while self._due and self._due[0][0] <= layer:
            self._due.popleft()[1].wait()

    def wait_for_all(self) -> None:
        """Called before a step that reads its layers in a graph."""
        if self._due:
            self._due[-1][1].wait()
            self._due.clear()


@dataclass(frozen=True, slots=True)
class KVCache:
    # One [entries, block_size, Hkv, D] per layer: the numbers in its block table count the first
    # dimension. Layers of two groups have views of one tensor, from their place in a block on.
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    table_of: tuple[int, ...]  # of each layer, its block table: 0 or 1
    # [blocks, bytes of a block] uint8, the same memory; None: blocks are not contiguous.
    blocks: torch.Tensor | None = None
    arrivals: LayerArrivals = field(default_factory=LayerArrivals)

    @property
    def block_size(self) -> int:
        return self.k[0].shape[1]


def allocate_kv_cache(
    model: ModelConfig,
    layout: KVLayout,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    num_blocks += layout.num_null_blocks
    shape = (num_blocks * layout.stride, layout.block_size, model.num_kv_heads, model.head_dim)
    places = {
        layer: (table, place)
        for table, group in enumerate(layout.groups)
        for place, layer in enumerate(group.layers)
    }

    tables = tuple(places[layer][0] for layer in range(model.num_layers))
    if layout.is_contiguous:
        whole = torch.zeros(shape, dtype=dtype, device=device)
        k = tuple(whole[places[layer][1] :] for layer in range(model.num_layers))
        v = tuple(one[layout.num_layer_blocks :] for one in k)
        return KVCache(k, v, tables, whole.view(torch.uint8).view(num_blocks, -1))

    def tensors() -> tuple[torch.Tensor, ...]:
        # Zeros are free on the CPU: the system allocates pages when they are first written.
        if len(layout.groups) == 1:
            return tuple(
                torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)
            )
        all_layers = torch.zeros(shape, dtype=dtype, device=device)
        return tuple(all_layers[places[layer][1] :] for layer in range(model.num_layers))

    return KVCache(tensors(), tensors(), tables)


def count_blocks(
    model: ModelConfig,
    layout: KVLayout,
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
) -> int:
    """Returns the number of KV blocks on a CPU."""
    size = block_bytes(model, layout, dtype)
    wanted = config.num_blocks
    needed = _blocks_of_longest(layout, config, max_model_len)
    if wanted is None:
        room = config.kv_cache_bytes
        room = _DEFAULT_CPU_BYTES if room is None else room
        wanted = min(room // size - layout.num_null_blocks, config.max_num_seqs * needed)
    if wanted < 1:
        raise UnsupportedModelError(f"no KV block fits: one needs {size} bytes")
    advice = f"raise kv_cache_bytes{_or_fp8(config)}"
    _warn_of_short_requests(wanted, layout, config, max_model_len, advice)
    return wanted


def plan_kv(
    model: ModelConfig,
    layout: KVLayout,
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    use: DeviceUse,
) -> MemoryPlan:
    """Plans the memory of a CUDA device: KV gets the part of this engine's share that `use`
    leaves."""
    needed = _blocks_of_longest(layout, config, max_model_len)
    decoding = layout.blocks_needed(max_model_len, 1)
    plan = plan_memory(
        use,
        utilization=config.gpu_memory_utilization,
        block_bytes=block_bytes(model, layout, dtype),
        max_useful_blocks=config.max_num_seqs * needed,
        kv_cache_bytes=config.kv_cache_bytes,
        num_blocks=config.num_blocks,
        num_null_blocks=layout.num_null_blocks,
        longest=LongSequences(max_model_len, decoding, needed - decoding)
        if layout.has_windows
        else None,
    )
    advice = "raise gpu_memory_utilization or lower adapter_pool_bytes"
    advice += f"{_or_fp8(config)}\n{plan.table()}"
    _warn_of_short_requests(plan.num_blocks, layout, config, max_model_len, advice)
    return plan


def _or_fp8(config: EngineConfig) -> str:
    return ", or use kv_cache_dtype: fp8" if config.kv_cache_dtype == "auto" else ""


def block_bytes(model: ModelConfig, layout: KVLayout, dtype: torch.dtype) -> int:
    return 2 * layout.num_layer_blocks * layout.block_size * model.kv_size * dtype.itemsize


def _warn_of_short_requests(
    num_blocks: int, layout: KVLayout, config: EngineConfig, max_model_len: int, advice: str
) -> None:
    """Warns if the longest sequence that all KV blocks hold is below `max_model_len`."""
    num_tokens = layout.longest(num_blocks, _uncommitted(config), max_model_len)
    if num_tokens < max_model_len:
        logger.warning(
            "all KV blocks hold a request of %d tokens, max_model_len is %d: longer ones are "
            "refused; to make room %s",
            num_tokens,
            max_model_len,
            advice,
        )


def _blocks_of_longest(layout: KVLayout, config: EngineConfig, max_model_len: int) -> int:
    """Returns the blocks of the longest sequence. With more than so many for each sequence, blocks
    could only cache prefixes of ended requests."""
    return layout.blocks_needed(max_model_len, _uncommitted(config))


def _uncommitted(config: EngineConfig) -> int:
    is_ahead = config.async_scheduling is not False
    return num_uncommitted(config.max_num_batched_tokens, runs_ahead=is_ahead)
