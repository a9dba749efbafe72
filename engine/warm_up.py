"""Everything that traffic needs for the first time, done before the engine is ready.

Kernels are compiled in parallel processes while the weights are loaded, or read from the cache of
an earlier start, and loaded onto the device. Then steps of all kinds run once: cuBLAS chooses and
loads its kernels, torch loads its own, the allocators fill, an adapter takes the way from the host
to the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from engine.config import EngineConfig
from engine.device_step import DeviceSteps
from engine.errors import EngineError, UnsupportedModelError
from engine.host_memory import available_bytes
from engine.int4_forms import Int4Forms, possible_forms
from engine.kernel_trace import trace_kernels
from engine.model_config import ModelConfig, read_model_config
from engine.resolved import resolve_dtype, resolve_fp8, resolve_max_len, resolve_shard
from engine.step_inputs import StepLimits
from engine.types import SamplingParams, ScheduledBatch
from engine.warm_batches import (
    GREEDY,
    BatchShape,
    Owners,
    batch_shapes,
    make_batch,
    mixes,
    with_fitting,
    zero_adapters,
)
from kernels.backend import IS_INTERPRETED, Capability
from kernels.kernel_call import KernelCall
from lora.adapter import Adapter
from lora.errors import AdapterTooLargeError, HostMemoryError
from lora.pool import AdapterPool
from lora.sites import Site

logger = logging.getLogger(__name__)

_SAMPLED = (
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, max_tokens=2, logprobs=5),
    SamplingParams(temperature=1.0, repetition_penalty=1.1, presence_penalty=0.5, max_tokens=2),
    SamplingParams(
        temperature=1.0, logit_bias=((0, 1.0),), min_tokens=64, stop_token_ids=(1,), max_tokens=65
    ),
)
_WITH_PROMPT = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=2)
# Up to here steps of every power of two, beyond also between two: cuBLAS has other kernels there.
_DENSE = 512


@dataclass(frozen=True, slots=True)
class PreparedKernels:
    calls: frozenset[KernelCall]
    num_compiled: int
    failures: tuple[str, ...]
    cache: Path


def prepare_kernels(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    capability: Capability,
    int4: Sequence[Int4Forms],
    stop: threading.Event | None = None,
) -> PreparedKernels:
    """Lists the engine's kernels and compiles those that the cache lacks, for the device of
    Triton's active driver, whose capability this is. `int4`: the matrices that stay in 4 bits, in
    one or several possible forms. After `stop` is set, it ends soon."""
    from kernels.kernel_cache import use_cache
    from kernels.kernel_compiler import compile_all, missing_calls, num_processes_for

    cache = use_cache(config.kernel_cache_dir)
    began_s = time.perf_counter()
    calls = frozenset[KernelCall]().union(
        *(trace_kernels(config, model, dtype, max_model_len, capability, one) for one in int4)
    )
    missing = missing_calls(calls)
    listed_s = time.perf_counter()
    failures: tuple[str, ...] = ()
    if missing:
        with tqdm(total=len(missing), desc="compiling kernels", unit="kernel") as bar:
            count = num_processes_for(available_bytes())
            failed = compile_all(missing, capability, cache, bar.update, count, stop)
        failures = tuple(f"{one.call.module}.{one.call.name}: {one.reason}" for one in failed)
    for failure in failures:
        logger.warning("a kernel is compiled at its first launch: %s", failure)
    logger.info(
        "%d kernels listed and looked up in %.1f s, %d of them compiled in %.1f s, cache %s",
        len(calls),
        listed_s - began_s,
        len(missing) - len(failures),
        time.perf_counter() - listed_s,
        cache,
    )
    return PreparedKernels(calls, len(missing) - len(failures), failures, cache)


def check_kernel_cache(config: EngineConfig) -> None:
    """Raises EngineError if the folder of the engine's compiled kernels cannot be written."""
    from kernels.kernel_cache import check_writable, use_cache

    folder = use_cache(config.kernel_cache_dir)
    try:
        check_writable(folder)
    except OSError as error:
        raise EngineError(
            f"the kernel cache {folder} cannot be written: {error.strerror}; set "
            "engine.kernel_cache_dir or TRITON_CACHE_DIR to another folder"
        ) from error


