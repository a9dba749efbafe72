"""The configuration of one base model: its engine, replicas, routing, scaling and migration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from engine.config import EngineConfig
from engine.types import SpeculationMode
from serve_app.config.values import AliasName, Args, Bytes, RangeArgs, ScaledArgs
from serve_app.routing.policies import check_policy
from serve_app.text.response_template import Family

# The defaults per device. A step on a GPU has to be large for its products to run at full rate; on
# a CPU it has to end.
STEP_LIMITS = {
    "cpu": {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
    "cuda": {"max_num_batched_tokens": 8192, "max_num_seqs": 256},
}


class EngineArgs(Args):
    """The engine of one replica."""

    backend: Literal["auto", "reference", "triton"] = "auto"
    """The operations: Triton kernels or their PyTorch references. `auto`: Triton on a GPU, which
    needs the extra `gpu`, and the references on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device. `auto`: CUDA if there is a GPU, otherwise the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of weights and activations. `auto`: float32 on a CPU, bfloat16 on CUDA."""
    quantization: Literal["auto", "none", "fp8", "int4"] = "none"
    """The layers' linears in memory; the head, the embedding and adapters keep `dtype`. `none`: all
    are dequantized to `dtype`. `auto`: those that a GPTQ, AWQ or pack-quantized checkpoint stores
    in 4 bits stay in 4 bits on CUDA with Triton, faster than `none` for few requests and slower for
    hundreds; all others are in `dtype`. `int4`: 4 bits also on a CPU, slowly; a base that is not
    stored so is refused. `fp8`: e4m3, quantised while the base is read, half of bfloat16's bytes;
    weights have a scale for each output, activations one for each token and step. On CUDA `fp8`
    needs compute capability 8.9 and bfloat16."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=8)
    """Ranks that compute the base together, each with its part of every layer and of the adapters:
    processes of one replica, on one node. It divides `num_attention_heads` and `intermediate_size`
    of the base's config.json, and divides `num_key_value_heads` or is a multiple of it. On CUDA a
    replica takes as many GPUs. With `quantization: fp8` the parts of each rank have widths that are
    multiples of 16. `num_blocks`, `kv_cache_bytes` and `adapter_pool_bytes` are those of each
    rank."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights for benchmarks; the base's folder then needs only `config.json`."""
    max_model_len: int | None = Field(default=None, ge=1)
    """The most tokens of a prompt and its output together. By default the model's own limit. It is
    lower if all KV blocks hold less; `/v1/models` shows the value in force."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens per KV block."""
    num_blocks: int | None = Field(default=None, ge=1)
    """The number of KV blocks, which hold `block_size` tokens of all layers, or of the larger of
    two groups of layers with and without a window. By default it follows from `kv_cache_bytes` or
    `gpu_memory_utilization`."""
    kv_cache_bytes: Bytes | None = None
    """The memory for KV blocks. By default 1 GiB on a CPU; on CUDA the rest of the share of
    `gpu_memory_utilization`."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """The type of keys and values in the KV cache. `auto`: `dtype`. `fp8`: e4m3, rounded as they
    are written: twice the tokens of 16 bits, and attention reads half the bytes. Outputs differ,
    those of small bases visibly, and can depend on the other requests of a step and on drafts. At
    the start the base is run on random tokens with both types and refused if it changes too much.
    On CUDA it needs compute capability 8.9."""
    kv_host_bytes: Bytes = Field(default=0)
    """The host memory for KV blocks that leave the device, page-locked on CUDA: prefixes are loaded
    from it instead of computed, and preempted requests return from it. All ranks together. 0: none.
    It is allocated at the start, beside `adapter_host_bytes`. vLLM's `kv_offloading_size` is the
    same in GiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """CUDA: the engine's share of the device memory, for weights, adapters, activations, graphs and
    KV blocks."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """The most tokens per step. By default 2048 on a CPU, 8192 on CUDA."""
    max_decode_slowdown: float = Field(default=2.5, gt=1)
    """While sequences decode, a step with prompt tokens lasts at most about so many times as long
    as a step without, by the measured cost of steps. Higher values compute prompts in larger parts:
    a little more throughput, less even streams. While prompts queue, steps of up to 25 ms are
    allowed in any case; above 1.5 s of waiting prompts the bound is relaxed."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """The most sequences per step. By default 64 on a CPU, 256 on CUDA."""
    enable_prefix_caching: bool = True
    """Whether prompts reuse the KV blocks of equal prefixes."""
    async_scheduling: bool | None = None
    """Whether a step is planned while the previous step runs. By default on CUDA only."""
    force_grammar_tokens: bool = True
    """Whether tokens that a grammar leaves no choice about are output without being drawn: the same
    answers in fewer steps."""
    speculation: SpeculationMode = "off"
    """Drafts: the continuation of the newest tokens in earlier text of the same adapter and tenant
    is verified in one step. The answers are the same, in FP8 up to its rounding. `auto`: where it
    is expected to save time, by the acceptance of drafts and the cost of steps, both measured;
    `suffix`: wherever earlier text matches. A request's field `speculation` replaces it, unless it
    is `off`."""
    num_speculative_tokens: int = Field(default=7, ge=1, le=32)
    """The most tokens of a draft. With one more than 7 a sequence has more rows than a tile of its
    adapter, whose bytes are read once for each tile."""
    suffix_cache_bytes: Bytes = 64 * 1024 * 1024
    """The host memory for the text that drafts come from, 512 bytes a token; the oldest text
    leaves it first."""
    enforce_eager: bool = False
    """CUDA: no CUDA graphs, for a quicker start and slower decoding."""
    adapter_pool_bytes: Bytes | None = None
    """The memory for adapters on the device. By default 256 MiB on a CPU; on CUDA an eighth of the
    memory that the base leaves."""
    adapter_host_bytes: Bytes | None = None
    """The memory for adapters on the host. By default four times the pool within an eighth
    of the host's memory, and at least 4 GiB. On CUDA two buffers for adapters on their way come on
    top, each of the size of an adapter of rank 16 on all linear layers."""
    lora_dtype: Literal["auto", "int8"] = "auto"
    """The type of adapters in memory. `auto`: `dtype`. `int8`: each rank's rows are rounded to 8
    bits as an adapter is loaded, with a scale of their own: twice the adapters in the same memory,
    and decodes with many adapters read half the bytes. The change of a model by an adapter differs
    by about one percent."""
    max_lora_rank: int = Field(default=512, ge=1, le=512)
    """The highest LoRA rank that the engine accepts."""
    affine_adapters: bool = True
    """Whether DoRA adapters and adapters with biases are served. On CUDA decodes with such adapters
    have graphs of their own, of some 4 MiB each; steps without them are the same either way."""
    max_adapter_overtakes: int = Field(default=256, ge=0)
    """The number of younger requests that may overtake a request while it waits for room for its
    adapter."""
    kernel_cache_dir: str | None = Field(default=None, min_length=1)
    """CUDA: the folder of compiled kernels, which `loraplex warm` fills and an image or a shared
    disk can carry; it must exist on every node. By default Triton's own: `TRITON_CACHE_DIR`, or
    `~/.triton/cache`."""
    seed: int = 0
    """Seeds the random numbers of requests that bring no seed."""
    num_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU: threads of torch, of each rank. By default the usable cores, shared by the ranks."""

    @model_validator(mode="after")
    def _host_tier_has_prefixes(self) -> EngineArgs:
        if self.kv_host_bytes and not self.enable_prefix_caching:
            raise ValueError(
                f"kv_host_bytes is {self.kv_host_bytes} and enable_prefix_caching is false: blocks "
                "on the host are found by their prefixes"
            )
        return self

    @field_validator("speculation", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """Accepts a bare `off` in a file: YAML 1.1 reads it as false."""
        return "off" if value is False else value

    def to_config(self, model_path: str, base_digest: str, device: str) -> EngineConfig:
        """Returns the engine's configuration on `device`, defaults of that device included."""
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        fields = STEP_LIMITS[device] | given | {"device": device}
        return EngineConfig(model_path=model_path, base_digest=base_digest, **fields)


class RouterArgs(Args):
    """The choice of an engine replica for each request."""

    policy: str = Field(default="expected_ttft", min_length=1)
    """`expected_ttft`, `adapter_affinity`, `prefix_affinity`, `power_of_two`, `round_robin`, or a
    class of your own as `module:Class`. A class is accepted from the configuration file only and
    imported in every process that makes a router."""
    options: dict[str, bool | int | float | str] = Field(default={})
    """Keyword arguments of the policy."""

    @model_validator(mode="after")
    def _policy_is_known(self) -> RouterArgs:
        check_policy(self.policy, self.options)
        return self


class AutoscalingArgs(RangeArgs):
    """Scales the engine replicas of one base between two numbers. To zero and back:
    `idle_timeout_s`."""

    target_ttft_s: float = Field(default=1.0, gt=0)
    """The expected time to first token to aim at, queue included."""
    target_kv_usage: float = Field(default=0.85, gt=0, le=1)
    """The share of used KV blocks to aim at."""
    upscale_delay_s: float = Field(default=3.0, ge=0)
    """Seconds for which more replicas must be needed before they are added."""
    downscale_delay_s: float = Field(default=60.0, ge=0)
    """Seconds for which fewer replicas must suffice before some are removed."""


class MigrationArgs(Args):
    """Streams that outlive their engine."""

    limit: int = Field(default=3, ge=0)
    """The number of engine deaths that a request survives; 0: none."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds to wait for another replica that takes the request."""


class ModelArgs(ScaledArgs):
    """One base model to serve."""

    name: str = Field(min_length=1)
    """The registered name, as `name`, `name@alias` or `name@version`."""
    alias: AliasName | None = None
    """The alias that bare names of this base's adapters mean. By default `registry.alias`."""
    engine: EngineArgs = EngineArgs()
    generation_config: Literal["auto", "vllm"] = "auto"
    """`auto`: the base's `generation_config.json` sets the sampling defaults; `vllm`: it does not.
    As vLLM's `--generation-config`."""
    response_template: Family | None = None
    """The family of response templates by which tool calls and reasoning are read, regardless of
    the base's files; `chatml-json` is the family of Qwen, Hermes and SmolLM. By default the base's
    own template, or the family of its chat template. An adapter's own template replaces it."""
    max_ongoing_requests: int = Field(default=256, ge=1, le=900)
    """The most open requests per engine replica. Ray runs 1,000 calls of a replica at a time: the
    rest are for control calls and health checks."""
    max_queued_requests: int = Field(default=256, ge=1)
    """The most waiting requests per ingress replica; beyond it requests get 429 with
    `Retry-After`."""
    graceful_shutdown_timeout_s: float = Field(default=600.0, ge=0)
    """Seconds that a replica that goes waits for its longest stream."""
    health_check_period_s: float = Field(default=2.0, gt=0)
    """Seconds between health checks of a replica."""
    stall_timeout_s: float = Field(default=60.0, gt=0)
    """A step that lasts longer counts as hung and its engine is replaced. Sooner if steps of its
    size are known to be short: after 10 s or 8 times the longest recent one, whichever is
    longer."""
    idle_timeout_s: float | None = Field(default=None, gt=0)
    """Scale to zero: after so many seconds without a request the engines stop and their memory is
    free. By default never."""
    cold_start: Literal["wait", "refuse"] = "wait"
    """A request for a sleeping base waits while it starts (at most `max_queued_requests` per
    ingress replica), or is refused with 503 and `Retry-After`."""
    cold_start_timeout_s: float = Field(default=300.0, gt=0)
    """The longest wait for a sleeping base."""
    router: RouterArgs = RouterArgs()
    autoscaling: AutoscalingArgs | None = None
    """Off by default."""
    migration: MigrationArgs = MigrationArgs()


# Changing these settings restarts no engine.
FRONT_SETTINGS = frozenset(
    {"alias", "replicas", "idle_timeout_s", "cold_start", "cold_start_timeout_s", "migration"}
)


def base_name(model: ModelArgs) -> str:
    """Returns the registered name without alias and version."""
    return model.name.partition("@")[0]
