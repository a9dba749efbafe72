"""The KV tensors of one base, and the number of blocks that fit.

A block holds `block_size` tokens of every layer. The owners of blocks are tracked elsewhere.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.memory_plan import DeviceUse, MemoryPlan, plan_memory
from engine.model_config import ModelConfig

logger = logging.getLogger(__name__)

_DEFAULT_CPU_BYTES = 1024**3


@dataclass(frozen=True, slots=True)
class KVCache:
    k: tuple[torch.Tensor, ...]  # one [num_blocks, block_size, Hkv, D] per layer
    v: tuple[torch.Tensor, ...]

    @property
    def block_size(self) -> int:
        return self.k[0].shape[1]


def allocate_kv_cache(
    model: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)

    def tensors() -> tuple[torch.Tensor, ...]:
        # Zeros are free on the CPU: the system allocates pages when they are first written.
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)
        )

    return KVCache(tensors(), tensors())


def count_blocks(
    model: ModelConfig, config: EngineConfig, max_model_len: int, dtype: torch.dtype
) -> int:
    """Returns the number of KV blocks on a CPU."""
    size = block_bytes(model, config.block_size, dtype)
    wanted = config.num_blocks
    if wanted is None:
        room = config.kv_cache_bytes
        room = _DEFAULT_CPU_BYTES if room is None else room
        wanted = min(room // size, _max_useful_blocks(config, max_model_len))
    if wanted < 1:
        raise UnsupportedModelError(f"no KV block fits: one needs {size} bytes")
    _warn_of_short_requests(wanted * config.block_size, max_model_len, "raise kv_cache_bytes")
    return wanted


def plan_kv(
    model: ModelConfig,
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    use: DeviceUse,
) -> MemoryPlan:
    """Plans the memory of a CUDA device: KV gets the part of this engine's share that `use`
    leaves."""
    plan = plan_memory(
        use,
        utilization=config.gpu_memory_utilization,
        block_bytes=block_bytes(model, config.block_size, dtype),
        max_useful_blocks=_max_useful_blocks(config, max_model_len),
        kv_cache_bytes=config.kv_cache_bytes,
        num_blocks=config.num_blocks,
    )
    advice = f"raise gpu_memory_utilization or lower adapter_pool_bytes\n{plan.table()}"
    _warn_of_short_requests(plan.num_blocks * config.block_size, max_model_len, advice)
    return plan


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return 2 * model.num_layers * block_size * model.kv_size * dtype.itemsize


def _warn_of_short_requests(num_tokens: int, max_model_len: int, advice: str) -> None:
    """Warns if `num_tokens`, the capacity of all KV blocks, is below `max_model_len`."""
    if num_tokens < max_model_len:
        logger.warning(
            "all KV blocks hold %d tokens, max_model_len is %d: longer requests are refused; "
            "to make room %s",
            num_tokens,
            max_model_len,
            advice,
        )


def _max_useful_blocks(config: EngineConfig, max_model_len: int) -> int:
    """Returns a limit beyond which blocks could only cache prefixes of ended requests."""
    return config.max_num_seqs * -(-max_model_len // config.block_size)