def warm_cache(config: EngineConfig, capability: Capability | None) -> PreparedKernels:
    """Fills the cache of an engine on a CUDA device of this capability; None: the device of this
    machine. Raises EngineError if the engine would not start with this configuration."""
    if IS_INTERPRETED:
        raise UnsupportedModelError("TRITON_INTERPRET is set: the interpreter compiles nothing")
    from kernels.kernel_compiler import targeted

    model = read_model_config(Path(config.model_path))
    dtype = resolve_dtype(config, torch.device("cuda"))
    capability = capability or torch.cuda.get_device_capability()
    resolve_fp8(config, resolve_shard(config, model).config, dtype, capability)
    int4 = possible_forms(config, model, dtype, capability)  # the weights are not needed
    length = resolve_max_len(config, model)
    with targeted(capability):
        return prepare_kernels(config, model, dtype, length, capability, int4)


def run_warm_up(
    steps: DeviceSteps,
    limits: StepLimits,
    num_blocks: int,
    pool: AdapterPool,
    sites: tuple[Site, ...],
) -> None:
    """Runs steps of all kinds, then leaves no trace but the memory of libraries and allocators."""
    began_s = time.perf_counter()
    digests = insert_those_that_fit(
        pool, zero_adapters(sites, limits, has_affine=pool.serves_affine)
    )
    num_steps = 0
    steps.mask_once()
    try:
        for owners, sizes in _mixes(pool, digests, _sizes(limits.max_tokens)):
            for batch in _batches(sizes, limits, num_blocks, owners):
                # Adapters move outside of it: buffers made in inference mode cannot be reused.
                with torch.inference_mode():
                    step = steps.launch(batch)
                    step.draw()
                    step.collect()
                num_steps += 1
    finally:
        for digest in digests:
            pool.remove(digest)
    logger.info("%d steps to warm up in %.1f s", num_steps, time.perf_counter() - began_s)


def insert_those_that_fit(pool: AdapterPool, adapters: Iterable[Adapter]) -> list[str]:
    """Returns the digests of the adapters that the pool has afterwards. A small host tier drops one
    for the next."""
    digests = []
    for adapter in adapters:
        with suppress(AdapterTooLargeError, HostMemoryError):
            pool.insert(pool.pack(adapter))
            digests.append(adapter.digest)
    return [digest for digest in digests if pool.has(digest)]


def _mixes(
    pool: AdapterPool, adapters: list[str], sizes: tuple[int, ...]
) -> Iterator[tuple[Owners, tuple[int, ...]]]:
    """Yields no adapter, then the one of a page, then all of them that fit together, acquired
    while the caller uses them; and the sizes of their steps. Libraries choose by the size alone, so
    that only one mix takes all of them: the first, which has no adapter, takes the least time."""
    few = tuple(sorted({sizes[0], sizes[-1]}))
    wanted = dict.fromkeys((*mixes(adapters)[:2], *mixes(adapters)[-1:]))
    for number, owners in enumerate(with_fitting(pool, wanted)):
        yield owners, few if number else sizes


def _batches(
    sizes: tuple[int, ...], limits: StepLimits, num_blocks: int, owners: Owners
) -> Iterator[ScheduledBatch]:
    for num_tokens in sizes:
        for shape in batch_shapes(num_tokens, limits):
            yield make_batch(shape, owners, limits, num_blocks, GREEDY)
    several = min(8, limits.max_seqs)
    for params in _SAMPLED:
        for count in sorted({1, several}):
            yield make_batch(BatchShape(count, ()), owners, limits, num_blocks, params)
    prompt = min(64, limits.max_model_len, sizes[-1])
    if prompt > 1:
        yield make_batch(BatchShape(0, (prompt,)), owners, limits, num_blocks, _WITH_PROMPT)


def _sizes(max_tokens: int) -> tuple[int, ...]:
    powers = [1 << i for i in range(32) if 1 << i < max_tokens]
    between = [size * 3 // 2 for size in powers if size >= _DENSE]
    return tuple(sorted({size for size in (*powers, *between) if size < max_tokens} | {max_tokens}))
