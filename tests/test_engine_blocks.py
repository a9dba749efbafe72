"""The block pool in exact ids."""

import pytest

from engine.blocks import BlockPool

TOKENS = list(range(100, 112))  # three blocks of 4


def make_chain(
    pool: BlockPool, tokens: list[int] = TOKENS, adapter: str | None = None, salt: str = ""
) -> list[bytes]:
    chain: list[bytes] = []
    pool.extend_chain(chain, tokens, len(tokens), adapter, salt)
    return chain


def make_pool(num_blocks: int = 6, *, can_share: bool = True) -> BlockPool:
    return BlockPool(num_blocks, 4, "base", can_share=can_share)


def publish_all(pool: BlockPool, blocks: list[int], chain: list[bytes]) -> None:
    for block, block_hash in zip(blocks, chain, strict=True):
        pool.publish(block, block_hash)


def test_blocks_are_found_held_and_reused_in_exact_order() -> None:
    pool = make_pool()
    chain = make_chain(pool)
    # Nothing is known; fresh blocks come in order.
    assert pool.find(chain) == []
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    publish_all(pool, first, chain)
    # A second sequence holds the same blocks.
    assert pool.find(chain) == [0, 1, 2]
    pool.hold([0, 1])
    assert [pool.num_references(block) for block in range(3)] == [2, 2, 1]
    # The first one leaves: only block 2 becomes idle, and is still found.
    pool.release(first)
    assert (pool.num_free, pool.is_idle(2), pool.is_idle(1)) == (4, True, False)
    assert pool.find(chain) == [0, 1, 2]
    # Empty blocks go first, then the idle one, which is forgotten.
    assert pool.allocate(4) == [3, 4, 5, 2]
    assert pool.find(chain) == [0, 1]
    assert pool.num_free == 0


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = make_pool(3)
    blocks = pool.allocate(3)
    chain = make_chain(pool)
    publish_all(pool, blocks, chain)
    pool.release(blocks)
    assert pool.allocate(1) == [2]
    assert pool.find(chain) == [0, 1]


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = make_pool(2)
    chains = [make_chain(pool, [start] * 4) for start in (1, 2)]
    for chain in chains:
        publish_all(pool, pool.allocate(1), chain)
    pool.release([0])
    pool.release([1])
    pool.hold([0])
    pool.release([0])  # used again: now block 1 is the older one
    assert pool.allocate(1) == [1]
    assert pool.find(chains[0]) == [0]


def test_of_twins_only_the_first_is_found() -> None:
    pool = make_pool()
    chain = make_chain(pool, TOKENS[:4])
    publish_all(pool, pool.allocate(1), chain)
    publish_all(pool, pool.allocate(1), chain)
    assert pool.find(chain) == [0]
    pool.release([1])  # has no name: empty
    assert not pool.is_idle(1)


def test_only_full_blocks_are_in_a_chain_and_it_grows_as_if_built_at_once() -> None:
    pool = make_pool()
    chain: list[bytes] = []
    pool.extend_chain(chain, TOKENS, 7, "x", "s")
    assert len(chain) == 1
    pool.extend_chain(chain, TOKENS, 12, "x", "s")
    assert chain == make_chain(pool, adapter="x", salt="s")


def test_chains_differ_by_adapter_salt_base_process_and_every_token_before() -> None:
    pool = make_pool()
    variants = [
        make_chain(pool),
        make_chain(pool, adapter="x"),
        make_chain(pool, salt="x"),
        make_chain(pool, adapter="ab", salt="c"),
        make_chain(pool, adapter="a", salt="bc"),
        make_chain(make_pool()),  # the same but for the secret
        make_chain(pool, [0, *TOKENS[1:]]),
    ]
    hashes = [block_hash for chain in variants for block_hash in chain]
    assert len(set(hashes)) == len(hashes) == 3 * len(variants)


def test_a_pool_that_does_not_share_finds_nothing() -> None:
    pool = make_pool(can_share=False)
    chain = make_chain(pool)
    publish_all(pool, pool.allocate(3), chain)
    assert pool.find(chain) == []


def test_a_block_released_twice_or_allocated_from_nothing_is_an_assertion() -> None:
    pool = make_pool(2)
    pool.allocate(2)
    pool.release([1])
    with pytest.raises(AssertionError, match="block 1 released twice"):
        pool.release([1])
    with pytest.raises(AssertionError, match="2 blocks asked, 1 free"):
        pool.allocate(2)
