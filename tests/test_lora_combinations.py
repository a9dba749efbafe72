"""Several adapters of one key in the pool: all are acquired or none, their lists, their room."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora.adapter_key import key_digests
from lora.layers import apply_lora_
from lora.mapping import build_lora_batch
from tests.lora_helpers import QKV, SITES, HandCopier, loaded, make_adapter, make_pool

NAMES = ("a", "b", "c", "d", "e")
KEYS = ("a", "b", "c", "a+b", "0.5*a+b", "b+c", "c+d", "2*d", "a+c+e", "d+e")


def test_a_key_lists_the_pages_of_its_adapters_with_their_weights() -> None:
    pool = make_pool()
    pool.add(make_adapter("a", {"q": 20, "k": 3}))
    pool.add(make_adapter("b", {"q": 2}))
    assert pool.acquire("0.5*a+2*b")
    found = pool.page_list("0.5*a+2*b")
    assert found.pages == (*pool.pages("a"), *pool.pages("b"))
    assert found.weights == (0.5, 0.5, 2.0)
    assert found.site_kinds == {"qkv"}


def test_the_first_page_has_every_matrix_of_the_list() -> None:
    pool = make_pool(8)
    pool.add(make_adapter("a", {"q": 2}))
    pool.add(make_adapter("b", {"q": 2, "down": 3}))
    pool.add(make_adapter("c", {"k": 1}))
    for key in ("a+b", "b+2*c"):
        assert pool.acquire(key)
    assert pool.page_list("a+b").pages == (*pool.pages("b"), *pool.pages("a"))
    blank, *rest = pool.page_list("b+2*c").pages
    assert rest == [*pool.pages("b"), *pool.pages("c")]
    assert blank == pool.num_blocks
    for site in SITES:
        rows = pool.site_rows(site.name)
        assert bool((rows.a_entries[blank] != 0).all())
        assert bool((rows.b_entries[blank] != 0).all())
        assert rows.a(blank, 0) is rows.b(blank, 0) is None


def test_the_weighted_deltas_add_up() -> None:
    pool = make_pool()
    one, two = make_adapter("a", {"q": 3, "k": 2}), make_adapter("b", {"q": 2})
    pool.add(one)
    pool.add(two)
    assert pool.acquire("0.5*a+-2*b")
    batch = build_lora_batch(pool, [(None, 1), ("0.5*a+-2*b", 2)], "cpu")
    assert batch is not None
    x, y = torch.randint(-3, 4, (3, 6)).float(), torch.zeros(3, 6)
    apply_lora_(QKV, torch.split(y, [4, 2], dim=1), x, batch)
    expected = torch.zeros(3, 6)
    for adapter, weight in ((one, 0.5), (two, -2.0)):
        for module, columns in (("q", slice(0, 4)), ("k", slice(4, 6))):
            if (found := adapter.modules.get(module)) is not None:
                expected[1:, columns] += weight * (x[1:] @ found.lora_a.T @ found.lora_b)
    assert torch.equal(y, expected)


def test_without_room_for_all_none_is_held() -> None:
    pool = loaded("a", "b", "c", num_blocks=2)
    assert pool.acquire("a")
    assert not pool.acquire("b+c")
    pool.release("a")
    assert pool.acquire("b+c")
    assert not pool.acquire("a")
    pool.release("b+c")
    assert pool.acquire("a")


def test_a_list_too_long_for_a_step_s_plan_waits() -> None:
    pool = loaded("a", "b", "c", num_blocks=4)
    assert pool.acquire("a+b")
    assert pool.acquire("0.5*a+b")
    assert not pool.acquire("c")  # the plan has room for four pages
    assert pool.acquire("a+b")  # a list that is there already
    pool.release("0.5*a+b")
    assert pool.acquire("c")


def test_what_can_never_be_together_is_told() -> None:
    pool = loaded("a", "b", "c", num_blocks=2)
    assert pool.obstacle("a") is pool.obstacle("a+b") is None
    assert "need 3 blocks together; 0 of 2" in (pool.obstacle("a+b+c") or "")
    pool.pin("c")
    assert "need 2 blocks together; 1 of 2 on the device are pinned" in (pool.obstacle("a+b") or "")
    assert pool.obstacle("a+c") is None


def test_an_adapter_with_affine_rows_is_alone_and_has_no_weight() -> None:
    pool = loaded("a")
    own = make_adapter("d", {"q": 2})
    q = own.modules["q"]
    rows = torch.zeros(1, q.lora_b.shape[1])
    pool.add(replace(own, modules={"q": replace(q, affine=rows)}))
    assert pool.obstacle("d") is None
    for key in ("0.5*d", "a+d", "d+a"):
        assert "uses DoRA or has trained biases" in (pool.obstacle(key) or "")
        assert "adapter d " in (pool.obstacle(key) or "")


def test_combinations_that_wait_for_copies_do_not_take_each_other_s_room() -> None:
    """The room is for three of four: the older one has both of its own in the end."""
    copier = HandCopier(max_flying=4)
    pool = loaded("a", "b", "c", "d", num_blocks=3, copier=copier)
    order = ("a+b", "c+d")
    for _ in range(6):
        pool.land_copies()
        if pool.acquire(order[0]):
            break
        assert not pool.acquire(order[1])
        copier.end()
    assert set(pool.on_device()) >= {"a", "b"}
    pool.release("a+b")
    for _ in range(6):
        pool.land_copies()
        if pool.acquire(order[1]):
            break
        copier.end()
    assert set(pool.on_device()) >= {"c", "d"}


@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=60), st.integers(3, 6))
@settings(max_examples=60, deadline=None)
def test_random_use_keeps_the_lists_within_the_plan(keys: list[str], num_blocks: int) -> None:
    pool = loaded(*NAMES, num_blocks=num_blocks)
    held: list[str] = []
    for key in keys:
        if key in held:
            held.remove(key)
            pool.release(key)
        elif pool.obstacle(key) is None and pool.acquire(key):
            held.append(key)
        elif not held:
            assert pool.obstacle(key) is not None  # alone it finds room
        needed = {digest for one in held for digest in key_digests(one)}
        assert needed <= set(pool.on_device())
        assert sum(len(pool.page_list(one).pages) for one in held) <= num_blocks
        references = {one.digest: one.num_references for one in pool.residents()}
        for name in NAMES:
            assert references[name] == sum(name in key_digests(one) for one in held)
