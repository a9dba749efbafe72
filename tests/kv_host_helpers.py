"""Slow copies of KV blocks, for engines with and without tensors: each ends when a test says so,
and until then nothing can be relied on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from engine.block_copies import GroupBlockCopier, layer_parts, open_block_copies
from engine.column_copies import Columns
from engine.config import EngineConfig
from engine.core import Engine
from engine.host_blocks import BlockCopier
from engine.kv_cache import KVCache
from engine.parallel import follower
from engine.runner import ModelRunner
from engine.step_cost import StepCost
from engine.types import Request, SamplingParams
from tests.fakes import FakeRunner

Content = Any  # of a block


def answers_in_turns(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, num_turns: int
) -> list[tuple[int, ...]]:
    """Returns the tokens of each prompt, asked alone after all those before it, in every turn."""
    found = []
    for turn in range(num_turns):
        for i, prompt in enumerate(prompts):
            engine.add_request(Request(f"{turn} {i}", tuple(prompt), params))
            tokens: tuple[int, ...] = ()
            while engine.has_work:
                for output in engine.step().outputs:
                    assert output.error is None
                    tokens += output.token_ids
            found.append(tokens)
    return found


class SlowCopy:
    def __init__(self, copier: SlowCopier, finish: Callable[[], object]) -> None:
        self._copier, self._finish = copier, finish
        self.has_ended = False

    def query(self) -> bool:
        self._copier.tick()
        return self.has_ended

    def synchronize(self) -> None:
        self._copier.finish(self)

    def seconds(self) -> float:
        assert self.has_ended
        return 1e-6

    def end(self) -> None:
        self._finish()
        self.has_ended = True


class SlowCopier:
    """Reads its source at the end of a copy, as late as a device may, and spoils the blocks of a
    load at once. `polls`: the number of queries until the next copy ends."""

    def __init__(
        self,
        read: Callable[[int], Content],
        write: Callable[[int, Content | None], None],
        num_slots: int,
        polls: Callable[[], int],
    ) -> None:
        self.num_slots, self.block_bytes = num_slots, 1 << 20
        self.slots: list[Content | None] = [None] * num_slots
        self.num_held = 0  # steps that had to wait
        self._read, self._write, self._polls = read, write, polls
        self._flying: deque[SlowCopy] = deque()
        self._sources: list[int] = []  # slots that loads read
        self._left = polls()

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> SlowCopy:
        def finish() -> None:
            for block, slot in zip(blocks, slots, strict=True):
                self.slots[slot] = self._read(block)

        for slot in slots:
            assert not self.is_loading(slot)
            self.slots[slot] = None
        return self._begin(finish)

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, in_parts: bool = False
    ) -> SlowCopy:
        def finish() -> None:
            for block, slot in zip(blocks, slots, strict=True):
                self._write(block, self.slots[slot])
                self._sources.remove(slot)

        self._sources += slots
        # A copy that reads one of the blocks comes before, as on one stream.
        for block in blocks:
            self._spoil_later(block)
        return self._begin(finish)

    def hold_steps(self, copy: SlowCopy) -> None:
        self.num_held += 1
        self.finish(copy)

    def tick(self) -> None:
        self._left -= 1
        if self._left <= 0 and self._flying:
            self._flying.popleft().end()
            self._left = self._polls()

    def finish(self, copy: SlowCopy) -> None:
        while not copy.has_ended:
            self._flying.popleft().end()

    def is_loading(self, slot: int) -> bool:
        return slot in self._sources

    @property
    def is_idle(self) -> bool:
        return not self._flying

    def _begin(self, finish: Callable[[], object]) -> SlowCopy:
        copy = SlowCopy(self, finish)
        self._flying.append(copy)
        return copy

    def _spoil_later(self, block: int) -> None:
        """Spoils the block once the copies before, which may read it, have ended."""
        self._begin(lambda: self._write(block, None))


class _Part:
    """A part of a load: it comes when a step begins to wait for it, and not before."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write: Callable[[], None] | None = write

    def wait(self) -> None:
        if self._write is not None:
            self._write()
            self._write = None


