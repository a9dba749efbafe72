"""The Triton kernels in Triton's interpreter, on a machine without a GPU.

Triton decides at import whether a kernel is compiled or interpreted, so these tests have a process
of their own. The interpreter is wrong in bf16 arithmetic (triton issue 11584): float16 and float32
alone are tried here, the rest where a GPU is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreter"

Runs = dict[Path, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Runs the selected files, one process per core: each is busy in Python, so that two cores
    halve the time."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function)]
    files = [i.callspec.params["file"] for i in items if i.module is request.module]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        yield {file: pool.submit(run, file) for file in files}
    finally:
        pool.shutdown(cancel_futures=True)


def run(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=FOLDER.parent.parent,
    )


@pytest.mark.parametrize("file", sorted(FOLDER.glob("test_*.py")), ids=lambda file: file.stem)
def test_kernels_in_the_interpreter(file: Path, runs: Runs) -> None:
    result = runs[file].result()
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
