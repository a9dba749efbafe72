"""The list of the kernels that an engine of a configuration launches, found without a device.

The binary of a kernel depends on the shapes of the base and of the pools and on thresholds in the
number of tokens, so the list is that of steps of every number of tokens around a power of two, up
to the largest step (all thresholds are powers of two; a test compares with every number). It
follows the code: the step builder, the layers of the model that differ and the kernels' launch
functions run as under traffic, on tensors of the meta device, where a launch is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.config import EngineConfig
from engine.device_memory import page_layout
from engine.device_step import DeviceSteps
from engine.int4_forms import NO_INT4, Int4Forms
from engine.kv_cache import allocate_kv_cache
from engine.largest_step import step_limits
from engine.model import Model
from engine.model_config import ModelConfig
from engine.parallel.shards import Shard
from engine.resolved import resolve_kv_dtype, resolve_layout
from engine.step_inputs import StepLimits
from engine.types import ScheduledBatch
from engine.warm_batches import (
    GREEDY,
    batch_shapes,
    make_batch,
    mixes,
    step_sizes,
    with_fitting,
    zero_adapters,
)
from engine.weights import WeightBuilder
from kernels.backend import Capability, traced_for
from kernels.collective import SOLO, Traced
from kernels.kernel_call import KernelCall
from lora.adapter import Adapter
from lora.file_packer import trace_copies
from lora.pool import AdapterPool
from lora.sites import Site

_POOL_PAGES = 8  # of all sites


def trace_kernels(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    capability: Capability,
    int4: Int4Forms = NO_INT4,
) -> frozenset[KernelCall]:
    """Returns every kernel that steps of this configuration and loads of adapters launch, on a
    device of the compute capability; none is needed here. `int4`: the matrices that stay in 4 bits.
    Takes about a second for Llama-3-8B."""
    from kernels.triton_launch import recorded_calls

    meta = torch.device("meta")
    size = config.tensor_parallel_size  # all ranks have the same shapes, and so the same kernels
    shard = Shard(model, 0, size)
    layout = resolve_layout(shard.config, config, max_model_len)
    limits = step_limits(config, shard.config, max_model_len, len(layout.groups))
    with traced_for(capability), recorded_calls() as calls, torch.inference_mode():
        kv_dtype = resolve_kv_dtype(config, dtype, capability)
        kv = allocate_kv_cache(shard.config, layout, 1, kv_dtype, meta)
        is_fp8 = config.quantization == "fp8"
        weights = WeightBuilder(shard, dtype, meta, is_fp8=is_fp8, int4=int4).weights
        ranks = SOLO if size == 1 else Traced(size)
        traced = Model(shard.config, weights, max_len=1, ranks=ranks)
        adapters: Sequence[Adapter] = ()
        if config.adapter_pool_bytes != 0:  # adapters of all layers in int8 double the trace's time
            few = {f"model.layers.{index}" for index in traced.layers_of_each_kind(kv)}
            run = [s for s in shard.sites() if s.is_optional or s.name.rpartition(".")[0] in few]
            adapters = zero_adapters(run, limits, has_affine=config.affine_adapters)
        pool = _pool_with(adapters, config, shard.sites(), dtype)
        if adapters and size == 1 and not pool.is_int8:
            trace_copies(dtype)
        steps = DeviceSteps(traced, kv, pool, limits, has_mixed_graphs=config.mixed_graphs)
        steps.mask_once()
        if not config.enforce_eager:
            steps.trace()
        for batch in _trace_batches(limits, pool, [one.digest for one in adapters]):
            steps.trace_batch(batch)
    return frozenset(calls)


def _pool_with(
    adapters: Sequence[Adapter], config: EngineConfig, sites: Sequence[Site], dtype: torch.dtype
) -> AdapterPool:
    """Returns a pool on the meta device with these adapters, without room if there are none.

    Kernels depend on whether there is a pool, not on its size. This one has room for adapters of
    all sites, though small ones may fit into the engine's own pool alone; the head of a wide
    vocabulary can be larger than eight pages of a small model's layers."""
    meta, has_affine = torch.device("meta"), config.affine_adapters
    pages = page_layout(config, sites, dtype)
    room = max(_POOL_PAGES * pages.page_bytes, sum(map(pages.num_bytes, adapters)))
    pool_bytes = max(config.adapter_pool_bytes or 0, room) if adapters else 0
    pool = AdapterPool(
        sites,
        pool_bytes,
        dtype,
        meta,
        host_bytes=1 << 62,
        has_affine=has_affine,
        is_int8=pages.is_int8,
    )
    for adapter in adapters:
        pool.insert(
            pages.pack(adapter, lambda size: torch.empty(size, dtype=torch.uint8, device=meta))
        )
    return pool


def _trace_batches(
    limits: StepLimits, pool: AdapterPool, adapters: Sequence[str]
) -> Iterator[ScheduledBatch]:
    for owners in with_fitting(pool, mixes(adapters)):
        for num_tokens in step_sizes(limits.max_tokens):
            for shape in batch_shapes(num_tokens, limits):
                yield make_batch(shape, owners, limits, 1, GREEDY)
