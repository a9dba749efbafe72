"""The pool with copies that take time: the times of acquisition, the evictions for arriving
adapters, and that no step reads a page before its weights.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lora_helpers import HandCopier, loaded, make_adapter, make_pool, rows_in_pool


def test_an_adapter_on_its_way_can_be_had_when_its_copy_has_ended() -> None:
    copier = HandCopier()
    pool = loaded("a", num_blocks=1, copier=copier)
    assert not pool.has_pending_copies()
    assert not pool.acquire("a")
    assert not pool.acquire("a")
    copier.end()
    assert not pool.acquire("a")  # in this walk nobody is told another thing than before
    assert pool.has_pending_copies()
    pool.land_copies()
    assert not pool.has_pending_copies()
    assert pool.acquire("a")
    assert rows_in_pool(pool, make_adapter("a"))
    pool.release("a")
    assert pool.acquire("a")


def test_an_idle_engine_waits_for_the_copy() -> None:
    pool = loaded("a", copier=HandCopier())
    pool.wait_pending()
    assert not pool.acquire("a")
    pool.wait_pending()
    assert pool.acquire("a")


def test_an_adapter_of_many_pages_arrives_through_one_slot() -> None:
    pool = make_pool(copier=HandCopier())
    adapter = make_adapter("a", {"q": 40})
    pool.add(adapter)
    assert not pool.acquire("a")
    pool.wait_pending()
    assert pool.acquire("a")
    assert rows_in_pool(pool, adapter)


def test_what_arrives_is_not_evicted_and_takes_no_second_slot() -> None:
    pool = loaded("a", "b", "c", num_blocks=1, copier=HandCopier(2))
    assert not pool.acquire("a")
    assert not pool.acquire("b")
    pool.prefetch(["b", "c"])
    assert pool.on_device() == ("a",)


def test_without_a_slot_nobody_is_evicted() -> None:
    pool = loaded("a", "b", "c", num_blocks=2, copier=HandCopier())
    assert not pool.acquire("a")
    pool.wait_pending()
    assert not pool.acquire("b")
    assert not pool.acquire("c")
    assert set(pool.on_device()) == {"a", "b"}


def test_those_who_wait_next_are_fetched_into_pages_that_nobody_wants() -> None:
    pool = loaded("a", "b", "c", "d", num_blocks=3, copier=HandCopier(4))
    pool.prefetch(["a", "b"])
    pool.wait_pending()
    pool.wait_pending()
    assert pool.on_device() == ("a", "b")
    pool.prefetch(["b", "c", "d"])  # c into the free page, d in place of a
    assert set(pool.on_device()) == {"b", "c", "d"}
    pool.wait_pending()
    pool.wait_pending()
    pool.prefetch(["b", "c", "a", "d"])
    assert set(pool.on_device()) == {"b", "c", "d"}  # each is wanted


def test_who_is_asked_for_now_comes_before_those_who_wait() -> None:
    pool = loaded("a", "b", num_blocks=1, copier=HandCopier())
    pool.prefetch(["a"])
    pool.wait_pending()
    assert not pool.acquire("b")
    assert pool.on_device() == ("b",)


def test_a_prefetch_stops_at_the_first_that_does_not_fit() -> None:
    pool = loaded("a", "b", num_blocks=2, copier=HandCopier(2))
    pool.add(make_adapter("big", {"q": 17}))
    assert not pool.acquire("a")
    pool.prefetch(["big", "b"])
    assert pool.on_device() == ("a",)


def test_a_removal_on_the_way_leaves_the_only_slot_to_others() -> None:
    pool = loaded("a", "b", num_blocks=1, copier=HandCopier())
    assert not pool.acquire("a")
    assert pool.remove("a")
    assert not pool.acquire("b")
    assert pool.has_pending_copies()  # else nobody would ask again
    pool.wait_pending()
    assert not pool.acquire("b")
    pool.wait_pending()
    assert pool.acquire("b")


def test_an_adapter_removed_on_its_way_never_reaches_its_pages() -> None:
    copier = HandCopier(2)
    pool = loaded("a", "b", num_blocks=1, copier=copier)
    assert not pool.acquire("a")
    assert pool.remove("a")
    assert not pool.has("a")
    assert not pool.acquire("b")  # the same page
    copier.end()
    pool.land_copies()
    assert pool.acquire("b")
    assert rows_in_pool(pool, make_adapter("b"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["add", "acquire", "release", "remove", "prefetch", "fill", "land", "wait"]
            ),
            st.integers(0, 5),
        ),
        max_size=80,
    )
)
def test_random_use_with_late_copies_shows_no_page_too_early(
    actions: list[tuple[str, int]],
) -> None:
    copier = HandCopier(2)
    pool = make_pool(num_blocks=3, copier=copier)
    adapters = [make_adapter(f"x{i}", {"q": rank}) for i, rank in enumerate((1, 3, 16, 17, 20, 40))]
    references = [0] * len(adapters)
    for action, i in actions:
        digest = adapters[i].digest
        if action == "add":
            pool.add(adapters[i])
        elif action == "acquire" and pool.has(digest):
            is_there = pool.acquire(digest)
            references[i] += is_there
            # Whoever asks an idle pool in vain shall be told when to ask again.
            assert is_there or any(references) or pool.has_pending_copies()
        elif action == "release" and references[i]:
            pool.release(digest)
            references[i] -= 1
        elif action == "remove" and pool.remove(digest):
            assert references[i] == 0
        elif action == "prefetch":
            pool.prefetch([adapters[j % 6].digest for j in (i, i + 2, i + 3)])
        elif action == "fill":
            copier.end()
        elif action == "land":
            pool.land_copies()
        elif action == "wait":
            pool.wait_pending()
        held = [page for d in pool.on_device() for page in pool.pages(d)]
        assert len(held) == len(set(held))
        assert len(held) + pool.num_free_blocks == 3
        for adapter, count in zip(adapters, references, strict=True):
            if count:
                assert rows_in_pool(pool, adapter)
    while pool.has_pending_copies():
        pool.wait_pending()
    for adapter, count in zip(adapters, references, strict=True):
        for _ in range(count):
            pool.release(adapter.digest)
        assert pool.remove(adapter.digest)
    assert pool.num_free_blocks == 3
    assert pool.host_bytes_used == 0


def test_a_copy_waits_for_the_steps_that_read_its_blocks_and_no_later_ones() -> None:
    copier = HandCopier(2)
    pool = loaded("a", "b", "c", num_blocks=2, copier=copier)
    for digest in ("a", "b"):
        pool.wait_pending()
        assert not pool.acquire(digest)
        pool.wait_pending()
        assert pool.acquire(digest)
    assert copier.after == [None, None]  # nobody has read the free blocks
    pool.release("a")
    last_of_a = copier.marks[-1]
    pool.release("b")
    assert copier.marks[-1] is not last_of_a
    assert not pool.acquire("c")  # in place of a
    assert set(pool.on_device()) == {"b", "c"}
    assert copier.after[2] is last_of_a
