"""The order of a CUDA device's copies and steps, without one: what each stream follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine import block_copies
from engine.block_copies import CudaBlockCopier, FollowerBlockCopier, layer_parts
from engine.column_copies import Columns
from engine.kv_cache import KVCache

_NUM_LAYERS = 16


class _Stream:
    def __init__(self, *_: object) -> None:
        self.follows: set[str] = set()  # what is launched from now on begins after these
        self.cuda_stream = self

    def wait_event(self, event: _Event) -> None:
        self.follows |= event.follows


class _Device:
    """Stands in for `torch.cuda`."""

    def __init__(self) -> None:
        self.steps = self.current = _Stream()

    def current_stream(self, *_: object) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class _Event:
    device: _Device

    def __init__(self, **_: object) -> None:
        self.follows: set[str] = set()

    def record(self, stream: _Stream) -> None:
        self.follows = set(stream.follows)

    def wait(self) -> None:
        self.device.current.wait_event(self)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    """A device whose streams note what they follow: each copy by its name."""
    found = _Device()

    def copy_rows(source: torch.Tensor, rows: Any, to: torch.Tensor, places: Any) -> None:
        found.current.follows.add("load" if to.shape[0] == 16 else "store")

    def copy_columns(
        source: torch.Tensor, to: torch.Tensor, columns: Columns, stream: _Stream
    ) -> None:
        stream.follows.add(f"part {columns.start}")

    for name in ("current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (_Event,), {"device": found}))
    monkeypatch.setattr(block_copies, "_copy_rows", copy_rows)
    monkeypatch.setattr(block_copies, "copy_columns", copy_columns)
    return found


def make_kv(table_of: tuple[int, ...] = (0,) * _NUM_LAYERS) -> KVCache:
    """Returns 16 blocks whose layers are a byte of K and of V."""
    blocks = torch.zeros((16, 2 * _NUM_LAYERS), dtype=torch.uint8)
    return KVCache((blocks,) * _NUM_LAYERS, (blocks,) * _NUM_LAYERS, table_of, blocks)


def make_copier(kv: KVCache) -> CudaBlockCopier:
    return CudaBlockCopier(kv, torch.zeros((4, 2 * _NUM_LAYERS), dtype=torch.uint8))


def test_steps_follow_each_part_of_a_load_when_they_read_its_first_layer(device: _Device) -> None:
    kv = make_kv()
    copier = make_copier(kv)
    device.steps.follows.add("step")
    copy = copier.load([1], [4], in_parts=True)
    all_parts = {f"part {first}" for first in range(0, _NUM_LAYERS, 2)}
    assert copier._stream.follows == {"step", *all_parts}
    copier.hold_steps(copy)
    assert device.steps.follows == {"step"}
    for layer in range(_NUM_LAYERS):
        kv.arrivals.wait(layer)
        parts = {f"part {first}" for first in range(0, layer + 1, 2)}
        assert device.steps.follows == {"step", *parts}


@pytest.mark.parametrize("is_first", [True, False])
def test_steps_follow_the_stores_before_a_load_in_parts_from_their_begin(
    device: _Device, is_first: bool
) -> None:
    """They may write the blocks of these stores. The first rank's steps wait for such a store
    besides; the other ranks get one message, for the newest copy."""
    own = make_copier(make_kv())
    if is_first:
        own.store([3], [0])
        own.hold_steps(own.load([1], [4], in_parts=True))
    else:
        follower = FollowerBlockCopier(own)
        follower.store([3], [0])
        follower.load([1], [4], in_parts=True)
        follower.hold_steps(2)
    assert device.steps.follows == {"store"}


def test_steps_follow_the_whole_load_where_layers_have_two_tables(device: _Device) -> None:
    copier = make_copier(make_kv((0, 1) * (_NUM_LAYERS // 2)))
    copier.hold_steps(copier.load([1], [4], in_parts=True))
    assert device.steps.follows == {"load"}


def test_blocks_without_layers_have_no_parts() -> None:
    blocks = torch.zeros((4, 16), dtype=torch.uint8)
    assert layer_parts(KVCache((), (), (), blocks)) == ()
