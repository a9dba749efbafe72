"""The kernel that copies a file's matrices to strips writes what its reference writes."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.lora_strips import copy_strips_reference
from kernels.strip_copies import BLOCK, StripCopies, StripCopy
from kernels.triton_lora_strips import launch_copy_strips

# (rank rows, columns of the file, columns of the strip, whether the file has it transposed)
STRIPS = (
    (16, BLOCK, BLOCK, False),
    (1, 3, 3, True),
    (16, 40, 40, True),
    (8, 2 * BLOCK + 8, 2 * BLOCK + 8, True),
    (5, BLOCK + 1, BLOCK + 30, False),
    (7, 9, 16, True),
    (16, 8, 2 * BLOCK, False),
)


def make_copies(strips: tuple[tuple[int, int, int, bool], ...]) -> tuple[StripCopies, int, int]:
    """Returns copies, of which those of 16 rows are the last of rank 24, and the elements of the
    file and of the image."""
    copies, end, place = [], 0, 0
    for rows, columns, width, is_transposed in strips:
        rank = 24 if rows == 16 else rows
        strides = (1, rank) if is_transposed else (columns, 1)
        start = end + (8 * strides[0] if rank == 24 else 0)  # the last rows of the rank
        copies.append(StripCopy(start, *strides, rows, columns, width, place))
        end += rank * columns
        place += rows * width
    return StripCopies.of(copies, torch.device("cpu")), end, place


@pytest.mark.parametrize("image_type", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("file_type", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_aligned", [False, True])
def test_strips_are_those_of_the_reference(
    is_aligned: bool, file_type: torch.dtype, image_type: torch.dtype
) -> None:
    strips = tuple(s for s in STRIPS if not is_aligned or not any(size % 8 for size in s[:3]))
    copies, num_numbers, num_elements = make_copies(strips)
    assert copies.is_aligned == is_aligned
    generator = torch.Generator().manual_seed(len(strips))
    source = torch.randn(num_numbers, generator=generator).to(file_type)
    expected, found = (torch.full((num_elements,), 7.0, dtype=image_type) for _ in range(2))
    scales = torch.tensor((1.0, 0.3, -2.0)).repeat(3)[: len(strips)]
    largest = copy_strips_reference(expected, source, copies, scales)
    assert torch.equal(launch_copy_strips(found, source, copies, scales), largest)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))  # zeros are +0
    assert largest.shape == (1,)
    assert float(largest) <= float(source.abs().max())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e4])
def test_the_largest_magnitude_shows_numbers_that_are_not_finite(value: float) -> None:
    copies, num_numbers, num_elements = make_copies(STRIPS[:4])
    for place in (8 * BLOCK, num_numbers - 1):
        source = torch.ones(num_numbers, dtype=torch.float16)
        source[place] = value
        expected = abs(value) if math.isfinite(value) else math.inf
        image = torch.empty(num_elements, dtype=torch.float16)
        scales = torch.ones(4)
        assert float(copy_strips_reference(image, source, copies, scales)) == expected
        assert float(launch_copy_strips(image, source, copies, scales)) == expected
