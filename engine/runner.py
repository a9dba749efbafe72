"""The owner of the device: the base's weights, the KV tensors, the adapter pool, and the execution
of steps.

Loads the base at its start; then `launch` turns a ScheduledBatch into Samples, at once on the
reference backend, while the caller plans the next step on a CUDA device. One thread calls it and
inserts adapters between steps; only `read_adapter` is slow and may run in any thread. Scheduling
decisions are made elsewhere.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.block_copies import open_block_copies
from engine.checkpoint import base_reader
from engine.config import EngineConfig
from engine.device_memory import (
    EmptyDevice,
    adapter_budgets,
    allocated_bytes,
    check_asked_memory,
    explain_out_of_memory,
    is_out_of_memory,
    look_at_empty_device,
    peak_bytes,
)
from engine.device_step import DeviceSteps
from engine.host_memory import available_bytes
from engine.int4_forms import resolve_int4
from engine.kv_cache import KVCache, allocate_kv_cache, block_bytes, count_blocks, plan_kv
from engine.largest_step import (
    largest_batch,
    max_draws,
    max_step_tokens,
    num_blocks,
    step_limits,
)
from engine.memory_plan import DeviceUse, check_asked
from engine.model import Model
from engine.model_config import ModelConfig, lora_sites, read_model_config
from engine.parallel.adapters import GroupPool
from engine.parallel.channel import slot_size
from engine.parallel.group import Group
from engine.reference_step import ReferenceSteps
from engine.resolved import (
    resolve_backend,
    resolve_device,
    resolve_dtype,
    resolve_fp8,
    resolve_layout,
    resolve_max_len,
    resolve_shard,
)
from engine.types import LaunchedStep, Sample, ScheduledBatch
from engine.warm_up import PreparedKernels, prepare_kernels, run_warm_up
from engine.weights import Weights, load_shard
from kernels.collective import SOLO
from kernels.compilations import load_kernels, num_late_compilations, watch_compilations
from kernels.kernel_call import KernelCall
from kernels.lora_plan import MAX_RANK_PAGES, PAGE_ROWS
from lora.adapter import read_adapter
from lora.header import ReadBuffer
from lora.page_image import PackedAdapter
from lora.pool import AdapterPool
from lora.vectors import BaseParameter

logger = logging.getLogger(__name__)

_REFERENCE_DRAWS = 256  # of a step with drafts; logits of 152k tokens then need 156 MB


class ModelRunner:
    """Implements `types.Runner`."""

    def __init__(self, config: EngineConfig) -> None:
        started_s = time.perf_counter()
        if not 1 <= config.max_lora_rank <= MAX_RANK_PAGES * PAGE_ROWS:
            limit = MAX_RANK_PAGES * PAGE_ROWS
            raise ValueError(
                f"max_lora_rank is {config.max_lora_rank}, but must be between 1 and {limit}"
            )
        # Not torch's own default: Ray sets it to 1 in an actor that reserves no CPUs.
        num_cores = len(os.sched_getaffinity(0)) // max(1, config.tensor_parallel_size)
        self.num_threads = config.num_threads or max(1, num_cores)
        torch.set_num_threads(self.num_threads)
        self.device = resolve_device(config)
        uses_triton = resolve_backend(config, self.device)
        self.dtype = resolve_dtype(config, self.device)
        folder = Path(config.model_path)
        self.model_config: ModelConfig = read_model_config(folder)
        self.max_model_len = resolve_max_len(config, self.model_config)
        self.kv_layout = resolve_layout(self.model_config, config, self.max_model_len)
        is_cuda = self.device.type == "cuda"
        capability = (
            torch.cuda.get_device_capability(self.device) if is_cuda and uses_triton else None
        )
        self._is_fp8 = resolve_fp8(config, self.model_config, self.dtype, capability)
        self._int4 = resolve_int4(config, self.model_config, self.dtype, capability)
        self._max_lora_rank = config.max_lora_rank
        self._shard = resolve_shard(config, self.model_config, self.device, uses_triton=uses_triton)
        self._own_config = self._shard.config
        self._sites = self._shard.sites()
        self._whole_sites = lora_sites(self.model_config)  # those that adapters' files are for
        check_asked_memory(config, self.device)
        self.group = self._start_group(config)  # the other ranks; None: there are none
        try:
            self._open(config, folder, uses_triton)
        except BaseException:
            self.close()
            raise
        logger.info(
            "%s on %s in %s%s: %d KV blocks, %d adapter blocks, %.1f s",
            self.model_config.architecture,
            self.device if self.group is None else f"{self.group.size} ranks of {self.device}",
            self.dtype,
            ", linears in FP8" if self._is_fp8 else ", linears in 4 bits" if self._int4 else "",
            self.num_blocks,
            self.adapters.num_blocks,
            time.perf_counter() - started_s,
        )

    def _start_group(self, config: EngineConfig) -> Group | None:
        """Starts the other ranks, if there are any."""
        if self._shard.size == 1:
            return None
        num_tables = len(self.kv_layout.groups)
        limits = step_limits(config, self._own_config, self.max_model_len, num_tables)
        slot_ints = slot_size(max_step_tokens(config), limits)
        return Group(config, self._shard.size, slot_ints, self.num_threads)

    def _open(self, config: EngineConfig, folder: Path, uses_triton: bool) -> None:
        """Loads the base and makes the memory, on this rank and with the others."""
        is_cuda = self.device.type == "cuda"
        empty = look_at_empty_device(self.device) if is_cuda else None
        calls: frozenset[KernelCall] = frozenset()
        if empty is not None and uses_triton:
            self._weights, weight_bytes, calls = self._load_beside_kernels(config)
        else:
            self._weights, weight_bytes = self._load(config)
        # For the norms of DoRA's rows, which are computed while steps run.
        self._beside = torch.cuda.Stream(self.device) if is_cuda else None  # type: ignore[no-untyped-call]
        ranks = SOLO if self.group is None else self.group.meet()
        self._model = Model(self._own_config, self._weights, self.max_model_len, ranks)
        # The files have the whole of what a rank has a part of.
        self._base_parameter: BaseParameter = self._weights.parameters.get
        if self.group is not None:
            self._base_parameter = base_reader(folder, self.model_config)
        weight_bytes += self._model.table_bytes if empty is not None else 0
        self.adapters = self._make_pool(config, weight_bytes)
        self.num_blocks = (
            self._blocks_on_cpu(config)
            if empty is None
            else self._blocks_on_device(config, empty, weight_bytes, uses_triton, calls)
        )
        with explain_out_of_memory(
            "making the KV blocks", ("gpu_memory_utilization", "num_blocks")
        ):
            self._kv = self._allocate_kv(self.num_blocks)
        if self.group is not None:
            self.group.serve(self.num_blocks, self._pool_bytes)
        self.kv_copies = open_block_copies(config, self._kv, self.group)
        self._steps = self._make_steps(self._kv, config, uses_triton)
        if isinstance(self._steps, DeviceSteps) and empty and not config.enforce_eager:
            with explain_out_of_memory(
                "capturing graphs", ("gpu_memory_utilization", "max_num_seqs", "enforce_eager")
            ):
                self._capture(self._steps)
        if isinstance(self._steps, DeviceSteps) and empty:
            with explain_out_of_memory(
                "warming up", ("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs")
            ):
                self._warm_up(self._steps, config)
            watch_compilations()
        self.runs_ahead = self._steps.runs_ahead
        # The reference backend has no buffers of a fixed size, but logits for each draw.
        self.max_draws = max_draws(config)
        if not uses_triton:
            self.max_draws = max(self.max_draws, min(max_step_tokens(config), _REFERENCE_DRAWS))

    def close(self) -> None:
        """Ends the other ranks."""
        if self.group is not None:
            self.group.close()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        return self._steps.launch(batch)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> tuple[Sample, ...]:
        """Launches a step and waits for it."""
        return _run(self._steps, batch) if batch.sequences else ()

    @property
    def num_late_compilations(self) -> int:
        """The kernels that were compiled, or read from disk, after the engine was ready."""
        return num_late_compilations()

    def is_out_of_memory(self, error: Exception) -> bool:
        return is_out_of_memory(error)

    def free_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def read_adapter(
        self, digest: str, path: Path, buffer: ReadBuffer | None = None
    ) -> PackedAdapter:
        """Reads, checks and packs an adapter for the device, in any thread, through the buffer.
        Raises AdapterError."""
        with torch.cuda.stream(self._beside):
            adapter = read_adapter(
                path, digest, self._whole_sites, self._max_lora_rank, self._base_parameter, buffer
            )
        return self.adapters.pack(adapter)

    def insert_adapter(self, adapter: PackedAdapter) -> tuple[str, ...]:
        """Inserts an adapter between steps. Returns the digests dropped from the host tier to make
        room."""
        return self.adapters.insert(adapter)

    def load_adapter(self, digest: str, path: Path) -> tuple[str, ...]:
        return self.insert_adapter(self.read_adapter(digest, path))

    def unload_adapter(self, digest: str) -> bool:
        """Removes an adapter between steps. Returns False if it is still in use: it leaves with the
        last reference."""
        return self.adapters.remove(digest)

    def _load_beside_kernels(
        self, config: EngineConfig
    ) -> tuple[Weights, int, frozenset[KernelCall]]:
        """Loads the weights while a thread lists the kernels and compiles those that are missing.
        Returns the weights, their bytes on the device, and the kernels."""
        has_failed = threading.Event()
        with ThreadPoolExecutor(1, "kernels") as thread:
            kernels = thread.submit(self._prepare_kernels, config, has_failed)
            try:
                return *self._load(config), kernels.result().calls
            except BaseException:
                has_failed.set()  # otherwise the error would wait for all kernels
                raise

    def _load(self, config: EngineConfig) -> tuple[Weights, int]:
        """Returns the weights, and their bytes on a CUDA device."""
        is_cuda = self.device.type == "cuda"
        held = allocated_bytes(self.device) if is_cuda else 0
        with explain_out_of_memory("loading the weights", ("dtype", "quantization", "the device")):
            weights = load_shard(
                config, self._shard, self.dtype, self.device, is_fp8=self._is_fp8, int4=self._int4
            )
        return weights, allocated_bytes(self.device) - held if is_cuda else 0

    def _prepare_kernels(self, config: EngineConfig, stop: threading.Event) -> PreparedKernels:
        return prepare_kernels(
            config,
            self.model_config,
            self.dtype,
            self.max_model_len,
            torch.cuda.get_device_capability(self.device),
            (self._int4,),
            stop,
        )

    def _make_pool(self, config: EngineConfig, weight_bytes: int) -> AdapterPool:
        budgets = adapter_budgets(config, self._sites, self.dtype, self.device, weight_bytes)
        self._pool_bytes = budgets.pool_bytes
        max_list = -(-self._max_lora_rank // PAGE_ROWS)
        if self.group is not None:
            return GroupPool(
                self.group,
                self._shard,
                budgets.pool_bytes,
                self.dtype,
                budgets.host_bytes,
                max_list,
                has_affine=config.affine_adapters,
            )
        with explain_out_of_memory("making the adapter pool", ("adapter_pool_bytes",)):
            return AdapterPool(
                self._sites,
                budgets.pool_bytes,
                self.dtype,
                self.device,
                budgets.host_bytes,
                max_list=max_list,
                has_affine=config.affine_adapters,
            )

    @torch.inference_mode()
    def _capture(self, steps: DeviceSteps) -> None:
        steps.capture()

    def _warm_up(self, steps: DeviceSteps, config: EngineConfig) -> None:
        num_tables = len(self.kv_layout.groups)
        limits = step_limits(config, self._own_config, self.max_model_len, num_tables)
        run_warm_up(steps, config, limits, self.num_blocks, self.adapters, self._sites)

    def _allocate_kv(self, num_blocks: int) -> KVCache:
        return allocate_kv_cache(
            self._own_config, self.kv_layout, num_blocks, self.dtype, self.device
        )

    @torch.inference_mode()
    def _blocks_on_cpu(self, config: EngineConfig) -> int:
        num_blocks = count_blocks(
            self._own_config, self.kv_layout, config, self.max_model_len, self.dtype
        )
        if config.num_blocks is not None or config.kv_cache_bytes is not None:
            size = self._shard.size * block_bytes(self._own_config, self.kv_layout, self.dtype)
            kv = "the KV cache (num_blocks or kv_cache_bytes)"
            machine = "this machine, apart from other processes,"
            check_asked({kv: num_blocks * size}, available_bytes(), machine)
        return num_blocks

    def _blocks_on_device(
        self,
        config: EngineConfig,
        empty: EmptyDevice,
        weight_bytes: int,
        uses_triton: bool,
        calls: frozenset[KernelCall],
    ) -> int:
        use = self._measure(config, empty, weight_bytes, uses_triton, calls)
        layout, length = self.kv_layout, self.max_model_len
        plan = plan_kv(self._own_config, layout, config, length, self.dtype, use)
        logger.info("device memory\n%s", plan.table())
        return plan.num_blocks

    def _measure(
        self,
        config: EngineConfig,
        empty: EmptyDevice,
        weights: int,
        uses_triton: bool,
        calls: frozenset[KernelCall],
    ) -> DeviceUse:
        """Measures the memory of the largest steps, on a cache of a few blocks, and of the
        kernels' binaries."""
        max_tokens, max_len = max_step_tokens(config), self.max_model_len
        batch = largest_batch(max_tokens, config.max_num_seqs, max_len, config.block_size)
        kv = self._allocate_kv(num_blocks(max_tokens, max_len, config.block_size))
        steps = self._make_steps(kv, config, uses_triton)
        with explain_out_of_memory(
            "trying the largest step", ("max_num_batched_tokens", "max_num_seqs")
        ):
            activations = peak_bytes(self.device, lambda: load_kernels(calls))
            activations += peak_bytes(self.device, lambda: _run(steps, batch))
            if isinstance(steps, DeviceSteps):
                activations += steps.mask_bytes
            graphs = 0
            if isinstance(steps, DeviceSteps) and not config.enforce_eager:
                # One pool for both kinds, but memory that one kind frees need not fit the other.
                graphs = steps.graphs_overhead + sum(
                    peak_bytes(self.device, run)
                    for run in (steps.run_largest_graph, steps.run_largest_pieces)
                )
        return DeviceUse(
            empty.total,
            empty.used_by_others,
            weights,
            self.adapters.reserved_bytes,
            activations,
            graphs,
        )

    def _make_steps(
        self, kv: KVCache, config: EngineConfig, uses_triton: bool
    ) -> DeviceSteps | ReferenceSteps:
        model = self._own_config
        if not uses_triton:
            return ReferenceSteps(self._model, kv, self.adapters, model.eos_token_ids, self.group)
        return DeviceSteps(
            self._model,
            kv,
            self.adapters,
            step_limits(config, model, self.max_model_len, len(self.kv_layout.groups)),
            max_step_tokens(config),
            model.eos_token_ids,
            has_pieces=config.piecewise_graphs,
        )


def _run(steps: DeviceSteps | ReferenceSteps, batch: ScheduledBatch) -> tuple[Sample, ...]:
    step = steps.launch(batch)
    step.draw()
    return step.collect()
