"""The ranks of a tensor-parallel model as threads of this process, which exchange over gloo."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from engine.model import Model
from engine.model_config import lora_sites, read_model_config
from engine.parallel.shards import Shard
from engine.weights import WeightBuilder
from kernels.collective import Collective
from kernels.rendezvous import meet
from lora.adapter import Adapter, read_adapter
from lora.pool import AdapterPool
from tests.family_bases import CPU, Decoder

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Collective], T]) -> list[T]:
    """Returns the results of all ranks, in their order."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:
        store = Path(folder) / "store"

        def one(rank: int) -> T:
            torch.set_num_threads(1)
            return work(meet(store, rank, size, timeout_s=300.0))

        return list(threads.map(one, range(size)))


class RankDecoder(Decoder):
    """One rank's part of the decoder."""

    def __init__(self, base: Path, adapters: Many[Adapter], ranks: Collective) -> None:
        whole = read_model_config(base)
        shard = Shard(whole, ranks.rank, ranks.size)
        self.config = shard.config
        weights = WeightBuilder(shard, torch.float32, CPU).load(base)
        self.model = Model(self.config, weights, whole.usual_len, ranks)
        self.pool = AdapterPool(shard.sites(), 16 << 20, torch.float32, CPU, 64 << 20)
        for adapter in adapters:
            self.pool.add(shard.adapter(adapter))
            assert self.pool.acquire(adapter.digest)


def read_adapters(base: Path, folders: Many[Path]) -> list[Adapter]:
    """Reads whole adapters, each named as its folder."""
    config = read_model_config(base)
    weights = WeightBuilder(Shard(config), torch.float32, CPU).load(base).parameters.get
    return [read_adapter(one, one.name, lora_sites(config), 64, weights) for one in folders]


def logits_of_ranks(
    base: Path,
    folders: Many[Path],
    prompts: Many[tuple[Many[int], str | None]],
    size: int,
    chunk: int = 1000,
) -> list[torch.Tensor]:
    """Returns [length, V] for each prompt and its adapter, as `Decoder.logits`, after a check that
    all ranks have the same bits."""
    adapters = read_adapters(base, folders)
    found = on_ranks(size, lambda ranks: RankDecoder(base, adapters, ranks).logits(prompts, chunk))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    return found[0]
