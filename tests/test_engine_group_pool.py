"""The adapters of two ranks whose copies run beside the steps, as on CUDA devices: what each copy
waits for, and what waits for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from engine.model_config import lora_sites, parse_model_config
from engine.parallel import adapters
from engine.parallel.adapters import FollowerPool, GroupPool
from engine.parallel.shards import Shard
from lora.adapter import Adapter, ModuleWeights
from lora.page_image import PageLayout
from lora.sites import targets_by_module
from tests.lora_helpers import HandCopier

_CPU = torch.device("cpu")
_MODEL = parse_model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    },
    {},
)


class DirectGroup:
    """Does at once in the other rank's pool what is sent, as its process would."""

    def __init__(self) -> None:
        self.num_launches = 0
        self.sent: list[dict[str, Any]] = []
        self.pool: FollowerPool | None = None

    def send(self, message: Mapping[str, Any], file: int | None = None) -> None:
        self.sent.append(dict(message))
        pool = self.pool
        assert pool is not None
        match message:
            case {"do": "keep"}:
                assert file is not None
                shape, num_bytes = message["shape"], message["num_bytes"]
                own = os.dup(file)
                shard = Shard(_MODEL, 1, 2)
                pool.keep(shard, message["digest"], num_bytes, shape, message["num_blocks"], own)
            case {"do": "write"}:
                pool.write(message["digest"], message["blocks"], message["after"])
            case {"do": "land"}:
                pool.land(message["digest"])
            case {"do": "drop"}:
                pool.drop(message["digest"])

    def launch(self) -> None:
        self.num_launches += 1
        assert self.pool is not None
        self.pool.note_launch()


def _adapter(digest: str) -> Adapter:
    generator = torch.Generator().manual_seed(len(digest))
    sites = [site for site in lora_sites(_MODEL) if not site.is_optional]
    modules = {
        module: ModuleWeights(
            torch.randn(4, target.site.in_features, generator=generator),
            torch.randn(4, target.out_features, generator=generator),
        )
        for module, target in targets_by_module(sites).items()
    }
    return Adapter(digest, 4, modules, 0, is_noop=False)


def test_a_copy_waits_for_the_launches_that_read_what_it_overwrites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, own, other = DirectGroup(), HandCopier(), HandCopier()
    monkeypatch.setattr(
        adapters,
        "_copier",
        lambda device, of: adapters._GroupCopier(own, of),  # type: ignore[arg-type]
    )
    first, second = Shard(_MODEL, 0, 2), Shard(_MODEL, 1, 2)
    size = PageLayout(first.sites(), torch.float32).num_bytes(first.adapter(_adapter("a")))
    make = (size, torch.float32, _CPU)  # room for one adapter
    group.pool = follower = FollowerPool(second.sites(), *make, has_affine=True)
    follower._copier = other
    pool = GroupPool(group, first, *make, 1 << 24, 1, has_affine=True)  # type: ignore[arg-type]
    for digest in ("a", "bb"):
        pool.insert(pool.pack(_adapter(digest)))
    group.launch()

    assert not pool.acquire("a")
    assert (own.after, other.after) == ([None], [None])
    assert not pool.acquire("a"), "its copy is under way"
    own.end()
    pool.land_copies()
    assert group.sent[-1] == {"do": "land", "digest": "a"}
    assert pool.acquire("a")
    group.launch()  # a step that reads it
    pool.release("a")
    group.launch()  # one that does not
    assert not pool.acquire("bb")
    assert group.sent[-1]["after"] == 2
    assert own.after[-1] is own.marks[-1]
    assert other.after[-1] is other.marks[1], "the second of three launches"
    own.end()
    other.end()
    pool.land_copies()
    assert pool.acquire("bb")
    for shard, found in ((first, pool), (second, follower)):
        alone = adapters.AdapterPool(shard.sites(), *make, 1 << 24)
        alone.add(shard.adapter(_adapter("bb")))
        assert alone.acquire("bb")
        assert found.deltas("bb").keys() == alone.deltas("bb").keys()
        for name, expected in alone.deltas("bb").items():
            for ours, theirs in zip(found.deltas("bb")[name], expected, strict=True):
                assert torch.equal(ours.a, theirs.a)  # type: ignore[union-attr]
    pool.release("bb")
    assert pool.remove("bb")
    assert "bb" not in follower._host
