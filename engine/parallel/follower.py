"""A rank without a scheduler: it reads its part of the base and computes the steps it receives.

It ends with the process that started it, and at any error: the first rank then ends the group.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.block_copies import open_block_copies
from engine.config import EngineConfig
from engine.host_blocks import BlockCopier
from engine.kv_cache import KVCache, allocate_kv_cache
from engine.model import Model
from engine.model_config import read_model_config
from engine.parallel.adapters import FollowerPool
from engine.parallel.channel import Link, StepSegment
from engine.parallel.group import BEAT_S
from engine.parallel.shards import Shard
from engine.reference_step import follow
from engine.resolved import resolve_dtype, resolve_layout, resolve_max_len
from engine.weights import load_shard
from kernels.backend import allow_triton
from kernels.collective import meet

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Rank:
    model: Model
    kv: KVCache
    copies: BlockCopier | None  # None: KV has no host tier
    pool: FollowerPool
    shard: Shard
    segment: StepSegment

    def obey(self, message: dict[str, Any], file: int | None) -> None:
        match message:
            case {"do": "step", "slot": slot}:
                follow(self.model, self.kv, self.pool, self.segment.read(slot))
            case {"do": "write", "digest": digest, "blocks": blocks}:
                self.pool.write(digest, blocks)
            case {"do": "keep", "digest": digest, "num_bytes": num_bytes, "shape": shape}:
                assert file is not None
                self.pool.keep(self.shard, digest, num_bytes, shape, message["num_blocks"], file)
            case {"do": "store", "blocks": blocks, "slots": slots} if self.copies is not None:
                self.copies.store(blocks, slots)
            case {"do": "load", "blocks": blocks, "slots": slots} if self.copies is not None:
                self.copies.load(slots, blocks)
            case {"do": "drop", "digest": digest}:
                self.pool.drop(digest)
            case _:
                raise ValueError(f"an unknown message: {message}")


def main(end: int) -> None:
    """`end`: the file descriptor of the connection to the first rank."""
    logging.basicConfig(level=logging.INFO)
    # That of a terminal goes to all its processes: the first rank decides whether steps follow.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Link(socket.socket(fileno=end))
    opening, file = link.receive()
    segment = StepSegment(opening["slot_ints"], file)
    # A step that hangs in an exchange would never see the end of the connection.
    threading.Thread(
        target=_live, args=(end, segment, opening["rank"]), name="beat", daemon=True
    ).start()
    try:
        _serve(link, opening, segment)
    except EOFError:
        return
    except BaseException:
        logger.exception("rank %d failed", opening["rank"])
        os._exit(1)  # without the threads of gloo, which may wait


@torch.inference_mode()
def _serve(link: Link, opening: dict[str, Any], segment: StepSegment) -> None:
    """Ends with EOFError when the first rank does."""
    torch.set_num_threads(opening["num_threads"])
    allow_triton(False)
    config = EngineConfig(**opening["config"])
    whole = read_model_config(Path(config.model_path))
    shard, dtype = Shard(whole, opening["rank"], opening["size"]), resolve_dtype(config, _CPU)
    try:
        weights = load_shard(config, shard, dtype, _CPU)
    except Exception as error:
        link.send({"error": f"{type(error).__name__}: {error}"})
        raise
    link.send({})
    link.receive()  # every rank has its weights
    ranks = meet(Path(opening["store"]), shard.rank, shard.size)
    sizes, _ = link.receive()
    max_len = resolve_max_len(config, whole)
    layout = resolve_layout(whole, config, max_len)
    kv = allocate_kv_cache(shard.config, layout, sizes["num_blocks"], dtype, _CPU)
    rank = _Rank(
        Model(shard.config, weights, max_len, ranks),
        kv,
        open_block_copies(config, kv, None),
        FollowerPool(shard.sites(), sizes["pool_bytes"], dtype, has_affine=config.affine_adapters),
        shard,
        segment,
    )
    link.send({})
    while True:
        rank.obey(*link.receive())


def _live(end: int, segment: StepSegment, rank: int) -> None:
    """Shows that this process lives, and ends it with the first rank's."""
    poll = select.poll()
    poll.register(end, 0)
    while True:
        segment.beats_s[rank] = time.monotonic()
        if poll.poll(1000 * BEAT_S):
            os._exit(0)
