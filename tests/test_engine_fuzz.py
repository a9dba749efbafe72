"""Random engines with copies that take real time; `python -m tests.benchmarks.engine_fuzz`
runs thousands of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.engine_fuzz import fuzz_one


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Mutes the tracebacks of steps that fail on purpose."""
    logging.getLogger("engine.core").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("engine.core").setLevel(logging.NOTSET)


def test_random_engines_keep_their_promises_with_copies_that_take_time() -> None:
    counts: Counter[str] = Counter()
    for seed in range(12, 18):
        counts.update(fuzz_one(seed))
    # Else it would show nothing.
    assert {what for what, count in counts.items() if not count} == set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_engines_keep_their_promises_with_the_copies_of_a_device() -> None:
    for seed in range(40):
        fuzz_one(seed, "cuda")
