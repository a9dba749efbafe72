"""The memory that a base needs, from its files' headers, before anything is loaded: does it fit a
device, and how much room is left for adapters and KV?

An estimate for the defaults of the configuration, but for `quantization`, `kv_cache_dtype` and
`lora_dtype`. The memory of a step and its graphs is measured by the engine at its start;
RESERVED_BYTES stand for it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint
from engine.config import EngineConfig, KVCacheDtype, LoraDtype, QuantizationSetting
from engine.device_memory import page_layout
from engine.devices import describe_devices
from engine.host_memory import available_bytes
from engine.int4_forms import (
    Int4Forms,
    describe_reasons,
    resolve_int4,
    stored_forms,
    stores_int4,
)
from engine.kv_cache import block_bytes
from engine.kv_layout import kv_layout, num_uncommitted
from engine.memory_plan import GIB, default_adapter_pool_bytes
from engine.model_config import ModelConfig, read_model_config
from engine.parallel.shards import Shard
from engine.resolved import resolve_fp8, resolve_kv_dtype
from engine.weights import WeightBuilder
from kernels.backend import Capability
from kernels.int4_linear import MAX_MID_ROWS, MAX_WIDE_ROWS

RESERVED_BYTES = 3 * GIB  # of a CUDA device: activations, graphs and libraries
_MEANT: Capability = (9, 0)  # of a device of which only the memory is given
_CONFIG = EngineConfig("", "")


@dataclass(frozen=True, slots=True)
class Fit:
    stored_as: str  # the scheme of the files, in words
    served_as: str  # the type in memory, and the kernels or library that compute
    stored_bytes: int
    weight_bytes: int  # in memory, of each rank
    device: str
    memory_bytes: int  # of the device, as given or found; of each rank
    adapter_bytes: int  # of one of rank 16 on all linear layers
    num_adapters: int  # that the pool holds by default
    kv_tokens: int  # that fit beside weights and adapters
    not_in_4_bits: str = ""  # the matrices of a 4-bit checkpoint that cannot stay so, and why
    kv_words: str = ""  # the type of KV, where it is not that of the activations
    adapter_words: str = ""  # likewise that of adapters
    num_ranks: int = 1  # each on a device of its own, or with its share of the host's memory

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0

    def facts(self) -> dict[str, str]:
        """Returns lines for users."""
        each = f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        facts = {
            "stored as": f"{self.stored_as}, {self.stored_bytes / GIB:.2f} GiB",
            "served as": f"{self.served_as}, {self.weight_bytes / GIB:.2f} GiB{each}",
            "device": f"{self.device}, {self.memory_bytes / GIB:.1f} GiB{each}",
        }
        if self.not_in_4_bits:
            facts["dequantized"] = self.not_in_4_bits
        if not self.fits:
            return facts | {"fits": "no: nothing is left for KV"}
        return facts | {
            "fits": f"yes, with about {self.num_adapters:,} adapters of rank 16"
            f"{self.adapter_words} on the device and {self.kv_tokens:,} tokens of "
            f"KV{self.kv_words}"
        }


def estimate_fit(
    folder: Path,
    memory_bytes: int | None = None,
    quantization: QuantizationSetting = "none",
    num_ranks: int = 1,
    kv_cache_dtype: KVCacheDtype = "auto",
    lora_dtype: LoraDtype = "auto",
) -> Fit:
    """Reads headers and small parts. `memory_bytes`: of the intended CUDA device; None: of the
    first one of this machine, or its host memory. `quantization`, `kv_cache_dtype` and
    `lora_dtype`: as in the configuration of an engine. `num_ranks`: the number of ranks that share
    the base, each on such a device, or all in the host's memory. Raises UnsupportedModelError, with
    the tensor or key and the reason, for a base that the engine refuses or that so many ranks
    cannot share."""
    config = read_model_config(folder)
    shard = Shard(config, 0, num_ranks)
    checkpoint = Checkpoint(folder, config)
    device, memory_bytes, capability = _device(memory_bytes, num_ranks)
    is_cuda = capability is not None
    dtype = torch.bfloat16 if is_cuda else torch.float32
    meant = EngineConfig(
        str(folder),
        "",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        lora_dtype=lora_dtype,
        tensor_parallel_size=num_ranks,
    )
    kv_dtype = resolve_kv_dtype(meant, dtype, capability)
    is_fp8 = resolve_fp8(meant, shard.config, dtype, capability)
    int4 = resolve_int4(meant, config, dtype, capability)
    meta = torch.device("meta")  # shapes alone
    weights = WeightBuilder(shard, dtype, meta, is_fp8=is_fp8, int4=int4).weights.nbytes
    page = page_layout(meant, shard.sites(), dtype).page_bytes
    share = int(memory_bytes * _CONFIG.gpu_memory_utilization)
    pool = default_adapter_pool_bytes(share - weights, page)
    reasons = ""
    if is_cuda and quantization in ("auto", "int4") and stores_int4(config):
        reasons = describe_reasons(stored_forms(config, checkpoint, num_ranks)[1])
    left = share - weights - pool - (RESERVED_BYTES if is_cuda else 0)
    return Fit(
        stored_as="plain weights"
        if config.quantization is None
        else f"{config.quantization.words} ({checkpoint.num_quantized} modules)",
        served_as=_served_as(
            config, dtype, checkpoint, capability=capability, is_fp8=is_fp8, int4=int4
        ),
        stored_bytes=checkpoint.num_bytes,
        weight_bytes=weights,
        device=device,
        memory_bytes=memory_bytes,
        adapter_bytes=page,
        num_adapters=pool // page,
        kv_tokens=_kv_tokens(shard.config, max(0, left), kv_dtype, runs_ahead=is_cuda),
        not_in_4_bits=reasons,
        kv_words=" in FP8" if kv_cache_dtype == "fp8" else "",
        adapter_words=" in int8" if lora_dtype == "int8" else "",
        num_ranks=num_ranks,
    )


def _device(memory_bytes: int | None, num_ranks: int) -> tuple[str, int, Capability | None]:
    """Returns a device's name and memory, of each rank, and its compute capability; None: a CPU."""
    if memory_bytes is not None:
        return "a CUDA device of this size", memory_bytes, _MEANT
    found = describe_devices().cuda
    if found:
        return found[0].name, found[0].memory_bytes, found[0].capability
    return "CPU", available_bytes() // num_ranks, None


