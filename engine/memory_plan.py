"""The shares of a device's memory, in bytes and words: arithmetic only, no torch.

    gpu_memory_utilization x device = weights + adapter pool + activations + graphs + KV

The share is this engine's own, as in vLLM: memory of other processes is not subtracted from it, but
the share must be free. A configuration that does not fit is refused with the sum, line by line, and
the settings that would change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import EngineMemoryError

GIB = 1024**3
# Adapters of rank 16 on all linear layers. The limit of the default: above a step's sequences.
_MAX_POOL_ADAPTERS = 1024
_MIN_POOL_ADAPTERS = 16


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The bytes, measured or reserved, of everything on the device but KV."""

    total: int
    used_by_others: int  # before this process had allocated anything
    weights: int
    adapter_pool: int
    activations: int  # the peak of a step
    graphs: int

    @property
    def before_kv(self) -> int:
        return self.weights + self.adapter_pool + self.activations + self.graphs


@dataclass(frozen=True, slots=True)
class LongSequences:
    """The needs of the longest sequences of a model with windows."""

    num_tokens: int
    num_blocks: int  # of each while it decodes
    num_step_blocks: int  # of the tokens of steps under way, of all sequences together

    def count(self, num_blocks: int) -> int:
        return max(0, num_blocks - self.num_step_blocks) // self.num_blocks


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    use: DeviceUse
    utilization: float
    block_bytes: int
    num_blocks: int
    num_null_blocks: int = 0  # beside them, of models with windows
    longest: LongSequences | None = None  # of such models

    @property
    def share(self) -> int:
        return int(self.use.total * self.utilization)

    @property
    def kv(self) -> int:
        return (self.num_blocks + self.num_null_blocks) * self.block_bytes

    @property
    def kv_words(self) -> str:
        words = f"{self.num_blocks} of {self.block_bytes} bytes"
        if self.longest is None:
            return words
        count = self.longest.count(self.num_blocks)
        return f"{words}, {count} sequences of {self.longest.num_tokens} tokens"

    def table(self) -> str:
        """Returns the GiB of each part, with the settings that change it."""
        use = self.use
        left = self.share - use.before_kv
        rows = (
            ("device", use.total, ""),
            ("used by others", use.used_by_others, "other processes and the driver"),
            ("share", self.share, f"gpu_memory_utilization {self.utilization:g}"),
            ("- weights", use.weights, "the base, dtype, quantization"),
            ("- adapter pool", use.adapter_pool, "adapter_pool_bytes"),
            ("- activations", use.activations, "max_num_batched_tokens, max_num_seqs"),
            ("- graphs", use.graphs, "max_num_seqs, enforce_eager"),
            ("= left for KV", left, "max_model_len times what runs at once"),
            ("KV blocks", self.kv, self.kv_words),
        )
        return "\n".join(f"  {name:<15}{size / GIB:>10.3f} GiB  {why}" for name, size, why in rows)


def plan_memory(
    use: DeviceUse,
    *,
    utilization: float,
    block_bytes: int,
    max_useful_blocks: int,
    kv_cache_bytes: int | None = None,
    num_blocks: int | None = None,
    num_null_blocks: int = 0,
    longest: LongSequences | None = None,
) -> MemoryPlan:
    """Plans as many KV blocks as fit and are useful, unless the configuration sets a number.
    `num_null_blocks` and `longest` are fields of the plan.

    Raises EngineMemoryError if the share is not free, if it holds no KV block, or if the
    configuration requests more than the device has.
    """
    share = int(use.total * utilization)
    free = use.total - use.used_by_others
    is_asked = num_blocks is not None or kv_cache_bytes is not None
    if num_blocks is None:
        room = share - use.before_kv if kv_cache_bytes is None else kv_cache_bytes
        num_blocks = max(0, min(room // block_bytes - num_null_blocks, max_useful_blocks))
    plan = MemoryPlan(use, utilization, block_bytes, num_blocks, num_null_blocks, longest)
    if num_blocks < 1:
        raise _refusal(
            plan,
            f"no KV block fits, one has {block_bytes} bytes",
            "raise kv_cache_bytes"
            if kv_cache_bytes is not None
            else "raise gpu_memory_utilization, or lower adapter_pool_bytes, "
            "max_num_batched_tokens or max_num_seqs",
        )
    if is_asked and use.before_kv + plan.kv > free:
        raise _refusal(
            plan,
            f"weights, adapters, steps and KV need {(use.before_kv + plan.kv) / GIB:.3f} GiB, "
            f"{free / GIB:.3f} GiB are free",
            "lower num_blocks or kv_cache_bytes (both unset: what fits), adapter_pool_bytes, "
            "max_num_batched_tokens or max_num_seqs",
        )
    if not is_asked and share > free:
        raise _refusal(
            plan,
            f"the share is {share / GIB:.3f} GiB, but only {free / GIB:.3f} GiB are free",
            f"lower gpu_memory_utilization to {_floor(free / use.total)} or less, or end the "
            "other processes on this device",
        )
    return plan


def check_asked(asked: Mapping[str, int | None], memory_bytes: int, where: str) -> None:
    """Refuses sizes, by their settings' names, that exceed the memory of `where` ("this machine"),
    each alone or all together. None: not set. Raises EngineMemoryError, in one line."""
    sizes = {name: size for name, size in asked.items() if size is not None}
    too_large = {name: size for name, size in sizes.items() if size > memory_bytes}
    total = sum(sizes.values())
    if not too_large and total <= memory_bytes:
        return
    shown = too_large or sizes
    words = " and ".join(f"{name} is {size / GIB:.3f} GiB" for name, size in shown.items())
    raise EngineMemoryError(f"{words}, but {where} has {memory_bytes / GIB:.3f} GiB of memory")


def default_adapter_pool_bytes(left: int, page_bytes: int) -> int:
    """Returns an eighth of the share that is left after the weights: on 140 GB, 160 adapters of
    rank 16 on all linear layers of a base of 8B. Small devices: 16 of them, if that is no more than
    a quarter. `page_bytes`: of one such adapter."""
    left = max(0, left)
    size = max(left // 8, min(_MIN_POOL_ADAPTERS * page_bytes, left // 4))
    return min(size // page_bytes, _MAX_POOL_ADAPTERS) * page_bytes


def default_adapter_host_bytes(*, pool_bytes: int, memory_bytes: int) -> int:
    """Returns room for four times the adapters on the device, within an eighth of the machine's
    memory (other engines may run on it) but at least 4 GiB."""
    return max(4 * GIB, min(4 * pool_bytes, memory_bytes // 8))


def _floor(fraction: float) -> str:
    return f"{int(fraction * 100) / 100:.2f}"


def _refusal(plan: MemoryPlan, problem: str, advice: str) -> EngineMemoryError:
    return EngineMemoryError(f"out of device memory: {problem}\n{plan.table()}\n{advice}")
