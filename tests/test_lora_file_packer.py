"""A file that is packed by the plan of an earlier one becomes the same bits as by the full way,
with the same refusals."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from io import FileIO
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora import file_packer, header
from lora.adapter import read_adapter
from lora.errors import AdapterError
from lora.file_packer import FileForm, FilePacker
from lora.header import ReadBuffer
from lora.page_image import PackedAdapter
from lora.pool import AdapterPool
from tests.test_lora_convert import NAMES, SITES, TYPES, Tensors, bits, draw, write

WEIGHTS = "adapter_model.safetensors"


def make_packer(dtype: torch.dtype = torch.bfloat16) -> tuple[FilePacker, AdapterPool]:
    pool = AdapterPool(SITES, 1 << 24, dtype, "cpu", host_bytes=1 << 26)
    return FilePacker(pool, SITES, 64, lambda name: None), pool


def num_plans(packer: FilePacker) -> int:
    return sum(plan is not None for plan in packer._plans.values())


def assert_equal(found: PackedAdapter, expected: PackedAdapter, pool: AdapterPool) -> None:
    assert torch.equal(found.entries, expected.entries)
    assert found.num_bytes == expected.num_bytes
    assert (found.num_blocks, found.site_kinds) == (expected.num_blocks, expected.site_kinds)
    # The bytes between two strips are any.
    blank = torch.zeros_like(found.memory), torch.zeros_like(expected.memory)
    for image, packed in zip(blank, (found, expected), strict=True):
        for entry in set(packed.entries.flatten().tolist()) - {0}:
            start, rows = entry >> 5 << 8, entry & 31
            width = next(
                pool._layout.strips[column].width
                for column in range(len(pool._layout.strips))
                if entry in packed.entries[:, column].tolist()
            )
            end = start + rows * width * pool.dtype.itemsize
            image[start:end] = packed.memory[start:end]
    assert torch.equal(*blank)
    assert blank[0].any()


def full(pool: AdapterPool, folder: Path) -> PackedAdapter:
    return pool.pack(read_adapter(folder, "full", SITES, 64))


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.tuples(*[st.integers(1, 40)] * 3),
    file_type=st.sampled_from(TYPES),
    pool_type=st.sampled_from(TYPES),
    alpha=st.floats(-40, 40),
    seed=st.integers(0, 2**32),
)
def test_files_of_one_form_become_the_bits_of_the_full_way(
    ranks: tuple[int, ...],
    file_type: torch.dtype,
    pool_type: torch.dtype,
    alpha: float,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    packer, pool = make_packer(pool_type)
    buffer, by_name = ReadBuffer(), dict(zip(NAMES, ranks, strict=True))
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(3):
        tensors = draw(by_name, dict.fromkeys(NAMES, file_type), seed + number)
        fields = {"rank_pattern": by_name, "lora_alpha": alpha + number}
        one = write(folder / str(number), tensors, **fields)
        packed = packer.pack(f"digest {number}", one, buffer)
        assert packed.digest == f"digest {number}"
        assert_equal(packed, full(pool, one), pool)
        assert num_plans(packer) == 1
    other = write(folder / "other", tensors, rank_pattern=by_name, use_rslora=True)
    assert_equal(packer.pack("other", other, buffer), full(pool, other), pool)
    assert num_plans(packer) == 2


def halves(seed: int = 0) -> Tensors:
    return draw(dict.fromkeys(NAMES, 4), dict.fromkeys(NAMES, torch.float16), seed)


def planned(tmp_path: Path) -> FilePacker:
    """Returns a packer that knows the form of `halves`."""
    packer, _ = make_packer(torch.float16)
    packer.pack("first", write(tmp_path / "first", halves()), ReadBuffer())
    assert num_plans(packer) == 1
    return packer


def test_a_plan_is_what_packs_the_second_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer = planned(tmp_path)
    monkeypatch.setattr(file_packer, "read_adapter", None)
    monkeypatch.setattr(header, "_CHUNK_BYTES", 100)
    packed = packer.pack("second", write(tmp_path / "second", halves(1)), ReadBuffer())
    assert packed.digest == "second"


@pytest.mark.parametrize("half", ["A", "B"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_name(
    value: float, half: str, tmp_path: Path
) -> None:
    packer, tensors = planned(tmp_path), halves(1)
    tensors[f"base_model.model.model.k_proj.lora_{half}.weight"].view(-1)[-1] = value
    reason = rf"^lora_{half} of model\.k_proj holds NaN or infinity$"
    with pytest.raises(AdapterError, match=reason):
        packer.pack("bad", write(tmp_path / "bad", tensors), ReadBuffer())
    packer.pack("good", write(tmp_path / "good", halves(2)), ReadBuffer())


def test_a_number_that_overflows_with_its_scale_is_refused_by_name(tmp_path: Path) -> None:
    packer, tensors = planned(tmp_path), halves(1)
    largest = torch.finfo(torch.float16).max
    tensors["base_model.model.model.k_proj.lora_A.weight"][1, 1] = largest
    assert packer.pack("fits", write(tmp_path / "fits", tensors), ReadBuffer()).digest == "fits"
    tensors["base_model.model.model.k_proj.lora_B.weight"][1, 1] = largest  # times 2
    with pytest.raises(AdapterError, match=r"lora_B of model\.k_proj, with its scale, overflows"):
        packer.pack("bad", write(tmp_path / "bad", tensors), ReadBuffer())
    with pytest.raises(AdapterError, match="lora_alpha must be a finite number"):
        packer.pack("bad", write(tmp_path / "bad", tensors, lora_alpha="4"), ReadBuffer())
    packer.pack("fits", write(tmp_path / "bad", tensors, lora_alpha=4), ReadBuffer())
    assert num_plans(packer) == 1


def test_a_file_that_was_cut_or_left_its_folder_is_refused(tmp_path: Path) -> None:
    packer = planned(tmp_path)
    cut = write(tmp_path / "cut", halves(1))
    content = (cut / WEIGHTS).read_bytes()
    (cut / WEIGHTS).write_bytes(content[:-2])
    with pytest.raises(AdapterError, match="bytes"):
        packer.pack("cut", cut, ReadBuffer())
    (cut / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=f"no {WEIGHTS}"):
        packer.pack("cut", cut, ReadBuffer())
    (cut / WEIGHTS).symlink_to(tmp_path / "first" / WEIGHTS)
    with pytest.raises(AdapterError, match="leaves the folder"):
        packer.pack("cut", cut, ReadBuffer())
    assert num_plans(packer) == 1


def after_the_form(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Has files change between the look at their form and the read of their numbers."""
    form_of = file_packer._form_of

    def changed(fields: dict[str, object], file: FileIO) -> FileForm:
        form = form_of(fields, file)
        change()
        return form

    monkeypatch.setattr(file_packer, "_form_of", changed)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer, folder = planned(tmp_path), write(tmp_path / "second", halves(1))
    after_the_form(monkeypatch, lambda: os.truncate(folder / WEIGHTS, 600))
    with pytest.raises(AdapterError, match=r"truncated|bytes"):
        packer.pack("second", folder, ReadBuffer())


