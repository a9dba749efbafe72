"""The Triton kernels in Triton's interpreter, on a machine without a GPU.

Triton decides at import whether a kernel is compiled or interpreted, so these tests have a process
of their own. The interpreter is wrong in bf16 arithmetic (triton issue 11584): float16 and float32
alone are tried here, the rest where a GPU is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreter"


# The start of a process with transformers and PEFT takes ten seconds: files share two of them, of
# half a minute each.
NUM_PROCESSES = 2
FILES = sorted(FOLDER.glob("test_*.py"))
SHARES = [FILES[number::NUM_PROCESSES] for number in range(NUM_PROCESSES)]


@pytest.mark.parametrize("files", SHARES, ids=range(NUM_PROCESSES))
def test_kernels_in_the_interpreter(files: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=FOLDER.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
