"""An adapter's file becomes the same bits in the pool as by the plain way, with the same
refusals."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kernels.lora_rows import ROW_BITS, UNIT_BYTES
from lora import convert, header
from lora.adapter import Adapter, read_adapter
from lora.convert import RowsCopy, copy_rows, fits, spread
from lora.errors import AdapterError
from lora.header import ReadBuffer
from lora.page_image import PackedAdapter, PageLayout
from lora.peft_config import read_peft_config
from lora.sites import Site, Slice

Tensors = dict[str, torch.Tensor]
TYPES = (torch.float32, torch.float16, torch.bfloat16)
NAMES = ("q_proj", "k_proj", "down_proj")
SITES = (
    Site("qk", 70, (Slice("model.q_proj", 133), Slice("model.k_proj", 16))),
    Site("down", 24, (Slice("model.down_proj", 64),)),
    Site("lm_head", 8, (Slice("lm_head", 9),)),
)
IN_OUT = {"q_proj": (70, 133), "k_proj": (70, 16), "down_proj": (24, 64)}


def write(folder: Path, tensors: Tensors, **fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(NAMES)}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def draw(ranks: dict[str, int], types: dict[str, torch.dtype], seed: int = 0) -> Tensors:
    """Numbers of all magnitudes that the types have, with zeros of both signs and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, rank in ranks.items():
        columns, rows = IN_OUT[name]
        for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            exponents = torch.randint(-24, 10, shape, generator=generator)
            numbers = torch.randn(shape, generator=generator) * torch.exp2(exponents.float())
            numbers.view(-1)[:2] = torch.tensor([0.0, -0.0])
            key = f"base_model.model.model.{name}.lora_{half}.weight"
            tensors[key] = numbers.to(types[name])
    return tensors


def plain_rows(folder: Path, tensors: Tensors, module: str, side: str) -> torch.Tensor:
    """[r, width] float32: the definition, one operation after the other."""
    numbers = tensors[f"base_model.model.{module}.lora_{side.upper()}.weight"].float()
    scale = read_peft_config(folder).scale_of(module)
    return numbers if side == "a" else (numbers.T * scale).contiguous()


def packed_rows(layout: PageLayout, packed: PackedAdapter, entry: int) -> torch.Tensor | None:
    """Returns the rows [r, width] of all pages, None for a strip that the adapter does not have."""
    width = layout.strips[entry].width
    rows = []
    for found in packed.entries[:, entry].tolist():
        if found:
            count, start = found & (1 << ROW_BITS) - 1, (found >> ROW_BITS) * UNIT_BYTES
            numbers = packed.image[start : start + count * width * layout.dtype.itemsize]
            rows.append(numbers.view(layout.dtype).view(count, width))
    return torch.cat(rows) if rows else None


def allocate(num_bytes: int) -> torch.Tensor:
    """Memory with other content, inside a larger allocation."""
    return torch.full((4096 + num_bytes,), 0x5A, dtype=torch.uint8)[4096:]


def read(folder: Path, buffer: ReadBuffer | None = None) -> Adapter:
    return read_adapter(folder, "digest", SITES, 64, buffer=buffer)


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def assert_bits_are_the_plain_ones(
    folder: Path, tensors: Tensors, dtype: torch.dtype, buffer: ReadBuffer | None = None
) -> None:
    layout = PageLayout(SITES, dtype)
    packed = layout.pack(read(folder, buffer), allocate)
    for entry, strip in enumerate(layout.strips):
        rows = packed_rows(layout, packed, entry)
        if strip.module == "lm_head" or strip.side == "affine":
            assert rows is None
            continue
        assert rows is not None
        numbers = plain_rows(folder, tensors, strip.module, strip.side)
        columns = numbers[:, strip.start : strip.start + strip.width].to(dtype)
        assert torch.equal(bits(rows[:, : columns.shape[1]]), bits(columns)), strip
        assert not bits(rows[:, columns.shape[1] :]).any(), strip


SCALES: list[dict[str, object]] = [
    {},
    {"lora_alpha": 4},  # a scale of one
    {"lora_alpha": 0.3},
    {"lora_alpha": -7},
    {"lora_alpha": 5, "use_rslora": True},
    {"alpha_pattern": {"k_proj": 3}},
]


