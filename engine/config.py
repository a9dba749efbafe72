"""The configuration of an engine at its start. Frozen; derived values are never stored back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.types import SpeculationMode
from kernels.exchange_environment import EXCHANGE_ENVIRONMENT

QuantizationSetting = Literal["auto", "none", "fp8", "int4"]
KVCacheDtype = Literal["auto", "fp8"]
LoraDtype = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model_path: str  # folder with config.json and safetensors
    base_digest: str  # of that folder's content; seeds every KV hash chain
    backend: Literal["auto", "reference", "triton"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # fp32 on CPU, bf16 on CUDA
    # The form of the layers' linears. none: all are dequantized to dtype; auto: linears that are
    # stored in 4 bits stay so where kernels multiply them; int4: everywhere; fp8: e4m3, quantised
    # as they are read.
    quantization: QuantizationSetting = "none"
    # Ranks that compute the model together, each with a part of every layer. Sizes in bytes are
    # per rank, but for adapter_host_bytes and kv_host_bytes
    tensor_parallel_size: int = 1
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, config.json is enough
    max_model_len: int | None = None  # None: the model's own limit
    block_size: int = 16  # tokens per KV block
    num_blocks: int | None = None  # None: from kv_cache_bytes or gpu_memory_utilization
    kv_cache_bytes: int | None = None  # None on CPU: 1 GiB
    # fp8: keys and values rounded to e4m3, half the bytes of 16 bits; attention computes in 16 bits
    # or more. auto: dtype
    kv_cache_dtype: KVCacheDtype = "auto"
    # Host memory for KV blocks that leave the device, of all ranks together; 0: none. vLLM's
    # kv_offloading_size, which counts GiB.
    kv_host_bytes: int = 0
    # CUDA: this engine's share of the device, for weights, adapters, activations, graphs and KV
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int = 2048
    # A step that computes prompts lasts at most so many times as long as without them, while other
    # sequences decode. See `engine.prompt_budget`.
    max_decode_slowdown: float = 2.5
    max_num_seqs: int = 64
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None  # plan a step while the last one runs; None: on CUDA
    # Tokens that a grammar leaves no choice about are not drawn: same tokens, fewer steps
    force_grammar_tokens: bool = True
    # Drafts of requests that do not choose; "off": of none. See `engine.speculation`.
    speculation: SpeculationMode = "off"
    num_speculative_tokens: int = 7  # of a draft, at most: 8 rows are a tile of an adapter
    suffix_cache_bytes: int = 64 * 1024 * 1024  # host memory of the text that drafts come from
    enforce_eager: bool = False  # CUDA: no graphs; starts sooner, decodes slower
    mixed_graphs: bool = True  # CUDA: also of steps with prompts, up to some thousand tokens
    # On the device, all sites together. None: 256 MiB on a CPU, an eighth of the rest on CUDA
    adapter_pool_bytes: int | None = None
    # int8: adapters' rows rounded to 8 bits with a scale a rank, half the bytes of 16 bits. auto:
    # dtype
    lora_dtype: LoraDtype = "auto"
    adapter_host_bytes: int | None = None  # None: four times the pool if memory allows, or 4 GiB
    max_lora_rank: int = 512  # also the maximum: step plans have no room for more
    # DoRA adapters and adapters with biases. CUDA: decodes with them have graphs of their own
    affine_adapters: bool = True
    # Younger requests admitted before one that waits for its adapter. 128 adapters in a pool of 32
    # and 256 requests: a limit of 64 left rows of a step empty, 164 steps where 256 needs 133.
    max_adapter_overtakes: int = 256
    # CUDA: compiled kernels, a folder. None: TRITON_CACHE_DIR, or ~/.triton/cache
    kernel_cache_dir: str | None = None
    seed: int = 0  # source of the seeds of requests without one
    num_threads: int | None = None  # CPU: torch threads; None: the usable cores

    @property
    def environment(self) -> dict[str, str]:
        """The variables to be set before torch is imported, which the other ranks inherit."""
        has_exchanges = self.tensor_parallel_size > 1 and self.device != "cpu"
        return dict(EXCHANGE_ENVIRONMENT) if has_exchanges else {}
