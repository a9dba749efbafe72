"""The host tier of KV on a CUDA device: order of the copies, restored blocks, tokens, and kernels
on blocks beyond 2^32 elements of one tensor."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.block_copies import CudaBlockCopier, allocate_slots
from engine.kv_cache import KVCache
from engine.runner import ModelRunner
from engine.types import Request
from kernels.host_words import copy_to_device, copy_to_host
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from tests.attention_factory import Batch, make_batch
from tests.engine_agreement import PARAMS, Reply, make_adapters, make_engine, run_all
from tests.engine_helpers import make_base, make_runner, random_prompt
from tests.kv_host_helpers import always_copies, check_no_leak
from tests.test_attention_on_cuda import DECODES, MIXED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_LONG = 200_000_000  # cycles of a device that does nothing: some 0.1 s
_HOST = 64 << 20  # bytes
_FAR = (1 << 32) + (1 << 28)  # elements: neither int32 nor uint32 counts them


# -- copies ----------------------------------------------------------------------------------------


def open_copier(num_layers: int = 32) -> tuple[CudaBlockCopier, KVCache]:
    """Returns a copier of blocks of 16 KiB for K and for V of each layer."""
    blocks = torch.zeros((64, 2 * num_layers << 14), dtype=torch.uint8, device="cuda")
    layers = tuple(blocks.view(-1, 1, 1, 1 << 14)[i:] for i in range(2 * num_layers))
    kv = KVCache(layers[:num_layers], layers[num_layers:], (0,) * num_layers, blocks)
    return CudaBlockCopier(kv, allocate_slots(blocks[:32].nbytes, kv)), kv


@pytest.mark.parametrize(
    ("num_layers", "in_parts"), [(32, False), (1, True), (3, True), (4, True), (30, True)]
)
@pytest.mark.parametrize("order", [1, -1])
def test_blocks_come_back_equal_to_the_bit(num_layers: int, in_parts: bool, order: int) -> None:
    copier, kv = open_copier(num_layers)
    assert kv.blocks is not None
    kv.blocks.random_(0, 256)
    before = kv.blocks.clone()
    blocks, slots = [5, 6, 7, 9, 3, 2, 40], [0, 1, 2, 3, 31, 30, 17]
    copier.store(blocks, slots).synchronize()
    kv.blocks.zero_()
    loaded = copier.load(slots[::order], blocks[::order], in_parts=in_parts)
    loaded.synchronize()
    assert torch.equal(kv.blocks[blocks], before[blocks])
    others = [block for block in range(64) if block not in blocks]
    assert not kv.blocks[others].any()
    assert loaded.seconds() > 0


def test_a_store_begins_after_the_steps_that_were_launched() -> None:
    copier, kv = open_copier()
    assert kv.blocks is not None
    torch.cuda._sleep(_LONG)
    kv.blocks[3].fill_(7)
    copy = copier.store([3], [5])
    assert not copy.query()
    copy.synchronize()
    assert bool((copier._host[5] == 7).all())


def test_steps_that_are_told_to_begin_after_a_store() -> None:
    copier, kv = open_copier()
    assert kv.blocks is not None
    kv.blocks[3].fill_(7)
    torch.cuda.synchronize()
    with torch.cuda.stream(copier._stream):
        torch.cuda._sleep(_LONG)
    copy = copier.store([3], [5])
    copier.hold_steps(copy)
    kv.blocks[3].fill_(9)
    torch.cuda.synchronize()
    assert bool((copier._host[5] == 7).all())
    assert bool((kv.blocks[3] == 9).all())


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_load_begins_after_the_steps_that_read_its_blocks(in_parts: bool) -> None:
    copier, kv = open_copier()
    assert kv.blocks is not None
    kv.blocks[3].fill_(7)
    copier.store([3], [5]).synchronize()
    kv.blocks[4].fill_(1)
    torch.cuda._sleep(_LONG)
    read = kv.blocks[4].clone()
    copier.load([5], [4], in_parts=in_parts).synchronize()
    assert bool((read == 1).all())
    assert bool((kv.blocks[4] == 7).all())


def test_layers_are_read_after_their_part_and_before_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copier, kv = open_copier(16)
    assert kv.blocks is not None
    kv.blocks.fill_(7)
    copier.store([3], [5]).synchronize()
    kv.blocks.fill_(1)
    marks: list[torch.cuda.Event] = []
    mark = copier._mark

    def mark_and_wait() -> torch.cuda.Event:
        marks.append(mark())
        if len(marks) == 3:  # after the begin and two of eight parts
            with torch.cuda.stream(copier._stream):
                torch.cuda._sleep(_LONG)
        return marks[-1]

    monkeypatch.setattr(copier, "_mark", mark_and_wait)
    copy = copier.load([5], [3], in_parts=True)
    copier.hold_steps(copy)
    found: list[torch.Tensor] = []
    for layer in range(16):
        if layer == 4:
            torch.cuda.current_stream().synchronize()
            assert not copy.query()
        kv.arrivals.wait(layer)
        found += [kv.k[layer][3 * 32].clone(), kv.v[layer][3 * 32].clone()]
    torch.cuda.synchronize()
    assert all(bool((one == 7).all()) for one in found)


def test_a_graph_begins_after_all_parts() -> None:
    copier, kv = open_copier(4)
    assert kv.blocks is not None
    kv.blocks[3].fill_(7)
    copier.store([3], [5]).synchronize()
    with torch.cuda.stream(copier._stream):
        torch.cuda._sleep(_LONG)
    copier.hold_steps(copier.load([5], [4], in_parts=True))
    kv.arrivals.wait_for_all()
    read = kv.blocks[4].clone()
    torch.cuda.synchronize()
    assert bool((read == 7).all())


def test_steps_write_no_block_before_the_stores_in_front_of_a_load_in_parts() -> None:
    copier, kv = open_copier(4)
    assert kv.blocks is not None
    kv.blocks[3].fill_(7)
    with torch.cuda.stream(copier._stream):
        torch.cuda._sleep(_LONG)
    copier.store([3], [5])
    copier.hold_steps(copier.load([6], [4], in_parts=True))
    kv.blocks[3].fill_(1)  # as K of the first layer, which a step writes before it reads the layer
    torch.cuda.synchronize()
    assert bool((copier._host[5] == 7).all())


def test_the_numbers_of_a_step_do_not_wait_for_blocks() -> None:
    copier, _ = open_copier()
    words = torch.arange(5000, dtype=torch.int32).pin_memory()
    back = torch.zeros_like(words).pin_memory()
    on_device = torch.zeros_like(words, device="cuda")
    blocks = range(32)
    for turn in range(2):  # the first one compiles
        on_device.zero_()
        back.zero_()
        copies = [copier.load(blocks, blocks) for _ in range(40)]
        copies += [copier.store(blocks, blocks) for _ in range(40)]
        copy_to_device(words, on_device)
        copy_to_host(on_device, back)
        torch.cuda.current_stream().synchronize()
        if turn:
            assert not copies[-1].query()
        assert torch.equal(back, words)
        copies[-1].synchronize()


# -- engines ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64: on Hopper bf16 takes the Gluon kernels."""
    return make_base(
        tmp_path_factory.mktemp("models") / "base",
        num_hidden_layers=2,
        head_dim=64,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_adapters(base)


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def open_runner(
    base: Path, adapters: dict[str, Path], dtype: str, num_blocks: int, host: int
) -> ModelRunner:
    runner = make_runner(
        base, "cuda", dtype=dtype, max_num_seqs=8, num_blocks=num_blocks, kv_host_bytes=host
    )
    for name, path in adapters.items():
        runner.load_adapter(name, path)
    return runner


def requests(turn: int) -> list[Request]:
    """Returns requests of lengths at which no full block has a token of the answer: such a block is
    computed in steps of other sizes when its request comes again, with other roundings."""
    owners = (None, "all", "wide")
    return [
        Request(f"{turn} {i}", tuple(random_prompt(97 + i % 8, seed=i)), PARAMS, owners[i % 3])
        for i in range(9)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restored_blocks_are_those_that_were_computed(
    base: Path, adapters: dict[str, Path], dtype: str
) -> None:
    runner = open_runner(base, adapters, dtype, 40, _HOST)
    engine = make_engine(runner, max_num_batched_tokens=256, max_num_seqs=8)
    always_copies(engine)
    pool, blocks = engine._blocks, runner._kv.blocks
    assert blocks is not None
    seen: dict[bytes, torch.Tensor] = {}
    for turn in range(3):
        for request in requests(turn):
            run_all(engine, [request])
            torch.cuda.synchronize()
            for name, block in pool._block_of.items():
                assert torch.equal(blocks[block], seen.setdefault(name, blocks[block].clone()))
    load = engine.load().kv_host
    assert load.hit_tokens > 9 * 40
    assert load.load_s > 0 < load.store_s
    check_no_leak(engine)


def test_tokens_are_those_of_an_engine_with_room(base: Path, adapters: dict[str, Path]) -> None:
    """Prefixes leave the device and return, and sequences are preempted, in fp32."""

    def answers(num_blocks: int, host: int) -> dict[str, Reply]:
        runner = open_runner(base, adapters, "float32", num_blocks, host)
        engine = make_engine(runner, max_num_batched_tokens=128, max_num_seqs=8)
        if host:
            always_copies(engine)
        found: dict[str, Reply] = {}
        for turn in range(3):
            longer = [replace(one, params=replace(PARAMS, max_tokens=40)) for one in requests(turn)]
            found |= run_all(engine, longer)
        load = engine.load()
        if host:
            assert load.num_preemptions
            assert load.kv_host.loaded_bytes
            check_no_leak(engine)
        else:
            assert not load.num_preemptions
        return found

    expected, found = answers(400, 0), answers(44, _HOST)
    for name, reply in expected.items():
        assert reply.error is None
        assert found[name].tokens == reply.tokens


# -- kernels on far blocks -------------------------------------------------------------------------


def far_cache(kv_heads: int, dim: int, block_size: int) -> torch.Tensor:
    """Returns [entries, block_size, Hkv, D] bf16 of more elements than 32 bits count."""
    per_entry = block_size * kv_heads * dim
    if torch.cuda.mem_get_info()[0] < 3 * _FAR:
        pytest.skip("needs 13 GB of device memory")
    shape = (_FAR // per_entry, block_size, kv_heads, dim)
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def far_batch(near: Batch, num_layers: int, layer: int) -> Batch:
    """Returns the batch on contiguous blocks at the end of a cache of one tensor."""
    count, block_size, kv_heads, dim = near.k_cache.shape
    whole = far_cache(kv_heads, dim, block_size)
    stride = 2 * num_layers
    first = whole.shape[0] // stride - count
    k, v = whole[layer:], whole[num_layers + layer :]
    for block in range(count):
        entry = (first + block) * stride
        k[entry], v[entry] = near.k_cache[block], near.v_cache[block]
    return replace(near, k_cache=k, v_cache=v, tables=(near.tables + first) * stride)


@pytest.mark.parametrize("dim", [64, 128, 256])  # 256: Triton's kernels, on Hopper too
@pytest.mark.parametrize("window", [None, 100])
def test_attention_reads_far_blocks_of_a_layer(dim: int, window: int | None) -> None:
    near = make_batch(MIXED + DECODES, 8, 2, dim, 16, torch.bfloat16, "cuda")
    expected = near.run(window)
    assert torch.equal(far_batch(near, 3, 2).run(window), expected)


def test_k_and_v_are_written_to_far_blocks_of_a_layer() -> None:
    heads, kv_heads, dim, size = 8, 2, 128, 16
    whole = far_cache(kv_heads, dim, size)
    k, v = whole[2:], whole[5:]  # the last of three layers
    tokens = 40
    torch.manual_seed(0)
    shape = (tokens, (heads + 2 * kv_heads) * dim)
    qkv = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda")
    cos_sin = torch.randn((64, 2, dim // 2), device="cuda")
    near_k, near_v = (
        torch.zeros((3, size, kv_heads, dim), dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    near = RopeWrite(positions, cos_sin, near_k, near_v, positions, heads, kv_heads, dim)
    first = (whole.shape[0] // 6 - 3) * 6
    slots = (first + positions // size * 6) * size + positions % size
    far = near._replace(k_cache=k, v_cache=v, slots=slots)
    assert torch.equal(rope_kv_write(qkv, near), rope_kv_write(qkv, far))
    for block in range(3):
        filled = min(size, tokens - block * size)
        assert torch.equal(k[first + 6 * block, :filled], near_k[block, :filled])
        assert torch.equal(v[first + 6 * block, :filled], near_v[block, :filled])