def test_a_file_that_vanishes_or_fails_is_refused_as_by_the_full_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer, folder = planned(tmp_path), write(tmp_path / "second", halves(1))

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        with pytest.raises(AdapterError, match="cannot be read: Input/output error"):
            packer.pack("second", folder, ReadBuffer())
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=f"no {WEIGHTS}"):
        packer.pack("second", folder, ReadBuffer())


def test_a_file_that_is_replaced_is_read_to_its_end_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer, folder = planned(tmp_path), write(tmp_path / "second", halves(1))
    expected = full(AdapterPool(SITES, 1 << 24, torch.float16, "cpu", host_bytes=1 << 26), folder)
    other = draw(dict.fromkeys(NAMES, 4), dict.fromkeys(NAMES, torch.float32))
    replacement = write(tmp_path / "other", other) / WEIGHTS
    after_the_form(monkeypatch, lambda: replacement.replace(folder / WEIGHTS))
    packed = packer.pack("second", folder, ReadBuffer())
    assert_equal(packed, expected, packer._pool)


def test_the_order_of_patterns_is_part_of_a_form(tmp_path: Path) -> None:
    packer, patterns = planned(tmp_path), {"q_proj": 4, ".*_proj": 8}
    first = write(tmp_path / "1", halves(), r=4, rank_pattern={"q_proj": 4, ".*_none": 8})
    packer.pack("first", first, ReadBuffer())
    tensors = draw({"q_proj": 4, "k_proj": 8, "down_proj": 8}, dict.fromkeys(NAMES, torch.float16))
    packer.pack("first", write(tmp_path / "2", tensors, rank_pattern=patterns), ReadBuffer())
    turned = dict(reversed(patterns.items()))
    with pytest.raises(AdapterError, match=r"model\.q_proj has rank 4, adapter_config.json has 8"):
        packer.pack("second", write(tmp_path / "3", tensors, rank_pattern=turned), ReadBuffer())