class LayeredCopier(SlowCopier):
    """Slow copies of a runner on a CPU whose loads may come in parts, each as late as allowed."""

    def __init__(self, kv: KVCache, num_slots: int, polls: Callable[[], int]) -> None:
        assert kv.blocks is not None
        super().__init__(*_access_to(kv.blocks), num_slots, polls)
        self._kv = kv
        self._parts_of: dict[SlowCopy, list[tuple[int, _Part]]] = {}
        self.num_in_parts = 0

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, in_parts: bool = False
    ) -> SlowCopy:
        layers = layer_parts(self._kv) if in_parts else ()
        if not layers:
            return super().load(slots, blocks)
        self.num_in_parts += 1
        contents = [self.slots[slot] for slot in slots]
        for block in blocks:
            self._spoil_later(block)

        def write(columns: Columns) -> None:
            for block, content in zip(blocks, contents, strict=True):
                assert self._kv.blocks is not None
                to = self._kv.blocks[block].view(-1, columns.pitch)
                end = columns.start + columns.width
                to[:, columns.start : end] = content.view(to.shape)[:, columns.start : end]

        parts = [(one.first_layer, _Part(partial(write, one.columns))) for one in layers]
        copy = self._begin(lambda: [part.wait() for _, part in parts])
        self._parts_of[copy] = parts
        return copy

    def hold_steps(self, copy: SlowCopy) -> None:
        if copy not in self._parts_of:
            super().hold_steps(copy)
            return
        while self._flying[0] is not copy:  # these come before, on one stream
            self._flying.popleft().end()
        self._kv.arrivals.expect(self._parts_of[copy])


def runner_with_host(
    runner: FakeRunner, num_slots: int, polls: Callable[[], int] = lambda: 2
) -> SlowCopier:
    """Gives a runner a host tier with slow copies."""
    size = runner.kv_layout.stride * runner.block_size

    def read(block: int) -> Content:
        return runner.kv[block * size : (block + 1) * size]

    def write(block: int, content: Content | None) -> None:
        runner.kv[block * size : (block + 1) * size] = [None] * size if content is None else content

    copier = SlowCopier(read, write, num_slots, polls)
    runner.kv_copies = copier
    return copier


def slow_copies(runner: ModelRunner, polls: Callable[[], int]) -> SlowCopier:
    """Replaces the copies of a runner on a CPU by slow ones."""
    assert runner.kv_copies is not None
    assert runner._kv.blocks is not None
    copier = SlowCopier(*_access_to(runner._kv.blocks), runner.kv_copies.num_slots, polls)
    runner.kv_copies = copier
    if runner.group is not None:
        runner.kv_copies = GroupBlockCopier(copier, runner.group)
    return copier


def layered_copies(runner: ModelRunner) -> LayeredCopier:
    """Replaces the copies of a runner on a CPU by slow ones that may come in parts."""
    assert runner.kv_copies is not None
    copier = LayeredCopier(runner._kv, runner.kv_copies.num_slots, lambda: 9)
    runner.kv_copies = copier
    return copier


def copy_as_late_as_allowed() -> None:
    """Lets this process, of another rank, end a copy only when a step has to begin after it."""

    def open_slow(config: EngineConfig, kv: KVCache, group: None) -> BlockCopier | None:
        own = open_block_copies(config, kv, group)
        if own is None:
            return None
        return LayeredCopier(kv, own.num_slots, lambda: 1 << 62)

    follower.open_block_copies = open_slow  # type: ignore[assignment]


def _access_to(
    blocks: torch.Tensor,
) -> tuple[Callable[[int], Content], Callable[[int, Content | None], None]]:
    """Returns the functions that read a block, and that write it; None as its content spoils it."""

    def write(block: int, content: torch.Tensor | None) -> None:
        if content is None:
            blocks[block].fill_(255)  # not a number, as float32
        else:
            blocks[block].copy_(content)

    return lambda block: blocks[block].clone(), write


def always_copies(engine: Engine) -> None:
    """Has the engine copy blocks though tiny models may compute them as fast."""
    assert engine._offload is not None
    engine._offload._cost = StepCost()


def check_no_leak(engine: Engine) -> None:
    """Asserts that no block or slot is held once the engine has no work."""
    offload = engine._offload
    assert offload is not None
    offload.drain()
    while offload._host.num_storing:
        offload.begin_step()
    assert engine.load().num_free_blocks == engine.load().num_blocks
    assert not offload._host.num_held
    assert not offload._store_of
