"""Copies of a step's numbers by a kernel, interpreted."""

from __future__ import annotations

import pytest
import torch

from kernels.host_words import copy_to_device, copy_to_host


@pytest.mark.parametrize("count", [0, 1, 31, 1024, 1025, 5000])
def test_words_arrive_and_no_others_change(count: int) -> None:
    words = torch.arange(1, count + 1, dtype=torch.int32)
    device, host = (torch.full((count + 7,), -1, dtype=torch.int32) for _ in range(2))
    copy_to_device(words, device[:count])
    copy_to_host(device[:count], host[:count])
    for copied in (device, host):
        assert torch.equal(copied[:count], words)
        assert bool((copied[count:] == -1).all())
