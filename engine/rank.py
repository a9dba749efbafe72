"""One rank of an engine: its device, its part of the base, its KV tensors and its steps.

The first rank, or the only one, belongs to a `ModelRunner`; the others to `engine.parallel`'s
followers. Until they serve, all ranks make the same calls in the same order, since the steps that
are measured and captured have exchanges.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from engine.block_copies import check_host_tier
from engine.checks.kv_rounding import KVChange, measure_kv_rounding
from engine.config import EngineConfig
from engine.device_memory import (
    allocated_bytes,
    explain_out_of_memory,
    look_at_empty_device,
    outside_bytes,
    page_layout,
    peak_bytes,
)
from engine.device_step import DeviceSteps
from engine.int4_forms import resolve_int4
from engine.kv_cache import KVCache, allocate_kv_cache, block_bytes
from engine.largest_step import largest_batch, num_blocks, step_limits
from engine.memory_plan import DeviceUse
from engine.model import Model
from engine.model_config import read_model_config
from engine.parallel.group import Group
from engine.reference_step import ReferenceSteps
from engine.resolved import (
    resolve_backend,
    resolve_device,
    resolve_dtype,
    resolve_fp8,
    resolve_kv_dtype,
    resolve_layout,
    resolve_max_len,
    resolve_shard,
)
from engine.step_inputs import StepLimits
from engine.types import Sample, ScheduledBatch
from engine.warm_up import prepare_kernels
from engine.weights import WeightBuilder
from kernels.collective import SOLO, Collective
from kernels.compilations import load_kernels
from kernels.kernel_call import KernelCall
from kernels.rendezvous import meet
from lora.pool import AdapterPool

Steps = DeviceSteps | ReferenceSteps
_MAX_SHARED_BYTES = 16 * 1024**2  # of an exchange; above, NCCL is as fast


class Rank:
    def __init__(self, config: EngineConfig, index: int = 0) -> None:
        """Resolves the settings that the configuration leaves open, and loads nothing."""
        self.config = config
        self.device = resolve_device(config, index)
        self.uses_triton = resolve_backend(config, self.device)
        self.dtype = resolve_dtype(config, self.device)
        self.folder = Path(config.model_path)
        whole = read_model_config(self.folder)
        self.max_model_len = resolve_max_len(config, whole)
        self.layout = resolve_layout(whole, config, self.max_model_len)
        self.is_cuda = self.device.type == "cuda"
        capability = None
        if self.is_cuda:
            torch.cuda.set_device(self.device)
            capability = torch.cuda.get_device_capability(self.device)
        self.capability = capability
        of_kernels = capability if self.uses_triton else None
        self.kv_dtype = resolve_kv_dtype(config, self.dtype, of_kernels)
        self.shard = resolve_shard(config, whole, index)
        self.is_fp8 = resolve_fp8(config, self.shard.config, self.dtype, of_kernels)
        check_host_tier(config, block_bytes(self.shard.config, self.layout, self.kv_dtype))
        if config.lora_dtype != "auto":
            page_layout(config, self.shard.sites(), self.dtype)  # refuses sites that it cannot hold
        self.int4 = resolve_int4(config, whole, self.dtype, of_kernels)
        self.model_config = self.shard.config
        self.empty: tuple[int, int] | None = None  # as `look_at_empty_device`, of a CUDA device
        self.weight_bytes = 0  # on a CUDA device, with the rotary tables
        self._exchange_bytes = 0
        self._library_bytes = 0  # kept by libraries since calls before the steps were measured

    @property
    def limits(self) -> StepLimits:
        num_tables = len(self.layout.groups)
        return step_limits(self.config, self.model_config, self.max_model_len, num_tables)

    def load(self) -> None:
        if self.is_cuda:
            self.empty = look_at_empty_device(self.device)
        held = allocated_bytes(self.device) if self.is_cuda else 0
        with explain_out_of_memory("loading the weights", ("dtype", "quantization", "the device")):
            builder = WeightBuilder(
                self.shard, self.dtype, self.device, is_fp8=self.is_fp8, int4=self.int4
            )
            is_dummy = self.config.load_format == "dummy"
            self.weights = builder.fill_randomly() if is_dummy else builder.load(self.folder)
        if self.is_cuda:
            self.weight_bytes = allocated_bytes(self.device) - held

    def prepare_kernels(self, stop: threading.Event | None = None) -> frozenset[KernelCall]:
        """Returns the kernels of the steps, none without Triton, after those that the cache lacks
        are compiled. After `stop` is set, it ends soon."""
        if not self.uses_triton:
            return frozenset()
        assert self.capability is not None
        whole, length, int4 = self.shard.whole, self.max_model_len, (self.int4,)
        prepared = prepare_kernels(
            self.config, whole, self.dtype, length, self.capability, int4, stop
        )
        return prepared.calls

    def meet(self, store: Path) -> Collective:
        """Returns the exchanges with the other ranks, which name the same file."""
        hidden = self.shard.whole.hidden_size * self.dtype.itemsize
        outside = outside_bytes(self.device) if self.is_cuda else 0
        ranks = meet(
            store,
            self.shard.rank,
            self.shard.size,
            self.device,
            min(self.limits.max_tokens * hidden, _MAX_SHARED_BYTES),
            hidden,
        )
        if self.is_cuda:
            self._exchange_bytes = max(0, outside_bytes(self.device) - outside)
        return ranks

    def open_model(self, ranks: Collective = SOLO) -> None:
        self.model = Model(self.model_config, self.weights, self.max_model_len, ranks)
        if self.is_cuda:
            self.weight_bytes += self.model.table_bytes

    def compare_kv(self, pool: AdapterPool) -> KVChange:
        """Compares the base with itself, with keys and values in the type of the cache. Counts the
        memory that libraries keep of it: steps, which are measured later, find it in use."""

        def held() -> int:
            if not self.is_cuda:
                return 0
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            return allocated_bytes(self.device) + outside_bytes(self.device)

        with explain_out_of_memory("comparing the types of KV", ("kv_cache_dtype", "the device")):
            before = held()
            change = measure_kv_rounding(self.model, pool, self.kv_dtype, self.max_model_len)
            self._library_bytes = max(0, held() - before)
            return change

    def allocate_kv(self, num_blocks: int) -> KVCache:
        return allocate_kv_cache(
            self.model_config, self.layout, num_blocks, self.kv_dtype, self.device
        )

    def make_steps(self, kv: KVCache, pool: AdapterPool, group: Group | None = None) -> Steps:
        if not self.uses_triton:
            return ReferenceSteps(self.model, kv, pool, group)
        has_mixed = self.config.mixed_graphs
        return DeviceSteps(
            self.model, kv, pool, self.limits, has_mixed_graphs=has_mixed, group=group
        )

    @torch.inference_mode()
    def capture(self, steps: Steps) -> None:
        """Captures the graphs of steps on a CUDA device, and loads the head's products."""
        if not isinstance(steps, DeviceSteps) or not self.is_cuda:
            return
        if not self.config.enforce_eager:
            with explain_out_of_memory(
                "capturing graphs", ("gpu_memory_utilization", "max_num_seqs", "enforce_eager")
            ):
                steps.capture()
        with explain_out_of_memory("computing logits", ("gpu_memory_utilization", "max_num_seqs")):
            steps.load_head_products()

    def measure(self, pool: AdapterPool, calls: frozenset[KernelCall]) -> DeviceUse:
        """Measures the memory of the largest steps, on a cache of a few blocks, and of the
        kernels' binaries."""
        assert self.empty is not None
        batch = largest_batch(self.limits)
        kv = self.allocate_kv(num_blocks(self.limits))
        steps = self.make_steps(kv, pool)
        with explain_out_of_memory(
            "trying the largest step", ("max_num_batched_tokens", "max_num_seqs")
        ):
            activations = self._exchange_bytes + self._library_bytes
            activations += peak_bytes(self.device, lambda: load_kernels(calls))
            activations += peak_bytes(self.device, lambda: run_step(steps, batch))
            if isinstance(steps, DeviceSteps):
                activations += steps.mask_bytes
            graphs = 0
            if isinstance(steps, DeviceSteps) and not self.config.enforce_eager:
                # One pool for both kinds, but memory that one kind frees need not fit the other.
                graphs = steps.graphs_overhead + sum(
                    peak_bytes(self.device, run)
                    for run in (steps.run_largest_graph, steps.run_largest_mixed)
                )
        return DeviceUse(
            *self.empty,
            self.weight_bytes,
            pool.reserved_bytes,
            activations,
            graphs,
        )


def run_step(steps: Steps, batch: ScheduledBatch) -> tuple[Sample, ...]:
    """Launches a step and waits for it."""
    step = steps.launch(batch)
    step.draw()
    return step.collect()
