"""A rank without a scheduler: it reads its part of the base and computes the steps it receives.

It ends with the process that started it, and at any error: the first rank then ends the group.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.block_copies import FollowerBlockCopier, open_block_copies
from engine.config import EngineConfig
from engine.device_step import DeviceSteps
from engine.errors import EngineError
from engine.kv_cache import KVCache
from engine.parallel.adapters import FollowerPool
from engine.parallel.channel import Link, StepSegment
from engine.parallel.group import BEAT_S
from engine.rank import Rank, Steps
from engine.reference_step import follow
from engine.step_layout import StepLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Server:
    rank: Rank
    kv: KVCache
    pool: FollowerPool
    steps: Steps
    segment: StepSegment
    calls: Mapping[str, Callable[..., None]]  # for messages that are a method and its arguments

    def obey(self, message: dict[str, Any], file: int | None) -> None:
        match message:
            case {"do": "launch", "slot": slot, "layout": layout, "num_words": count}:
                assert isinstance(self.steps, DeviceSteps)
                words = self.segment.words(slot, count)
                found = msgspec.convert(layout, StepLayout)
                self.steps.follow(found, words, message["number"], self._note_taken)
                self.pool.note_launch()
            case {"do": "prompts", "number": number}:
                assert isinstance(self.steps, DeviceSteps)
                self.steps.follow_prompts(number)
                self.pool.note_launch()
            case {"do": "step", "slot": slot}:
                step = self.segment.read(slot)
                self._note_taken()
                follow(self.rank.model, self.kv, self.pool, step)
            case {"do": "keep", "digest": digest, "num_bytes": num_bytes, "shape": shape}:
                assert file is not None
                shard = self.rank.shard
                self.pool.keep(shard, digest, num_bytes, shape, message["num_blocks"], file)
            case {"do": do, **arguments} if do in self.calls:
                self.calls[do](**arguments)
            case _:
                raise ValueError(f"an unknown message: {message}")

    def _note_taken(self) -> None:
        """Lets the first rank write to the slot of the step that was just read."""
        self.segment.num_taken[self.rank.shard.rank] += 1


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
    config = EngineConfig(**opening["config"])
    rank = Rank(config, opening["rank"])
    try:
        rank.load()
    except Exception as error:
        link.send(_refusal(error))
        raise
    link.send({})
    link.receive()  # every rank has its weights, and the kernels are compiled
    rank.open_model(rank.meet(Path(opening["store"])))
    try:
        server = _open_server(link, config, rank, segment)
    except (EOFError, OSError):
        raise
    except Exception as error:
        link.send(_refusal(error))
        raise
    link.send({})
    while True:
        server.obey(*link.receive())


def _refusal(error: Exception) -> dict[str, Any]:
    """Returns the answer of a rank that cannot do its part. An error of ours is the cause; others
    may follow from it, in an exchange with the rank that has failed."""
    is_cause = isinstance(error, EngineError)
    return {"error": f"{type(error).__name__}: {error}", "is_cause": is_cause}


def _open_server(link: Link, config: EngineConfig, rank: Rank, segment: StepSegment) -> _Server:
    """Makes the memory of a rank, of the sizes that it receives."""
    sizes, _ = link.receive()
    pool = FollowerPool(
        rank.shard.sites(),
        sizes["pool_bytes"],
        rank.dtype,
        rank.device,
        has_affine=config.affine_adapters,
        is_int8=config.lora_dtype == "int8",
    )
    if config.kv_cache_dtype != "auto":
        link.receive()  # the first rank compares, too, and judges
        rank.compare_kv(pool)
        link.send({})
    if rank.is_cuda:
        # The first rank has compiled the kernels.
        link.send({"use": asdict(rank.measure(pool, rank.prepare_kernels()))})
    sizes, _ = link.receive()
    kv = rank.allocate_kv(sizes["num_blocks"])
    steps = rank.make_steps(kv, pool)
    rank.capture(steps)
    gc.collect()  # a collection of all that is there now would hold up every rank
    gc.freeze()
    calls: dict[str, Callable[..., None]] = {
        "write": pool.write,
        "land": pool.land,
        "drop": pool.drop,
    }
    if isinstance(steps, DeviceSteps):
        calls["draw"] = steps.follow_draw
    if (own := open_block_copies(config, kv, None)) is not None:
        copies = FollowerBlockCopier(own)
        calls |= {"store": copies.store, "load": copies.load, "hold": copies.hold_steps}
    return _Server(rank, kv, pool, steps, segment, calls)


def _live(end: int, segment: StepSegment, rank: int) -> None:
    """Shows that this process lives, and ends it with the first rank's."""
    poll = select.poll()
    poll.register(end, 0)
    while True:
        segment.beats_s[rank] = time.monotonic()
        if poll.poll(1000 * BEAT_S):
            os._exit(0)
