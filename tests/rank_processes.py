"""Ranks as processes of a test or a benchmark, and records of what they compute."""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from engine.device_step import DeviceSteps
from engine.model import Model
from engine.parallel.group import _MAIN
from kernels.exchange_environment import set_environment

T = TypeVar("T")
_MAX_ROWS = 256
_SET_PATH, _FOLLOW = _MAIN.split("; from ", 1)


def follower_main(before: str) -> str:
    """Returns the program of a follower's process, `engine.parallel.group._MAIN`, with statements
    that it runs before it follows."""
    return f"{_SET_PATH}; {before}; from {_FOLLOW}"


def recording_main(path: str, at_a_time: int = 1) -> str:
    """Returns the program of a follower's process that calls `record_residuals`."""
    return follower_main(
        "from tests.rank_processes import record_residuals; "
        f"record_residuals({path!r}, {at_a_time})"
    )


def on_processes(
    size: int, work: Callable[..., T], *args: object, timeout_s: float = 300.0
) -> list[T]:
    """Returns `work(rank, size, path, *args)` of all ranks, in their order. `path`: of a store that
    no process has made before. Raises RuntimeError with a rank's traceback, or after the time."""
    set_environment()
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        processes = [
            context.Process(target=_run, args=(answers, work, rank, size, store, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found: dict[int, T] = {}
        ends_s = time.monotonic() + timeout_s
        try:
            while len(found) < size:
                rank, value, error = answers.get(timeout=max(0.1, ends_s - time.monotonic()))
                if error is not None:
                    raise RuntimeError(f"rank {rank} failed:\n{error}")
                found[rank] = value
        except queue.Empty:
            missing = set(range(size)) - found.keys()
            raise RuntimeError(f"no answer of ranks {missing} after {timeout_s} s") from None
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [found[rank] for rank in range(size)]


def _run(
    answers: Any, work: Callable[..., T], rank: int, size: int, store: Path, args: tuple[object]
) -> None:
    try:
        answers.put((rank, work(rank, size, store, *args), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    time.sleep(600)  # the other ranks may still read this one's memory: the parent ends all


def checksum(x: torch.Tensor) -> int:
    """Returns a number of the bits of x, which depends on their places."""
    return int(_checksum(x))


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """Returns `checksum` on the device of x, without waiting for it."""
    bits = x.contiguous().view(torch.uint8).to(torch.int64).flatten()
    places = torch.arange(1, len(bits) + 1, device=x.device) % 65521
    return (bits * places).sum()


def record_residuals(path: str, at_a_time: int = 1) -> None:
    """Lets this process append, for each step of a device, the number and the checksum of the rows
    whose logits are computed, as the head reads them: also where graphs replay the step. Lines are
    written, and the device waited for, after so many steps at a time."""
    kept: dict[torch.device, torch.Tensor] = {}
    counts: list[int] = []
    sums: list[torch.Tensor] = []
    logits, run = Model.logits, DeviceSteps._run

    def keeping_logits(self: Model, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        if hidden.is_meta:  # a trace of kernels
            return logits(self, hidden, *args)
        buffer = kept.get(hidden.device)
        if buffer is None:
            with torch.inference_mode(False):  # log-probabilities of prompts come outside of it
                shape = (_MAX_ROWS, hidden.shape[1])
                buffer = torch.zeros(shape, dtype=hidden.dtype, device=hidden.device)
            kept[hidden.device] = buffer
        count = min(len(hidden), _MAX_ROWS)
        buffer[:count].copy_(hidden[:count])  # a graph has the copy, too
        return logits(self, hidden, *args)

    def recording_run(self: DeviceSteps, layout: Any, *args: Any) -> Any:
        result = run(self, layout, *args)
        if self._drawn.device in kept:
            count = min(layout.num_samples, _MAX_ROWS)
            counts.append(count)
            sums.append(_checksum(kept[self._drawn.device][:count]))
        if len(sums) >= at_a_time:
            with Path(path).open("a") as file:
                for count, total in zip(counts, torch.stack(sums).tolist(), strict=True):
                    file.write(f"{count} {total}\n")
            counts.clear()
            sums.clear()
        return result

    Model.logits = keeping_logits  # type: ignore[method-assign, assignment]
    DeviceSteps._run = recording_run  # type: ignore[method-assign]
