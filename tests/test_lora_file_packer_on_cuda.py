"""A CUDA device packs a file by the plan of an earlier one, bit for bit as the full way does."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.backend import HAS_TRITON
from lora import file_packer
from lora.adapter import read_adapter
from lora.errors import AdapterError
from lora.file_packer import FilePacker
from lora.pool import AdapterPool
from tests.test_lora_convert import NAMES, SITES, TYPES, draw, write
from tests.test_lora_file_packer import assert_equal, num_plans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and HAS_TRITON), reason="needs a GPU and triton"
    ),
]


def make_packer(dtype: torch.dtype) -> tuple[FilePacker, AdapterPool]:
    pool = AdapterPool(SITES, 1 << 24, dtype, "cuda", host_bytes=1 << 26)
    return FilePacker(pool, SITES, 64, lambda name: None), pool


@pytest.mark.parametrize("ranks", [(4, 4, 4), (16, 16, 16), (8, 24, 64), (1, 17, 33)])
@pytest.mark.parametrize("pool_type", TYPES, ids=str)
@pytest.mark.parametrize("file_type", TYPES, ids=str)
def test_files_of_one_form_become_the_bits_of_the_full_way(
    file_type: torch.dtype, pool_type: torch.dtype, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    packer, pool = make_packer(pool_type)
    buffer, by_name = packer.make_buffer(), dict(zip(NAMES, ranks, strict=True))
    assert buffer.is_pinned
    for number in range(4):
        tensors = draw(by_name, dict.fromkeys(NAMES, file_type), number)
        folder = write(tmp_path / str(number), tensors, rank_pattern=by_name, lora_alpha=5)
        packed = packer.pack("found", folder, buffer)
        assert_equal(packed, pool.pack(read_adapter(folder, "full", SITES, 64)), pool)
    assert num_plans(packer) == 1


def test_threads_pack_by_one_plan_while_the_device_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer, pool = make_packer(torch.bfloat16)
    files = []
    for number in range(6):
        tensors = draw(dict.fromkeys(NAMES, 16), dict.fromkeys(NAMES, torch.bfloat16), number)
        files.append(write(tmp_path / str(number), tensors, r=16))
    expected = [pool.pack(read_adapter(one, "full", SITES, 64)) for one in files]
    packer.pack("first", files[0], packer.make_buffer())
    monkeypatch.setattr(file_packer, "read_adapter", None)
    square = torch.randn(4096, 4096, device="cuda")
    product = square @ square

    def pack(number: int) -> None:
        buffer = packer.make_buffer()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for turn in range(20):
                index = (number + turn) % len(files)
                assert_equal(packer.pack("found", files[index], buffer), expected[index], pool)

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(pack, number) for number in range(3)]
        while not all(one.done() for one in running):
            assert torch.equal(square @ square, product)
        for one in running:
            one.result()


@pytest.mark.parametrize("value", [math.nan, -math.inf, 3e38])
def test_a_bad_number_is_refused_by_name(value: float, tmp_path: Path) -> None:
    packer, _ = make_packer(torch.bfloat16)
    buffer, types = packer.make_buffer(), dict.fromkeys(NAMES, torch.bfloat16)
    packer.pack("first", write(tmp_path / "0", draw(dict.fromkeys(NAMES, 4), types)), buffer)
    tensors = draw(dict.fromkeys(NAMES, 4), types, 1)
    tensors["base_model.model.model.down_proj.lora_B.weight"][-1, -1] = value
    with pytest.raises(AdapterError, match=r"lora_B of model\.down_proj"):
        packer.pack("bad", write(tmp_path / "1", tensors), buffer)
    good = write(tmp_path / "2", draw(dict.fromkeys(NAMES, 4), types, 2))
    assert packer.pack("good", good, buffer).digest == "good"
