"""Random adapters for our engine, made in memory: no files, one set of numbers for all of them.

The numbers are drawn once, at the largest rank, for each layer. An adapter takes the first rows of
them, and its layers are those of the set in turn, from its index on: adapters differ in what they
compute, none needs a draw of its own, and each has its own copy on the host and its own place in
the pool, so that a step reads as many bytes as with real ones.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from engine.model_config import ModelConfig, lora_sites
from engine.runner import ModelRunner
from lora.adapter import Adapter, ModuleWeights
from lora.page_image import PageLayout
from lora.pool import AdapterPool
from lora.sites import Site, targets_by_module
from tests.benchmarks.cases import INVOCATION, AdapterKind, AdapterSpec
from tests.benchmarks.shapes import is_target

SCALE = 2.0  # alpha = 2 r
# Of the affine rows (`lora.vectors`): DoRA's gains; zero gains and the offsets of biases.
NUM_AFFINE: dict[AdapterKind, int] = {"plain": 0, "dora": 1, "bias": 2, "alora": 0}


def layer_sites(config: ModelConfig) -> tuple[Site, ...]:
    return tuple(site for site in lora_sites(config) if not site.is_optional)


def pool_bytes(config: ModelConfig, num_pages: int, itemsize: int) -> int:
    """Returns the bytes of a pool that holds so many adapters of rank 16 on all linears."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    return num_pages * PageLayout(lora_sites(config), dtype).page_bytes


def tensor_bytes(config: ModelConfig, spec: AdapterSpec, itemsize: int) -> int:
    """Returns the bytes of the adapter's own tensors, A and B of each module that it adapts, and
    the vector of DoRA or of biases."""
    num_vectors = int(NUM_AFFINE[spec.kind] > 0)
    return itemsize * sum(
        spec.rank * (target.site.in_features + target.out_features)
        + num_vectors * target.out_features
        for module, target in targets_by_module(layer_sites(config)).items()
        if _is_adapted(module, spec)
    )


def _is_adapted(module: str, spec: AdapterSpec) -> bool:
    _, _, layer, below = module.split(".", 3)  # model.layers.3.self_attn.q_proj
    return is_target(below, spec.targets) and int(layer) % spec.every == 0


class AdapterNumbers:
    """The numbers of random adapters of one model, up to a rank."""

    def __init__(self, config: ModelConfig, max_rank: int, device: torch.device) -> None:
        """Draws on `device` (a CPU needs seconds for 8B) and keeps the result on the CPU."""
        self.max_rank = max_rank
        self._num_layers = config.num_layers
        generator = torch.Generator(device).manual_seed(max_rank)

        def draw(columns: int, scale: float) -> torch.Tensor:
            drawn = torch.randn(max_rank, columns, generator=generator, device=device)
            return (drawn * scale).cpu()

        def draw_vector(size: int) -> torch.Tensor:
            return (0.01 * torch.randn(size, generator=generator, device=device)).cpu()

        self._modules = {
            module: ModuleWeights(
                draw(target.site.in_features, 1 / math.sqrt(target.site.in_features)),
                draw(target.out_features, 0.01 * SCALE),
            )
            for module, target in targets_by_module(layer_sites(config)).items()
        }
        self._vectors = {
            module: draw_vector(numbers.lora_b.shape[1])
            for module, numbers in self._modules.items()
        }

    def adapter(self, spec: AdapterSpec) -> Adapter:
        modules: dict[str, ModuleWeights] = {}
        for module in self._modules:
            if not _is_adapted(module, spec):
                continue
            model, layers, layer, below = module.split(".", 3)
            source = (int(layer) + spec.index) % self._num_layers
            numbers = self._modules[f"{model}.{layers}.{source}.{below}"]
            a, b = numbers.a[: spec.rank], numbers.b[: spec.rank]
            affine = self._affine(f"{model}.{layers}.{source}.{below}", spec.kind)
            modules[module] = ModuleWeights(a, b, affine=affine)
        return Adapter(
            digest=spec.digest,
            rank=spec.rank,
            modules=modules,
            num_parameters=sum(_num_parameters(weights) for weights in modules.values()),
            is_noop=False,
            invocation=INVOCATION if spec.kind == "alora" else (),
        )

    def _affine(self, module: str, kind: AdapterKind) -> torch.Tensor | None:
        """Returns [1 or 2, out_features] float32, None for adapters without vectors."""
        vector = self._vectors[module]
        if kind == "dora":
            return vector[None]
        return torch.stack((torch.zeros_like(vector), vector)) if kind == "bias" else None


def _num_parameters(weights: ModuleWeights) -> int:
    vector = 0 if weights.affine is None else weights.affine.shape[1]
    return weights.lora_a.numel() + weights.lora_b.numel() + vector


class MemoryReader:
    """Stands where the reader of folders does: the digest itself describes the adapter."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._numbers: AdapterNumbers | None = None
        self._lock = threading.Lock()

    @property
    def pool(self) -> AdapterPool:
        return self._runner.adapters

    def prepare(self, max_rank: int) -> None:
        """Draws the numbers. Called before adapters of a rank are loaded, so that no load pays for
        the draw."""
        with self._lock:
            if self._numbers is None or self._numbers.max_rank < max_rank:
                runner = self._runner
                self._numbers = AdapterNumbers(runner.model_config, max_rank, runner.device)

    def tensor_bytes(self, digest: str) -> int:
        """Returns the bytes of an adapter's own tensors in the type of the pool."""
        runner = self._runner
        return tensor_bytes(runner.model_config, AdapterSpec.parse(digest), runner.dtype.itemsize)

    def read(self, digest: str, path: str) -> Callable[[], None]:
        spec = AdapterSpec.parse(digest)
        self.prepare(spec.rank)
        assert self._numbers is not None
        adapter = self._numbers.adapter(spec)
        pool = self.pool
        packed = pool.pack(adapter)

        def insert() -> None:
            pool.insert(packed)

        return insert