def test_the_order_of_module_names_is_no_part_of_a_form(tmp_path: Path) -> None:
    """PEFT keeps them in a set, whose order depends on the hashes of the training process."""
    packer, pool = make_packer(torch.float16)
    for number, names in enumerate(permutations(NAMES)):
        excluded = ["x_proj", "y_proj"][:: (-1) ** number]
        fields = {"target_modules": list(names), "exclude_modules": excluded}
        folder = write(tmp_path / str(number), halves(number), **fields)
        assert_equal(packer.pack("found", folder, ReadBuffer()), full(pool, folder), pool)
    assert num_plans(packer) == 1
    for odd in ([*NAMES, 1], [*NAMES, None], {"q_proj": 1}, ["q_proj", "k_proj"]):
        folder = write(tmp_path / "odd", halves(), target_modules=odd)
        with pytest.raises(AdapterError, match="target_modules"):
            packer.pack("odd", folder, ReadBuffer())


def test_a_scale_beyond_float32_is_refused_by_name(tmp_path: Path) -> None:
    packer = planned(tmp_path)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in halves().items()}
    for alpha in (1e300, -1.6e39):
        with pytest.raises(AdapterError, match=r"scale of model\.\w+, .* overflows float32"):
            packer.pack("bad", write(tmp_path / "bad", zeros, lora_alpha=alpha), ReadBuffer())


def test_a_buffer_that_could_not_be_locked_is_read_by_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: torch.Tensor) -> None:
        raise RuntimeError("no more memory can be locked")

    packer, folder = planned(tmp_path), write(tmp_path / "second", halves(1))
    buffer = ReadBuffer(is_pinned=True)
    assert buffer.is_pinned
    monkeypatch.setattr(header, "register", refuse)
    monkeypatch.setattr(packer._pool, "device", torch.device("cuda"))
    monkeypatch.setattr(file_packer, "copy_strips", None)
    assert packer._try_plan(folder, buffer)[1] is None
    assert not buffer.is_pinned


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), OSError("disk")])
def test_a_plan_that_cannot_be_made_costs_no_adapter(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    packer, pool = make_packer(torch.float16)
    monkeypatch.setattr(file_packer.StripCopies, "of", fail)
    folder = write(tmp_path / "first", halves())
    assert_equal(packer.pack("first", folder, ReadBuffer()), full(pool, folder), pool)
    assert not packer._plans


def test_a_device_without_memory_for_a_plan_costs_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    packer, folder = planned(tmp_path), write(tmp_path / "second", halves(1))
    with monkeypatch.context() as patched:
        patched.setattr(file_packer, "copy_strips", fail)
        packed = packer.pack("second", folder, ReadBuffer())
    assert_equal(packed, full(packer._pool, folder), packer._pool)
    assert num_plans(packer) == 1
    monkeypatch.setattr(file_packer, "read_adapter", None)
    assert packer.pack("second", folder, ReadBuffer()).digest == "second"


def test_types_that_differ_and_files_beyond_the_buffer_have_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer, pool = make_packer()
    types = dict(zip(NAMES, TYPES, strict=True))
    mixed = write(tmp_path / "mixed", draw(dict.fromkeys(NAMES, 4), types))
    for _ in range(2):
        assert_equal(packer.pack("mixed", mixed, ReadBuffer()), full(pool, mixed), pool)
    monkeypatch.setattr(header, "_MAX_KEPT_BYTES", 100)
    large = write(tmp_path / "large", halves())
    assert_equal(packer.pack("large", large, ReadBuffer()), full(pool, large), pool)
    assert num_plans(packer) == 0


def test_the_newest_plans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_packer, "_MAX_PLANS", 2)
    packer, _ = make_packer()
    for alpha in (1, 2, 3, 1):
        folder = write(tmp_path / str(alpha), halves(), alpha_pattern={"q_proj": alpha})
        packer.pack("one", folder, ReadBuffer())
    assert num_plans(packer) == 2


def test_a_plan_keeps_no_adapter_in_memory(tmp_path: Path) -> None:
    packer = planned(tmp_path)
    (plan,) = packer._plans.values()
    assert not plan.packed.memory.numel()
    assert not bits(plan.packed.memory).numel()