@pytest.mark.parametrize("fields", SCALES, ids=str)
@pytest.mark.parametrize("pool_type", TYPES, ids=str)
@pytest.mark.parametrize("file_type", TYPES, ids=str)
def test_bits_are_those_of_the_plain_way(
    file_type: torch.dtype, pool_type: torch.dtype, fields: dict[str, object], tmp_path: Path
) -> None:
    tensors = draw(dict.fromkeys(NAMES, 4), dict.fromkeys(NAMES, file_type))
    assert_bits_are_the_plain_ones(write(tmp_path, tensors, **fields), tensors, pool_type)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.tuples(*[st.integers(1, 40)] * 3),
    types=st.tuples(*[st.sampled_from(TYPES)] * 3),
    pool_type=st.sampled_from(TYPES),
    alpha=st.floats(-40, 40),
    is_rslora=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_bits_are_those_of_the_plain_way_whatever_the_ranks_and_types(
    ranks: tuple[int, ...],
    types: tuple[torch.dtype, ...],
    pool_type: torch.dtype,
    alpha: float,
    is_rslora: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    by_name = dict(zip(NAMES, ranks, strict=True))
    tensors = draw(by_name, dict(zip(NAMES, types, strict=True)), seed)
    fields = {"rank_pattern": by_name, "lora_alpha": alpha, "use_rslora": is_rslora}
    folder = write(tmp_path_factory.mktemp("adapter"), tensors, **fields)
    assert_bits_are_the_plain_ones(folder, tensors, pool_type)


def test_tensors_at_odd_places_of_the_file_are_read(tmp_path: Path) -> None:
    """Other writers do not sort by type: float32 after an odd number of half numbers."""
    types = {"q_proj": torch.bfloat16, "k_proj": torch.float32, "down_proj": torch.float16}
    tensors = draw({"q_proj": 3, "k_proj": 5, "down_proj": 1}, types)
    fields = {"rank_pattern": {"q_proj": 3, "k_proj": 5, "down_proj": 1}}
    folder = write(tmp_path, tensors, **fields)
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
    entries, data = {}, b""
    for key, tensor in reversed(tensors.items()):
        content = bits(tensor).numpy().tobytes()
        entries[key] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(entries).encode()
    (folder / "adapter_model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + data
    )
    assert any(entry["data_offsets"][0] % 4 for entry in entries.values())  # type: ignore[index]
    assert_bits_are_the_plain_ones(folder, tensors, torch.bfloat16)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_buffer_and_threads_serve_file_after_file(
    num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_NUM_THREADS", num_threads)
    monkeypatch.setattr(header, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(header, "_MAX_KEPT_BYTES", 100_000)
    buffer = ReadBuffer(500)
    for seed, rank in enumerate((40, 3, 17, 64)):  # the last is larger than what is kept
        tensors = draw(dict.fromkeys(NAMES, rank), dict.fromkeys(NAMES, torch.float32), seed)
        folder = write(tmp_path / str(seed), tensors, r=rank)
        assert_bits_are_the_plain_ones(folder, tensors, torch.bfloat16, buffer)
    assert buffer.take(1).data_ptr() == buffer.take(80_000).data_ptr()


def test_a_buffer_inside_a_larger_allocation_holds_the_right_numbers(tmp_path: Path) -> None:
    buffer = ReadBuffer()
    buffer._memory = torch.zeros(5 * 2**20, dtype=torch.uint8)[2**20 :]
    tensors = draw(dict.fromkeys(NAMES, 4), dict.fromkeys(NAMES, torch.bfloat16))
    assert_bits_are_the_plain_ones(write(tmp_path, tensors), tensors, torch.bfloat16, buffer)


def test_packed_adapters_outlive_the_buffer(tmp_path: Path) -> None:
    layout, buffer = PageLayout(SITES, torch.float16), ReadBuffer()
    types = dict.fromkeys(NAMES, torch.float16)
    folders = [
        write(tmp_path / str(seed), draw(dict.fromkeys(NAMES, 4), types, seed)) for seed in range(2)
    ]
    first = layout.pack(read(folders[0], buffer), allocate)
    before = bits(first.image).clone()
    layout.pack(read(folders[1], buffer), allocate)
    assert torch.equal(first.image, before)


@pytest.mark.parametrize("half", ["A", "B"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_number_that_is_not_finite_is_found_wherever_it_is(
    dtype: torch.dtype,
    place: int,
    value: float,
    half: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(header, "_CHUNK_BYTES", 256)
    monkeypatch.setattr(convert, "_NUM_THREADS", 2)
    tensors = draw(dict.fromkeys(NAMES, 4), dict.fromkeys(NAMES, dtype))
    tensors[f"base_model.model.model.k_proj.lora_{half}.weight"].view(-1)[place] = value
    reason = rf"^lora_{half} of model\.k_proj holds NaN or infinity$"
    with pytest.raises(AdapterError, match=reason):
        read(write(tmp_path, tensors))


def test_the_first_bad_module_is_named_and_nan_goes_before_overflow(tmp_path: Path) -> None:
    tensors = draw(dict.fromkeys(NAMES, 4), dict.fromkeys(NAMES, torch.float32))
    tensors["base_model.model.model.down_proj.lora_A.weight"][0, 0] = math.nan
    tensors["base_model.model.model.k_proj.lora_B.weight"][2, 1] = -2e38
    overflow = r"^lora_B of model\.k_proj times its scale 2\.0 overflows float32$"
    with pytest.raises(AdapterError, match=overflow):
        read(write(tmp_path / "1", tensors))
    tensors["base_model.model.model.q_proj.lora_B.weight"][2, 1] = math.inf
    with pytest.raises(AdapterError, match=r"lora_B of model\.q_proj holds NaN or infinity"):
        read(write(tmp_path / "2", tensors))


LARGEST_HALF = torch.finfo(torch.float16).max


@pytest.mark.parametrize(
    ("value", "alpha", "is_refused"),
    [
        (LARGEST_HALF, 4, False),
        (LARGEST_HALF + 1, 4, True),  # it would round down to a number that fits
        (LARGEST_HALF / 3, 12, False),
        (LARGEST_HALF / 2, 8.001, True),
        (-LARGEST_HALF * 8, 0.5, False),
        (-LARGEST_HALF * 8.01, 0.5, True),
    ],
)
def test_numbers_beyond_the_pools_type_are_refused_as_float32_shows_them(
    value: float, alpha: float, is_refused: bool, tmp_path: Path
) -> None:
    tensors = draw(dict.fromkeys(NAMES, 4), dict.fromkeys(NAMES, torch.float32))
    tensors["base_model.model.model.k_proj.lora_B.weight"][1, 1] = value
    folder = write(tmp_path, tensors, lora_alpha=alpha)
    scaled = plain_rows(folder, tensors, "model.k_proj", "b")
    assert bool(scaled.abs().max() > LARGEST_HALF) == is_refused
    if is_refused:
        reason = r"^lora_B of model\.k_proj, with its scale, overflows torch\.float16$"
        with pytest.raises(AdapterError, match=reason):
            PageLayout(SITES, torch.float16).pack(read(folder), allocate)
    else:
        assert_bits_are_the_plain_ones(folder, tensors, torch.float16)


@settings(max_examples=200, deadline=None)
@given(
    numbers=st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=4),
    scale=st.floats(-(2.0**20), 2.0**20),
    dtype=st.sampled_from(TYPES),
)
def test_fits_is_the_comparison_of_every_number(
    numbers: list[float], scale: float, dtype: torch.dtype
) -> None:
    tensor = torch.tensor([numbers])
    expected = bool(((tensor * scale).abs() <= torch.finfo(dtype).max).all())
    assert fits(tensor, scale, dtype) == expected


def test_many_matrices_of_several_types_are_copied_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    copies = []
    for i in range(70):
        numbers = torch.randn(7 + i, 1 + i % 5, generator=generator).to(TYPES[i % 3])
        rows = torch.empty(1 + i % 5, 7 + i, dtype=TYPES[i % 2])
        copies.append(RowsCopy(rows, numbers.T, (1.0, 0.3)[i % 4 == 0]))
    copy_rows(copies)
    for copy in copies:
        expected = (copy.numbers.float() * copy.scale).to(copy.rows.dtype)
        assert torch.equal(bits(copy.rows), bits(expected))


def test_work_is_spread_over_threads_that_compute_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_NUM_THREADS", 4)
    own = torch.get_num_threads()
    results = spread(lambda item: (item, torch.get_num_threads(), threading.get_ident()), range(10))
    assert sorted(item for item, _, _ in results) == list(range(10))
    assert {count for _, count, _ in results} == {1}
    assert threading.get_ident() not in {thread for _, _, thread in results}
    assert torch.get_num_threads() == own
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [own]


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_NUM_THREADS", 2)

    def fail(item: int) -> None:
        if item == 3:
            raise AdapterError("three")

    with pytest.raises(AdapterError, match="three"):
        spread(fail, range(5))
