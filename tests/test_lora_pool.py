"""The pool: page contents, evictions, drops from the host, refusals; and the mapping and layers on
top of it, against each adapter's own product.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora import host_tier
from lora.adapter import Adapter, ModuleWeights
from lora.errors import (
    AdapterError,
    AdapterNotLoadedError,
    AdapterTooLargeError,
    HostMemoryError,
    PinnedMemoryError,
)
from lora.layers import apply_lora_, apply_lora_embedding_
from lora.mapping import LoraBatch, build_lora_batch
from lora.pool import AdapterPool
from lora.sites import Site, Slice
from tests.lora_helpers import (
    ADAPTER_BYTES,
    BLOCK_BYTES,
    DOWN,
    HEAD,
    QKV,
    SITES,
    acquire_and_release,
    loaded,
    make_adapter,
    make_pool,
    rows_in_pool,
)


def test_the_budget_counts_blocks_and_rounds_down() -> None:
    assert make_pool(3).num_blocks == 3
    assert AdapterPool(SITES, 3 * BLOCK_BYTES - 1, torch.float32, "cpu", 0).num_blocks == 2
    assert make_pool(3).reserved_bytes == 3 * BLOCK_BYTES


def test_strips_hold_the_rows_of_each_module_and_no_more() -> None:
    pool = make_pool()
    adapter = make_adapter("a", {"q": 3, "k": 20, "down": 16})
    pool.add(adapter)
    assert pool.acquire("a")
    first, second = pool.pages("a")
    qkv, down = pool.site_rows("qkv"), pool.site_rows("down")
    q, k = adapter.modules["q"], adapter.modules["k"]
    for found, expected in (
        (qkv.a(first, 0), q.a),
        (qkv.a(second, 0), None),
        (qkv.b(first, 0), q.b),
        (qkv.a(first, 1), k.a[:16]),
        (qkv.a(second, 1), k.a[16:]),
        (qkv.b(second, 1), k.b[16:]),
        (down.b(first, 0), adapter.modules["down"].b),
        (down.b(second, 0), None),
    ):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)


def test_a_recycled_page_holds_nothing_of_its_last_owner() -> None:
    pool = make_pool(num_blocks=1)
    pool.add(make_adapter("a", {"q": 16, "k": 16, "down": 16, "lm_head": 16, "embed": 16}))
    pool.add(make_adapter("b", {"k": 2}))
    assert acquire_and_release(pool, "a")
    assert acquire_and_release(pool, "b")
    (page,) = pool.pages("b")
    for site in (QKV, DOWN):
        rows = pool.site_rows(site.name)
        found = [rows.a(page, i) is not None for i in range(len(site.slices))]
        assert found == [part.module == "k" for part in site.slices]
    assert set(pool.deltas("b")) == {"qkv"}


def test_the_least_recently_used_idle_adapter_is_evicted_and_comes_back() -> None:
    pool = loaded("a", "b", "c", num_blocks=2)
    for digest in ("a", "b", "a"):
        assert acquire_and_release(pool, digest)
    assert pool.acquire("c")
    assert set(pool.on_device()) == {"a", "c"}
    assert set(pool.on_host()) == {"a", "b", "c"}
    assert pool.acquire("b")
    assert set(pool.on_device()) == {"b", "c"}


def test_acquire_waits_while_all_pages_are_in_use() -> None:
    pool = loaded("a", "b", num_blocks=1)
    assert pool.acquire("a")
    assert pool.acquire("a")
    assert not pool.acquire("b")
    pool.release("a")
    assert not pool.acquire("b")
    pool.release("a")
    assert pool.acquire("b")


def test_a_pinned_adapter_is_not_evicted() -> None:
    pool = loaded("a", "b", "c", num_blocks=2)
    pool.pin("a")
    assert acquire_and_release(pool, "a")
    assert pool.acquire("b")
    assert not pool.acquire("c")
    pool.unpin("a")
    assert pool.acquire("c")


def test_removal_waits_for_the_last_reference() -> None:
    pool = loaded("a")
    assert pool.acquire("a")
    assert pool.acquire("a")
    assert not pool.remove("a")
    assert not pool.has("a")
    assert pool.on_host() == ()
    with pytest.raises(AdapterNotLoadedError):
        pool.acquire("a")
    pool.release("a")
    assert pool.on_device() == ("a",)
    pool.release("a")
    assert pool.on_device() == ()
    assert pool.num_free_blocks == pool.num_blocks
    assert pool.remove("a")


def test_adding_again_takes_a_pending_removal_back() -> None:
    pool = loaded("a")
    assert pool.acquire("a")
    assert not pool.remove("a")
    pool.add(make_adapter("a"))
    pool.release("a")
    assert pool.has("a")
    assert pool.acquire("a")


def test_an_unknown_adapter_is_an_error_with_its_name() -> None:
    with pytest.raises(AdapterNotLoadedError, match="adapter zz is not loaded"):
        make_pool().acquire("zz")


def test_an_adapter_larger_than_the_pool_is_refused_at_once() -> None:
    pool = make_pool(num_blocks=1)
    with pytest.raises(
        AdapterTooLargeError,
        match=rf"rank 17 needs {2 * BLOCK_BYTES} bytes .* pool has {BLOCK_BYTES}",
    ):
        pool.add(make_adapter("a", {"q": 17}))
    assert not pool.has("a")


def test_values_that_overflow_the_pools_type_are_refused() -> None:
    pool = make_pool(dtype=torch.float16)
    weights = ModuleWeights(torch.ones(1, 6), torch.full((1, 4), 1e5))
    with pytest.raises(AdapterError, match=r"lora_B of q.* overflows torch\.float16"):
        pool.add(Adapter("a", 1, {"q": weights}, 0, False))


def test_a_full_host_drops_the_least_recently_used_that_is_not_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_tier, "_FRESH_S", 0.0)
    pool = loaded("a", "b", "c", host_bytes=3 * ADAPTER_BYTES)
    assert pool.host_bytes_used == 3 * ADAPTER_BYTES
    assert acquire_and_release(pool, "a")
    assert acquire_and_release(pool, "b")
    assert pool.add(make_adapter("d")) == ("c",)
    assert not pool.has("c")
    assert pool.add(make_adapter("e")) == ("d",)
    assert pool.acquire("e")
    assert pool.add(make_adapter("f")) == ("a",)
    assert pool.on_device() == ("b", "e")


def test_adapters_that_are_loaded_at_once_do_not_drop_each_other() -> None:
    """Their requests follow their loads: each of the two would be loaded again and again."""
    pool = loaded("a", "b", "c", host_bytes=3 * ADAPTER_BYTES)
    assert all(acquire_and_release(pool, digest) for digest in "abc")
    assert pool.add(make_adapter("d")) == ("a",)
    assert pool.add(make_adapter("e")) == ("b",)
    assert pool.acquire("d")
    pool.release("d")
    assert pool.add(make_adapter("f")) == ("c",)
    assert pool.add(make_adapter("g")) == ("d",)  # used, and not on the way any more
    assert pool.add(make_adapter("h")) == ("e",)  # of the fresh ones the oldest, at last


def test_what_somebody_waits_for_is_dropped_from_the_host_last() -> None:
    pool = loaded("a", "b", "c", host_bytes=3 * ADAPTER_BYTES)
    assert acquire_and_release(pool, "b")
    pool.prefetch(["a", "c"])
    assert pool.add(make_adapter("d")) == ("b",)


def test_what_is_spared_is_dropped_for_nobody() -> None:
    pool = loaded("a", "b", "c", host_bytes=3 * ADAPTER_BYTES)
    pool.protect(["a"])
    assert pool.add(make_adapter("d")) == ("b",)
    pool.protect(["a", "c", "d"])
    with pytest.raises(HostMemoryError, match="only 0 are free or idle"):
        pool.add(make_adapter("e"))


def test_pins_leave_room_for_the_largest_other() -> None:
    pool = loaded("a", num_blocks=3)
    pool.pin("a")
    pool.pin("a")  # again is no second pin
    pool.add(make_adapter("wide", {"q": 32}))
    pool.add(make_adapter("b"))
    with pytest.raises(PinnedMemoryError, match="2 of 3 blocks on the device would be pinned"):
        pool.pin("b")
    with pytest.raises(PinnedMemoryError, match="needs 3 blocks; 1 of 3 on the device are pinned"):
        pool.add(make_adapter("widest", {"q": 48}))
    pool.unpin("a")
    pool.add(make_adapter("widest", {"q": 48}))
    assert pool.acquire("widest")


def test_pins_leave_half_of_the_host() -> None:
    pool = loaded("a", "b", "c", num_blocks=9, host_bytes=3 * ADAPTER_BYTES)
    pool.pin("a")
    with pytest.raises(PinnedMemoryError, match="in host memory would be pinned"):
        pool.pin("b")


def test_residents_tell_where_each_adapter_is() -> None:
    pool = loaded("a", "b")
    assert pool.acquire("a")
    pool.pin("b")
    pool.remove("a")
    b, a = pool.residents()
    assert (b.digest, b.is_on_device, b.is_pinned, b.num_references) == ("b", False, True, 0)
    assert (a.digest, a.is_on_device, a.is_leaving, a.num_references) == ("a", True, True, 1)
    assert a.num_bytes + b.num_bytes == pool.host_bytes_used
    assert pool.device_bytes_used == BLOCK_BYTES
    assert pool.num_copied_to_device == 1


def test_a_host_full_of_adapters_in_use_refuses_another() -> None:
    pool = loaded("a", "b", host_bytes=2 * ADAPTER_BYTES)
    assert pool.acquire("a")
    pool.pin("b")
    with pytest.raises(HostMemoryError, match="only 0 are free or idle"):
        pool.add(make_adapter("c"))
    assert pool.on_host() == ("b", "a")


def test_the_kinds_of_an_adapter_s_sites_are_known_while_it_runs() -> None:
    pool = loaded("a")
    pool.add(make_adapter("b", {"q": 2, "embed": 2}))
    assert pool.acquire("a")
    assert pool.page_list("a").site_kinds == {"qkv", "down"}
    assert pool.acquire("b")
    assert not pool.remove("b")
    assert pool.page_list("b").site_kinds == {"qkv", "embed_tokens"}


def test_strips_of_the_head_and_the_embedding_are_found_like_others() -> None:
    pool = make_pool()
    adapter = make_adapter("a", {"lm_head": 3, "embed": 20})
    pool.add(adapter)
    assert pool.acquire("a")
    first, second = pool.pages("a")
    head, embedding = pool.site_rows("lm_head"), pool.site_rows("embed_tokens")
    assert (head.piece, embedding.piece, pool.site_rows("qkv").piece) == (9, 9, 0)
    for found, expected in (
        (head.a(first, 0), adapter.modules["lm_head"].a),
        (head.b(first, 0), adapter.modules["lm_head"].b),
        (embedding.a(first, 0), adapter.modules["embed"].a[:16]),
        (embedding.a(second, 0), adapter.modules["embed"].a[16:]),
        (embedding.b(second, 0), adapter.modules["embed"].b[16:]),
    ):
        assert found is not None
        assert torch.equal(found, expected)
    assert head.b(second, 0) is None


def test_a_vocabulary_in_pieces_is_one_matrix_again() -> None:
    sites = (
        Site("o", 8, (Slice("o", 8),)),
        Site("lm_head", 8, (Slice("lm_head", 300),)),
        Site("embed_tokens", 300, (Slice("embed", 8),), "embedding"),
    )
    pool = AdapterPool(sites, 1 << 20, torch.float32, "cpu", 1 << 20)
    generator = torch.Generator().manual_seed(0)
    modules = {
        name: ModuleWeights(
            torch.randn(5, k, generator=generator), torch.randn(5, n, generator=generator)
        )
        for name, k, n in (("lm_head", 8, 300), ("embed", 300, 8))
    }
    pool.add(Adapter("a", 5, modules, 0, False))
    assert pool.acquire("a")
    (page,) = pool.pages("a")
    head, embedding = pool.site_rows("lm_head"), pool.site_rows("embed_tokens")
    assert (head.piece, head.b_entries.shape[1], embedding.a_entries.shape[1]) == (128, 3, 3)
    for found, expected in (
        (head.b(page, 0), modules["lm_head"].b),
        (embedding.a(page, 0), modules["embed"].a),
    ):
        assert found is not None
        assert torch.equal(found, expected)


def test_a_packed_adapter_takes_no_room_for_what_it_does_not_target() -> None:
    pool = make_pool()
    packed = pool.pack(make_adapter("a", {"k": 17}))
    assert packed.num_pages == 2
    assert packed.num_bytes == 512 + 256 + 2 * 256 + 2 * 8 * 16  # two pages of A and B, two rows
    assert pool.insert(packed) == ()
    assert pool.host_bytes_used == packed.num_bytes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "acquire", "release", "remove"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_random_use_leaks_no_page_and_mixes_no_weights(actions: list[tuple[str, int]]) -> None:
    pool = make_pool(num_blocks=3, host_bytes=5 * ADAPTER_BYTES)
    adapters = [make_adapter(f"x{i}", {"q": rank}) for i, rank in enumerate((1, 3, 16, 17, 20, 40))]
    references = [0] * len(adapters)
    for action, i in actions:
        digest = adapters[i].digest
        if action == "add":
            pool.add(adapters[i])
        elif action == "acquire" and pool.has(digest):
            references[i] += pool.acquire(digest)
        elif action == "release" and references[i]:
            pool.release(digest)
            references[i] -= 1
        elif action == "remove":
            assert pool.remove(digest) == (references[i] == 0)
        held = [page for d in pool.on_device() for page in pool.pages(d)]
        assert len(held) == len(set(held))
        assert len(held) + pool.num_free_blocks == 3
        for adapter, count in zip(adapters, references, strict=True):
            if count:
                assert rows_in_pool(pool, adapter)
    for adapter, count in zip(adapters, references, strict=True):
        for _ in range(count):
            pool.release(adapter.digest)
        assert pool.remove(adapter.digest)
    assert pool.num_free_blocks == 3
    assert pool.host_bytes_used == 0


def batch_of(pool: AdapterPool, *runs: tuple[str | None, int]) -> LoraBatch:
    for digest in {digest for digest, _ in runs if digest}:
        assert pool.acquire(digest)
    batch = build_lora_batch(pool, runs, "cpu")
    assert batch is not None
    return batch


def test_a_batch_without_adapters_is_none() -> None:
    assert build_lora_batch(make_pool(), [(None, 3), (None, 1)], "cpu") is None
    assert build_lora_batch(make_pool(), [], "cpu") is None


def test_the_mapping_names_the_tokens_of_each_adapter() -> None:
    pool = make_pool()
    pool.add(make_adapter("a", {"q": 2}))
    pool.add(make_adapter("b", {"q": 20, "k": 1}))
    assert pool.acquire("a")
    batch = batch_of(pool, ("b", 2), (None, 1), ("a", 1), ("b", 1))
    assert batch.owners == (0, 0, -1, 1, 0)
    of_b, of_a = batch.tokens
    assert isinstance(of_b, torch.Tensor)
    assert of_b.tolist() == [0, 1, 4]
    assert of_a == slice(3, 4)
    assert batch.deltas == (((pool.deltas("b"), 1.0),), ((pool.deltas("a"), 1.0),))
    assert batch.targets("qkv")
    assert not batch.targets("down")
    last = batch.select([1, 2, 0])
    assert last.owners == (0, -1, 0)
    assert last.tokens[1] is None


def test_adjacent_runs_of_one_adapter_are_one_run() -> None:
    assert batch_of(loaded("a"), ("a", 1), ("a", 1), ("a", 3)).tokens == (slice(0, 5),)


@pytest.mark.parametrize("repeats", [1, 10])
def test_every_token_gets_its_own_adapters_delta(repeats: int) -> None:
    pool = make_pool(num_blocks=6)
    adapters = {
        "a": make_adapter("a", {"q": 3, "k": 20, "lm_head": 1, "embed": 5}),
        "b": make_adapter("b", {"q": 16, "down": 2, "embed": 17}),
    }
    for adapter in adapters.values():
        pool.add(adapter)
    runs = [("a", 2), (None, 1), ("b", 1), (None, 2), ("a", 1)] * repeats
    owners = [digest for digest, count in runs for _ in range(count)]
    batch = batch_of(pool, *runs)
    generator = torch.Generator().manual_seed(0)
    tokens = len(owners)
    token_ids = torch.randint(0, 9, (tokens,), generator=generator)
    for site in SITES:
        widths = [part.out_features for part in site.slices]
        x = torch.randint(-2, 3, (tokens, site.in_features), generator=generator).float()
        if site.kind == "embedding":
            x = torch.nn.functional.one_hot(token_ids, site.in_features).float()
        y = torch.randint(-9, 9, (tokens, sum(widths)), generator=generator).float()
        expected = y.clone()
        for t, digest in enumerate(owners):
            for part, out in zip(site.slices, torch.split(expected[t], widths), strict=True):
                weights = adapters[digest].modules.get(part.module) if digest else None
                if weights is not None:
                    out += x[t] @ weights.a.T @ weights.b
        if site.kind == "embedding":
            apply_lora_embedding_(site, y, token_ids, batch)
        else:
            apply_lora_(site, torch.split(y, widths, dim=1), x, batch)
        assert torch.equal(y, expected), site.name


def test_a_site_that_nobody_adapts_is_left_alone() -> None:
    pool = loaded("a")
    y = torch.ones(1, 9)
    apply_lora_(HEAD, [y], torch.ones(1, 6), batch_of(pool, ("a", 1)))
    assert torch.equal(y, torch.ones(1, 9))
