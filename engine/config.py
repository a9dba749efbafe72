"""What an engine is told at its start. Frozen; derived values are never stored back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model_path: str  # folder with config.json and safetensors
    base_digest: str  # of that folder's content; seeds every KV hash chain
    backend: Literal["auto", "reference", "triton"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # fp32 on CPU, bf16 on CUDA
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, config.json is enough
    max_model_len: int | None = None  # None: the model's own limit
    block_size: int = 16  # tokens a KV block
    num_blocks: int | None = None  # None: from kv_cache_bytes or gpu_memory_utilization
    kv_cache_bytes: int | None = None  # None on CPU: 1 GiB
    # CUDA: this engine's share of the device, for weights, adapters, activations, graphs and KV
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None  # a step is planned while the last one runs; None: on CUDA
    enforce_eager: bool = False  # CUDA: no graphs; starts sooner, decodes slower
    piecewise_graphs: bool = True  # CUDA: also for small steps with prompts, around attention
    # On the device, all sites together. None: 256 MiB on a CPU, an eighth of what CUDA has left
    adapter_pool_bytes: int | None = None
    adapter_host_bytes: int | None = None  # None: four times the pool if memory allows, or 4 GiB
    max_lora_rank: int = 512  # and not more: what plans of steps have room for
    # With 128 adapters in a pool of 32 and 256 requests, 64 left rows of a step empty: 164 steps
    # for what 256 does in 133.
    max_adapter_overtakes: int = 256  # of a request that waits for its adapter, by younger ones
    seed: int = 0  # of the seeds that requests without one are given
    num_threads: int | None = None  # CPU: torch threads; None: the usable cores
