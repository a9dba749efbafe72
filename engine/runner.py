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
from contextlib import nullcontext
from pathlib import Path

import torch

from engine.block_copies import open_block_copies
from engine.checkpoint import base_reader
from engine.checks.kv_rounding import check_kv_rounding
from engine.config import EngineConfig
from engine.device_memory import (
    adapter_budgets,
    check_asked_memory,
    explain_out_of_memory,
    is_out_of_memory,
)
from engine.device_step import DeviceSteps
from engine.host_memory import available_bytes
from engine.kv_cache import block_bytes, count_blocks, plan_kv
from engine.memory_plan import check_asked
from engine.model_config import ModelConfig, lora_sites
from engine.parallel.adapters import GroupPool
from engine.parallel.channel import slot_size
from engine.parallel.group import Group
from engine.rank import Rank, run_step
from engine.types import LaunchedStep, Sample, ScheduledBatch
from engine.warm_up import run_warm_up
from kernels.collective import SOLO
from kernels.compilations import num_late_compilations, watch_compilations
from kernels.kernel_call import KernelCall
from kernels.lora_plan import MAX_RANK_PAGES, PAGE_ROWS
from lora.file_packer import FilePacker
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
        self._rank = rank = Rank(config)
        self._shard = rank.shard
        self.device, self.dtype = rank.device, rank.dtype
        self.model_config: ModelConfig = rank.shard.whole
        self.max_model_len, self.kv_layout = rank.max_model_len, rank.layout
        self._max_lora_rank = config.max_lora_rank
        self._sites = self._shard.sites()
        self._whole_sites = lora_sites(self.model_config)  # the sites of adapters' files
        check_asked_memory(config, self.device)
        self.group: Group | None = None  # the other ranks
        if rank.shard.size > 1:
            slot_ints = slot_size(rank.limits)
            self.group = Group(config, slot_ints, self.num_threads, is_cuda=rank.is_cuda)
        try:
            self._open(config)
        except BaseException:
            self.close()
            raise
        logger.info(
            "%s on %s in %s%s%s%s: %d KV blocks, %d adapter blocks, %.1f s",
            self.model_config.architecture,
            self.device if self.group is None else f"{self.group.size} ranks, {self.device} first,",
            self.dtype,
            ", linears in FP8" if rank.is_fp8 else ", linears in 4 bits" if rank.int4 else "",
            "" if config.kv_cache_dtype == "auto" else ", KV in FP8",
            "" if config.lora_dtype == "auto" else ", adapters in int8",
            self.num_blocks,
            self.adapters.num_blocks,
            time.perf_counter() - started_s,
        )

    def _open(self, config: EngineConfig) -> None:
        """Loads the base and makes the memory, on this rank and with the others."""
        rank = self._rank
        calls = self._load()
        # For work on adapters that are read while steps run: their packing, the norms of DoRA.
        self._beside = torch.cuda.Stream(self.device) if rank.is_cuda else None  # type: ignore[no-untyped-call]
        rank.open_model(SOLO if self.group is None else self.group.meet(rank.meet))
        # The files have the whole tensors, of which a rank has parts.
        self._base_parameter: BaseParameter = rank.weights.parameters.get
        if self.group is not None:
            self._base_parameter = base_reader(rank.folder, self.model_config)
        self.adapters = self._make_pool(config)
        self._packer = FilePacker(
            self.adapters,
            self._whole_sites,
            config.max_lora_rank,
            self._base_parameter,
            has_plans=rank.is_cuda and rank.uses_triton and self.group is None,
        )
        if self.group is not None:
            self.group.send({"pool_bytes": self._pool_bytes})
        self._check_kv_rounding(config)
        self.num_blocks = (
            self._blocks_on_device(config, calls) if rank.is_cuda else self._blocks_on_cpu(config)
        )
        if self.group is not None:
            self.group.send({"num_blocks": self.num_blocks})
        with explain_out_of_memory(
            "making the KV blocks", ("gpu_memory_utilization", "num_blocks")
        ):
            self._kv = rank.allocate_kv(self.num_blocks)
        self._steps = rank.make_steps(self._kv, self.adapters, self.group)
        rank.capture(self._steps)
        self.kv_copies = open_block_copies(config, self._kv, self.group)
        if self.group is not None:
            self.group.serve()
        if isinstance(self._steps, DeviceSteps) and rank.is_cuda:
            with explain_out_of_memory(
                "warming up", ("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs")
            ):
                sites = self._whole_sites  # a pool of several ranks cuts adapters itself
                run_warm_up(self._steps, rank.limits, self.num_blocks, self.adapters, sites)
            watch_compilations()
        self.runs_ahead = self._steps.runs_ahead
        self.graph_sizes = self._steps.graph_sizes
        # The reference backend has no buffers of a fixed size, but logits for each draw.
        self.max_draws = rank.limits.max_draws
        if not rank.uses_triton:
            most = min(rank.limits.max_tokens, _REFERENCE_DRAWS)
            self.max_draws = max(self.max_draws, most)

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
        return run_step(self._steps, batch) if batch.sequences else ()

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
            return self._packer.pack(digest, path, buffer or ReadBuffer())

    def make_read_buffer(self) -> ReadBuffer:
        """Returns a buffer for `read_adapter`."""
        return self._packer.make_buffer()

    def load_adapter(self, digest: str, path: Path) -> tuple[str, ...]:
        """Reads and inserts an adapter between steps. Returns the digests dropped from the host
        tier to make room."""
        return self.adapters.insert(self.read_adapter(digest, path))

    def _load(self) -> frozenset[KernelCall]:
        """Loads the weights; for a CUDA device, while a thread lists the kernels and compiles those
        that are missing. Returns the kernels."""
        rank = self._rank
        if not (rank.is_cuda and rank.uses_triton):
            rank.load()
            return frozenset()
        has_failed = threading.Event()
        with ThreadPoolExecutor(1, "kernels") as thread:
            kernels = thread.submit(rank.prepare_kernels, has_failed)
            try:
                rank.load()
                return kernels.result()
            except BaseException:
                has_failed.set()  # otherwise the error would wait for all kernels
                raise

    def _make_pool(self, config: EngineConfig) -> AdapterPool:
        self._pool_bytes, host_bytes = adapter_budgets(
            config, self._sites, self.dtype, self.device, self._rank.weight_bytes
        )
        max_list = -(-self._max_lora_rank // PAGE_ROWS)
        with explain_out_of_memory("making the adapter pool", ("adapter_pool_bytes",)):
            if self.group is not None:
                return GroupPool(
                    self.group,
                    self._shard,
                    self._pool_bytes,
                    self.dtype,
                    self.device,
                    host_bytes,
                    max_list,
                    has_affine=config.affine_adapters,
                    is_int8=config.lora_dtype == "int8",
                )
            return AdapterPool(
                self._sites,
                self._pool_bytes,
                self.dtype,
                self.device,
                host_bytes,
                max_list=max_list,
                has_affine=config.affine_adapters,
                is_int8=config.lora_dtype == "int8",
            )

    def _check_kv_rounding(self, config: EngineConfig) -> None:
        if config.kv_cache_dtype == "auto":
            return
        what, group = "compare the types of KV", self.group
        with group.start_together({"do": "compare"}, what) if group is not None else nullcontext():
            change = self._rank.compare_kv(self.adapters)
        check_kv_rounding(change, self.dtype)

    @torch.inference_mode()
    def _blocks_on_cpu(self, config: EngineConfig) -> int:
        model, kv_dtype = self._rank.model_config, self._rank.kv_dtype
        num_blocks = count_blocks(model, self.kv_layout, config, self.max_model_len, kv_dtype)
        if config.num_blocks is not None or config.kv_cache_bytes is not None:
            size = self._shard.size * block_bytes(model, self.kv_layout, kv_dtype)
            kv = "the KV cache (num_blocks or kv_cache_bytes)"
            machine = "this machine, apart from other processes,"
            check_asked({kv: num_blocks * size}, available_bytes(), machine)
        return num_blocks

    def _blocks_on_device(self, config: EngineConfig, calls: frozenset[KernelCall]) -> int:
        """Returns the blocks for which every rank has room."""
        uses = [self._rank.measure(self.adapters, calls)]
        if self.group is not None:
            uses += self.group.receive_uses()
        model, length, kv_dtype = self._rank.model_config, self.max_model_len, self._rank.kv_dtype
        plans = [plan_kv(model, self.kv_layout, config, length, kv_dtype, use) for use in uses]
        plan = min(plans, key=lambda one: one.num_blocks)
        logger.info("device memory of rank %d\n%s", plans.index(plan), plan.table())
        return plan.num_blocks