def _kv_tokens(config: ModelConfig, num_bytes: int, dtype: torch.dtype, *, runs_ahead: bool) -> int:
    length = config.usual_len
    layout = kv_layout(config.sliding_windows, _CONFIG.block_size, length)
    uncommitted = num_uncommitted(_CONFIG.max_num_batched_tokens, runs_ahead=runs_ahead)
    num_blocks = num_bytes // block_bytes(config, layout, dtype) - layout.num_null_blocks
    return layout.num_tokens(max(0, num_blocks), uncommitted, length)


def _served_as(
    config: ModelConfig,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    *,
    capability: Capability | None,
    is_fp8: bool,
    int4: Int4Forms,
) -> str:
    is_cuda = capability is not None
    name = str(dtype).removeprefix("torch.")
    if is_fp8:
        kernels = "Triton's kernels and torch._scaled_mm" if is_cuda else "torch operations"
        return f"FP8 e4m3, the rest {name}, {kernels}"
    if int4:
        kernels = "torch operations"
        if capability is not None:
            most = MAX_WIDE_ROWS if capability[0] == 9 else MAX_MID_ROWS
            kernels = f"Triton's kernels of 4 bits up to {most} tokens, cuBLAS beyond"
        return (
            f"4 bits in {len(int4)} of {4 * config.num_layers} matrices, the rest {name}, {kernels}"
        )
    how = f"dequantized to {name}" if checkpoint.num_quantized else name
    return f"{how}, " + ("Triton's and cuBLAS' kernels" if is_cuda else "torch operations")
