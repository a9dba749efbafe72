"""Page-locked buffers while tensors die at any moment; without a device that locks them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lora import pinned_memory
from lora.pinned_memory import PinnedMemory, map_memory
from tests.waiting import eventually

PAGE = 4096


class Buffer(torch.Tensor):
    """A tensor that acts as a garbage collection while its size is read."""

    on_look: Callable[[], None] | None = None

    def numel(self) -> int:
        act, self.on_look = self.on_look, None
        if act is not None:
            act()
        return super().numel()


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the sizes of the buffers that went back to the system."""
    sizes: list[int] = []

    def lock(num_bytes: int) -> torch.Tensor:
        return torch.empty(-(-num_bytes // PAGE) * PAGE, dtype=torch.uint8).as_subclass(Buffer)

    def unlock(buffers: list[torch.Tensor]) -> None:
        sizes.extend(torch.Tensor.numel(buffer) for buffer in buffers)

    monkeypatch.setattr(pinned_memory, "_lock_pages", lock)
    monkeypatch.setattr(pinned_memory, "_unlock_all", unlock)
    return sizes


def test_a_tensor_that_dies_while_a_buffer_is_chosen_takes_that_buffer_from_nobody(
    unlocked: list[int],
) -> None:
    memory = PinnedMemory(bytes_to_keep=3 * PAGE)
    held = [memory.allocate(2 * PAGE)]
    small = memory.allocate(PAGE)
    del small
    (buffer,) = memory._unused.values()
    memory._bytes_to_keep = 2 * PAGE  # from now on one of the two goes as soon as both are unused
    buffer.on_look = held.clear  # type: ignore[attr-defined]
    found = memory.allocate(PAGE)
    assert unlocked[0] == PAGE  # the chosen one went while its size was looked at
    assert found.numel() == PAGE
    assert memory.num_bytes == 3 * PAGE - sum(unlocked) + PAGE


def test_spare_buffers_are_made_before_they_are_needed_and_again_once_taken(
    unlocked: list[int],
) -> None:
    memory = PinnedMemory(4 * PAGE, spare_bytes=PAGE)
    assert memory.num_bytes == 2 * PAGE
    held = [memory.allocate(PAGE)]
    eventually(lambda: memory.num_bytes == 3 * PAGE)
    held += [memory.allocate(PAGE) for _ in range(3)]
    eventually(lambda: memory.num_bytes == 6 * PAGE)  # four that are kept, and the two spares
    assert not unlocked


def test_a_full_tier_takes_and_returns_no_memory(unlocked: list[int]) -> None:
    memory = PinnedMemory(4 * PAGE, spare_bytes=PAGE)
    held = [memory.allocate(PAGE) for _ in range(4)]
    eventually(lambda: memory.num_bytes == 6 * PAGE)
    for _ in range(20):
        held.append(memory.allocate(PAGE))
        del held[0]
    assert memory.num_bytes == 6 * PAGE
    assert not unlocked


def test_a_spare_is_no_larger_than_a_request_may_waste(unlocked: list[int]) -> None:
    memory = PinnedMemory(16 * PAGE, spare_bytes=4 * PAGE)
    small = memory.allocate(PAGE)
    assert small.numel() == PAGE
    assert memory.num_bytes == 9 * PAGE
    large = memory.allocate(9 * PAGE)
    assert large.numel() == 9 * PAGE
    assert memory.num_bytes == 18 * PAGE
    del small, large
    assert not unlocked


def test_mapped_memory_is_zero_and_begins_with_a_page() -> None:
    for num_bytes in (0, 1, PAGE, 2**21 - 1, 2**21, 5 * 2**20 + 3):
        memory = map_memory(num_bytes)
        assert memory.numel() == num_bytes
        assert memory.data_ptr() % PAGE == 0
        assert not memory.any()
        memory.fill_(1)
