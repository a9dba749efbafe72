"""Random adapters for our engine, made in memory: no files, one set of numbers for a rank.

All adapters of a rank share their numbers but not their place: each has pages of its own in the
pool and a copy of its own in the host tier, so a step reads as many bytes as with real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.model_config import ModelConfig, lora_sites
from engine.runner import ModelRunner
from lora.adapter import Adapter, ModuleWeights
from lora.sites import Site, targets_by_module
from tests.benchmarks.cases import PAGE_RANK

SCALE = 2.0  # alpha = 2 r


def layer_sites(config: ModelConfig) -> tuple[Site, ...]:
    return tuple(site for site in lora_sites(config) if not site.is_optional)


def pool_bytes(config: ModelConfig, num_pages: int, itemsize: int) -> int:
    """What a pool of so many pages is given, its optional sites counted as the pool counts them."""
    row = sum(site.num_row_elements for site in lora_sites(config))
    return num_pages * PAGE_RANK * row * itemsize


def random_adapter(config: ModelConfig, rank: int, seed: int, device: torch.device) -> Adapter:
    """All linears. Drawn on `device` (a CPU needs seconds for 8B), kept on the CPU."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(rows: int, columns: int, scale: float) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return (drawn * scale).cpu()

    modules = {
        module: ModuleWeights(
            draw(rank, target.site.in_features, 1 / math.sqrt(target.site.in_features)),
            draw(rank, target.out_features, 0.01 * SCALE),
        )
        for module, target in targets_by_module(layer_sites(config)).items()
    }
    return Adapter(
        digest="",
        rank=rank,
        modules=modules,
        num_parameters=sum(w.a.numel() + w.b.numel() for w in modules.values()),
        is_noop=False,
    )


class MemoryReader:
    """Stands where the reader of folders does: the digest is the name, the path says the rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._numbers: dict[int, Adapter] = {}

    @property
    def num_pages(self) -> int:
        return self._runner.adapters.num_pages

    def prepare(self, rank: int) -> None:
        """Before adapters of this rank are loaded: two readers would draw it twice."""
        if rank not in self._numbers:
            config, device = self._runner.model_config, self._runner.device
            self._numbers[rank] = random_adapter(config, rank, rank, device)

    def read(self, digest: str, path: str) -> Callable[[], None]:
        pool = self._runner.adapters
        packed = pool.pack(replace(self._numbers[int(path)], digest=digest))

        def insert() -> None:
            pool.insert(packed)

        return insert
