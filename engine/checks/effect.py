"""Proof that an adapter changes its base, and the cost of loading it.

Reads the folder as the engine does, measures the delta of every module from A and B alone, loads
the adapter into a pool of its own and, if the caller gives prompts, runs the base with and without
it (`engine.checks.probe`). Free of the registry and of text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from engine.checks.effect_report import (
    EffectReport,
    LoadCost,
    LogitChange,
    ModuleNorm,
    ProbePlan,
    judge,
)
from engine.checks.probe import Probe, base_norms, scratch_bytes
from engine.checks.prompts import Prompts, complete_prompts, cut_prompts, prompt_limit
from engine.checks.validation import read_checked
from engine.errors import EngineMemoryError, UnsupportedModelError
from engine.host_memory import available_bytes, peak_of
from engine.model import Model
from engine.model_config import ModelConfig, lora_sites, read_model_config
from engine.parallel.shards import Shard
from engine.weight_shapes import expected_shapes
from engine.weights import WeightBuilder
from kernels.backend import reference_only
from lora.adapter import Adapter, TensorMatch, match_tensors
from lora.errors import AdapterError
from lora.page_image import PageLayout
from lora.pool import AdapterPool
from lora.sites import Site, targets_by_module

Device = Literal["auto", "cpu", "cuda"]


def plan_probe(base_folder: Path, device: Device = "auto") -> ProbePlan:
    """Chooses the device of the probe. `auto`: a CUDA device with room for the base, otherwise the
    CPU. The types are the defaults of serving: a change that vanishes in bfloat16 there has no
    effect."""
    config = read_model_config(base_folder)
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UnsupportedModelError("device is cuda: torch finds no CUDA device")
    if device != "cpu" and has_cuda:
        plan = _plan(config, "cuda", torch.bfloat16, torch.cuda.mem_get_info()[0])
        if plan.fits or device == "cuda":
            return plan
    return _plan(config, "cpu", torch.float32, available_bytes())


def examine(
    folder: Path,
    digest: str,
    base_folder: Path,
    plan: ProbePlan,
    prompts: Prompts | None,
    why_unprobed: str = "",
) -> EffectReport:
    """Returns the report of an adapter. With `prompts` None the base is not run, and the verdict
    gives the reason. An adapter that the engine refuses is a verdict too; a base that it refuses is
    an UnsupportedModelError."""
    started_s = time.perf_counter()
    config = read_model_config(base_folder)
    sites = lora_sites(config)
    match = TensorMatch(0, ())
    try:
        match = match_tensors(folder, sites)
        with reference_only():
            adapter, pool, cost = _load(folder, digest, base_folder, config, sites, plan)
            logits, weights = (
                (None, {})
                if prompts is None
                else _probe(config, base_folder, pool, plan, adapter, prompts)
            )
    except AdapterError as error:
        return EffectReport(
            verdict="refused",
            reason=str(error),
            num_matched=match.num_matched,
            unmatched=match.unmatched,
            num_targets=len(targets_by_module(sites)),
            seconds=time.perf_counter() - started_s,
        )
    norms = _norms(adapter, sites, weights)
    verdict, reason = judge(norms, logits, why_unprobed)
    return EffectReport(
        verdict=verdict,
        reason=reason,
        num_matched=match.num_matched,
        unmatched=match.unmatched,
        num_targets=len(targets_by_module(sites)),
        norms=norms,
        logits=logits,
        load=cost,
        probe=None if logits is None else plan,
        seconds=time.perf_counter() - started_s,
        kind=adapter.kind,
        invocation=adapter.invocation,
    )


def _load(
    folder: Path,
    digest: str,
    base_folder: Path,
    config: ModelConfig,
    sites: Sequence[Site],
    plan: ProbePlan,
) -> tuple[Adapter, AdapterPool, LoadCost]:
    dtype: torch.dtype = getattr(torch, plan.dtype)
    device = torch.device(plan.device)
    layout = PageLayout(sites, dtype)

    def read() -> tuple[Adapter, AdapterPool, float]:
        start_s = time.perf_counter()
        adapter = read_checked(folder, digest, base_folder, config)
        read_s = time.perf_counter() - start_s
        # As large as this adapter; made here, so that its allocation is not timed.
        size = layout.num_bytes(adapter)
        pool = AdapterPool(sites, size, dtype, device, 2 * size)
        start_s = time.perf_counter()
        pool.insert(pool.pack(adapter))
        return adapter, pool, read_s + time.perf_counter() - start_s

    (adapter, pool, read_s), peak = peak_of(read)
    start_s = time.perf_counter()
    while not pool.acquire(digest):
        pool.wait_pending()
    cost = LoadCost(
        device=plan.device,
        dtype=plan.dtype,
        num_pages=len(pool.pages(digest)),
        device_bytes=pool.device_bytes_used,
        host_bytes=pool.host_bytes_used,
        read_s=read_s,
        copy_s=time.perf_counter() - start_s,
        peak_host_bytes=peak,
    )
    return adapter, pool, cost


def _probe(
    config: ModelConfig,
    base_folder: Path,
    pool: AdapterPool,
    plan: ProbePlan,
    adapter: Adapter,
    prompts: Prompts,
) -> tuple[LogitChange, dict[str, float]]:
    if not plan.fits:
        raise EngineMemoryError(f"the base cannot be run here: {plan.words()}")
    whole = complete_prompts(cut_prompts(prompts, config), adapter, prompt_limit(config))
    weights = WeightBuilder(Shard(config), pool.dtype, pool.device).load(base_folder)
    probe = Probe(Model(config, weights, config.usual_len), pool)
    logits = probe.compare(adapter.digest, whole, adapter.invocation)
    return logits, base_norms(weights, lora_sites(config))


def _norms(
    adapter: Adapter, sites: Sequence[Site], weights: dict[str, float]
) -> tuple[ModuleNorm, ...]:
    return tuple(
        ModuleNorm(
            module=module,
            site=target.site.name,
            rank=adapter.modules[module].rank,
            delta=adapter.modules[module].delta_norm(),
            base=weights.get(module),
        )
        for module, target in targets_by_module(sites).items()
        if module in adapter.modules
    )


def _plan(
    config: ModelConfig, device: Literal["cpu", "cuda"], dtype: torch.dtype, available: int
) -> ProbePlan:
    num_parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return ProbePlan(
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        needed_bytes=num_parameters * dtype.itemsize + scratch_bytes(config),
        available_bytes=available,
    )
