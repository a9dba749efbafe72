"""The block table: exact blocks, exact victims, no block lost or held twice under random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lora.blocks import BlockTable, Placement


def filled(num_blocks: int, **sizes: int) -> BlockTable:
    """Every adapter resident and idle, used in the order given."""
    table = BlockTable(num_blocks)
    for digest, size in sizes.items():
        assert table.acquire(digest, size) is not None
        table.release(digest)
    return table


def test_the_lowest_run_is_taken() -> None:
    table = BlockTable(6)
    assert table.acquire("a", 2) == Placement((0, 1), is_new=True)
    assert table.acquire("b", 1) == Placement((2,), is_new=True)
    assert table.num_free == 3


def test_a_run_is_preferred_to_lower_single_blocks() -> None:
    table = filled(6, a=1, b=1, c=1, d=1)
    table.drop("b")
    assert table.acquire("e", 2) == Placement((4, 5), is_new=True)


def test_blocks_apart_are_taken_when_there_is_no_run() -> None:
    table = filled(4, a=1, b=1, c=1, d=1)
    table.drop("b")
    table.drop("d")
    assert table.acquire("e", 2) == Placement((1, 3), is_new=True)


def test_a_resident_adapter_keeps_its_blocks() -> None:
    table = filled(2, a=1)
    assert table.acquire("a", 1) == Placement((0,), is_new=False)


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    table = filled(3, a=1, b=1, c=1)
    table.acquire("a", 1)
    table.release("a")
    assert table.acquire("d", 2) == Placement((1, 2), is_new=True, evicted=("b", "c"))
    assert table.resident() == ("a", "d")


def test_referenced_and_pinned_adapters_stay() -> None:
    table = filled(3, a=1, b=1, c=1)
    table.acquire("a", 1)
    table.pin("b")
    assert table.acquire("d", 1) == Placement((2,), is_new=True, evicted=("c",))


def test_nothing_is_evicted_when_it_would_not_be_enough() -> None:
    table = filled(3, a=1, b=1, c=1)
    table.acquire("a", 1)
    assert table.acquire("d", 3) is None
    assert table.resident() == ("b", "c", "a")


def test_an_unpinned_adapter_can_go() -> None:
    table = filled(1, a=1)
    table.pin("a")
    assert table.acquire("b", 1) is None
    table.unpin("a")
    assert table.acquire("b", 1) is not None


def test_the_spared_are_evicted_last() -> None:
    table = filled(3, a=1, b=1, c=1)
    assert table.acquire("d", 1, {"a", "b"}) == Placement((2,), is_new=True, evicted=("c",))
    assert table.acquire("e", 1, {"a", "b"}) == Placement((0,), is_new=True, evicted=("a",))


def test_none_of_the_spared_is_evicted_for_what_can_wait() -> None:
    table = filled(3, a=1, b=1, c=1)
    assert table.acquire_keeping("d", 2, {"a", "b"}) is None
    assert table.resident() == ("a", "b", "c")
    assert table.acquire_keeping("d", 1, {"a", "b"}) is not None


def test_releasing_too_often_is_a_fault_of_ours() -> None:
    table = filled(1, a=1)
    with pytest.raises(AssertionError):
        table.release("a")


class RandomUse(RuleBasedStateMachine):
    NUM_BLOCKS = 7
    SIZES = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 5, "f": 7}  # noqa: RUF012
    digests = st.sampled_from(sorted(SIZES))

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(self.NUM_BLOCKS)
        self.references = dict.fromkeys(self.SIZES, 0)
        self.pinned: set[str] = set()

    @rule(
        digest=digests,
        protected=st.sets(digests, max_size=4),
        how=st.sampled_from(["any", "last", "never"]),
    )
    def acquire(self, digest: str, protected: set[str], how: str) -> None:
        before = set(self.table.resident())
        free = self.table.num_free
        evictable = [d for d in before if not self.references[d] and d not in self.pinned]
        size = self.SIZES[digest]
        if how == "any":
            protected, placement = set(), self.table.acquire(digest, size)
        elif how == "last":
            placement = self.table.acquire(digest, size, protected)
        else:
            placement = self.table.acquire_keeping(digest, size, protected)
            evictable = [d for d in evictable if d not in protected]
        unspared = free + sum(self.SIZES[d] for d in evictable if d not in protected)
        if placement is None:
            assert digest not in before
            assert free + sum(self.SIZES[d] for d in evictable) < size
            assert set(self.table.resident()) == before
            return
        assert set(placement.evicted) <= set(evictable)
        assert not protected.intersection(placement.evicted) or unspared < size
        assert placement.is_new == (digest not in before)
        self.references[digest] += 1

    @rule(digest=digests)
    def release(self, digest: str) -> None:
        if self.references[digest]:
            self.table.release(digest)
            self.references[digest] -= 1

    @rule(digest=digests)
    def drop(self, digest: str) -> None:
        if digest in self.table.resident() and not self.references[digest]:
            self.table.drop(digest)

    @rule(digest=digests, pinned=st.booleans())
    def pin(self, digest: str, pinned: bool) -> None:
        (self.table.pin if pinned else self.table.unpin)(digest)
        (self.pinned.add if pinned else self.pinned.discard)(digest)

    @invariant()
    def every_block_has_one_holder(self) -> None:
        held = [block for d in self.table.resident() for block in self.table.blocks(d)]
        assert len(held) == len(set(held))
        assert len(held) + self.table.num_free == self.NUM_BLOCKS
        for digest, references in self.references.items():
            assert self.table.num_references(digest) == references
            assert self.table.is_resident(digest) == (digest in self.table.resident())
            if references:
                assert len(self.table.blocks(digest)) == self.SIZES[digest]


RandomUse.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRandomUse = RandomUse.TestCase
