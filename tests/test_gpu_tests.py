"""The division of the tests that need CUDA devices, and their runs, with tests that need none."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.gpu import TESTS, Run, collect, divide, outcomes, run_all, wait

LOG = """\
[gw0] [  3%] PASSED tests/test_a_on_cuda.py::test_kernel[64 rows]
tests/test_a_on_cuda.py::test_other
[gw11] [ 66%] PASSED tests/test_a_on_cuda.py::test_other
[gw1] [100%] FAILED tests/test_b_on_cuda.py::TestEngine::test_b
[gw11] [ 66%] ERROR tests/test_a_on_cuda.py::test_other
"""


def test_tests_that_share_an_engine_stay_together() -> None:
    kernels = [f"tests/test_attention_on_cuda.py::test_a[{number}]" for number in range(9)]
    engines = [f"tests/test_engine_on_cuda.py::test_e[{number}]" for number in range(4)]
    copies = [f"tests/test_kv_host_on_cuda.py::test_k[{number}]" for number in range(3)]
    first, second = divide([*kernels, *engines, *copies], 2)
    assert sorted(first + second) == sorted([*kernels, *engines, *copies])
    assert {len(first), len(second)} == {8}
    assert set(engines) <= set(first)
    assert set(copies) <= set(second)


def test_the_outcomes_of_a_log_are_those_of_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    assert outcomes(log) == {
        "tests/test_a_on_cuda.py::test_kernel[64 rows]": "PASSED",
        "tests/test_a_on_cuda.py::test_other": "ERROR",
        "tests/test_b_on_cuda.py::TestEngine::test_b": "FAILED",
    }


def test_tests_run_on_all_devices_and_end_at_the_limit(tmp_path: Path) -> None:
    ids = collect("not gpu", [TESTS / "test_serve_limits.py"])
    few = [one for one in ids if "max_min_fair" in one or "cancelled_while" in one]
    found = run_all(few, 2, tmp_path, time.monotonic() + 600)
    assert found == dict.fromkeys(few, "PASSED")
    assert (tmp_path / "gpu0.log").exists()
    assert (tmp_path / "gpu1.log").exists()
    assert run_all(few, 2, tmp_path, time.monotonic()) == {}


def test_an_interrupted_wait_leaves_no_run_behind(tmp_path: Path) -> None:
    """The first of the runs raises what Ctrl-C does."""

    class Interrupted(subprocess.Popen[bytes]):
        is_waited = False

        def wait(self, timeout: float | None = None) -> int:
            self.is_waited, was_waited = True, self.is_waited
            if not was_waited:
                raise KeyboardInterrupt
            return super().wait(timeout)

    command = ["sleep", "600"]
    first = Interrupted(command, start_new_session=True)
    second = subprocess.Popen(command, start_new_session=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait([Run(one, tmp_path) for one in (first, second)], time.monotonic() + 600)
        assert [first.poll(), second.poll()] == [-signal.SIGKILL] * 2
    finally:
        for one in (first, second):
            one.kill()
            one.wait()


def test_a_marker_without_tests_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no test marked 'gpu'"):
        collect("gpu", [TESTS / "test_serve_limits.py"])
