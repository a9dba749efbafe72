"""Compiles kernels ahead of their first launch: in parallel processes, without a device.

Triton compiles one kernel at a time, for seconds, in the thread that launches it. Here each kernel
of a list is compiled by one of several processes, which write it to the cache on disk; the engine's
process then reads it from there. A process imports no CUDA: a driver that only names the target
takes the place of Triton's, and everything else is Triton's own launch path, so that the entries
are those for which a launch looks.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from kernels.backend import Capability
from kernels.kernel_cache import (
    NotInCacheError,
    check_writable,
    only_from_cache,
    own_cache,
    use_cache,
)
from kernels.kernel_call import Argument, Descriptor, KernelCall, Pointer
from kernels.triton_launch import fix_cache_key

logger = logging.getLogger(__name__)

_ROOT = str(Path(__file__).resolve().parents[1])
_COMMAND = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from kernels.kernel_compiler import compile_lines; compile_lines()"
)
_NICENESS = 10  # engines on this machine go first
_MAX_PROCESSES = 32
# Of a C program, on a machine without compiler or driver.
_NO_COMPILER = (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError)
_PROCESS_BYTES = 1024**3  # of host memory, at most, while it compiles


@dataclass(frozen=True, slots=True)
class Failure:
    call: KernelCall
    reason: str


class _Address:
    """Stands for a tensor: Triton reads its type and address."""

    def __init__(self, dtype: str, address: int) -> None:
        self.dtype = getattr(torch, dtype)
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _TargetDriver:
    """Names the target where Triton's driver would ask a device."""

    def __init__(self, capability: Capability) -> None:
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def targeted(capability: Capability) -> Iterator[None]:
    """Compiles for the capability, whatever devices this machine has. Kernels that were launched
    before in this process keep their device."""
    before = driver._active
    driver.set_active(_TargetDriver(capability))
    try:
        yield
    finally:
        driver._active = before


def compile_call(call: KernelCall) -> Any:
    """Compiles the kernel, or reads it from the cache, for the active driver's device; launches
    nothing. Returns Triton's CompiledKernel."""
    arguments = [_argument(value) for value in call.arguments]
    options = {name: _argument(value) for name, value in call.options}
    kernel = call.kernel()
    fix_cache_key(kernel)
    return kernel.run(*arguments, grid=None, warmup=True, **options)


def missing_calls(calls: Iterable[KernelCall]) -> tuple[KernelCall, ...]:
    """Returns the calls whose kernels are not in the cache. The others are read into memory."""
    missing = []
    for call in calls:
        try:
            with only_from_cache():
                compile_call(call)
        except NotInCacheError:
            missing.append(call)
        except Exception:  # its process fails in the same way and returns the reason
            missing.append(call)
    return tuple(missing)


def compile_all(
    calls: Sequence[KernelCall],
    capability: Capability,
    cache: Path,
    on_done: Callable[[], object],
    num_processes: int,
    stop: threading.Event | None = None,
) -> tuple[Failure, ...]:
    """Compiles the kernels into the cache and calls `on_done` after each. Returns the failures; a
    process that dies fails the kernel at hand only. After `stop` is set, no further kernel is
    compiled."""
    own_folder = None
    try:
        check_writable(cache)
    except OSError as error:
        own_folder = str(own_cache(error))
    waiting: queue.SimpleQueue[KernelCall] = queue.SimpleQueue()
    for call in sorted(calls, key=_weight, reverse=True):
        waiting.put(call)
    failures: list[Failure] = []
    lock = threading.Lock()

    def work(builds_driver: bool) -> None:
        worker = None
        while stop is None or not stop.is_set():
            try:
                call = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                worker = worker or _Worker(capability, cache, own_folder, builds_driver)
            except OSError as error:
                with lock:
                    failures.append(Failure(call, f"no compiler process starts: {error}"))
                continue
            reason = worker.compile(call)
            if worker.is_dead:
                worker.close()
                worker = None
            with lock:
                if reason:
                    failures.append(Failure(call, reason))
                on_done()
        if worker is not None:
            worker.close()

    count = min(num_processes, len(calls))
    threads = [
        threading.Thread(target=work, args=(i == count - 1,), name="kernel-compiler")
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(failures)


def compile_lines() -> None:
    """Runs in a compiler process: a first line with the target and the cache, then a line with a
    call for each kernel; answers each with a line, its failure or an empty string."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's output is no answer
    os.nice(_NICENESS)
    settings = json.loads(sys.stdin.readline())
    use_cache(settings["cache"], settings["own_folder"])
    # Entries without the compiler's intermediate texts: a fifth of the bytes to carry and read.
    triton.knobs.compilation.store_binary_only = True
    with targeted(tuple(settings["capability"])):
        if settings["builds_driver"]:
            _build_driver()
        for line in sys.stdin:
            reason = ""
            try:
                _build_stub(compile_call(KernelCall.from_json(json.loads(line))))
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error)[:500]}"
            print(json.dumps(reason), file=answers, flush=True)


class _Worker:
    def __init__(
        self, capability: Capability, cache: Path, own_folder: str | None, builds_driver: bool
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.is_dead = False
        settings = {
            "capability": capability,
            "cache": str(cache),
            "own_folder": own_folder,
            "builds_driver": builds_driver,
        }
        self._send(settings)

    def compile(self, call: KernelCall) -> str:
        """Returns the reason of a failure, or an empty string."""
        assert self._process.stdout is not None
        self._send(call.to_json())
        line = self._process.stdout.readline()
        if line:
            return str(json.loads(line))
        self.is_dead = True
        return f"the compiler process ended with code {self._process.wait()}"

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `compile` sees the end of the answers
            print(json.dumps(value), file=self._process.stdin, flush=True)


def _build_driver() -> None:
    """Compiles Triton's own C code, that of its driver: a second at the first launch otherwise."""
    from triton.backends.nvidia.driver import CudaUtils

    with suppress(*_NO_COMPILER):
        CudaUtils()


def _build_stub(kernel: Any) -> None:
    """Triton 3.6 compiles a launcher in C for each signature, with the machine's compiler and its
    driver library. Where one of them is missing, the device's process compiles it."""
    from triton.backends.nvidia import driver as nvidia

    if hasattr(nvidia, "make_launcher"):
        with suppress(*_NO_COMPILER):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _argument(value: Argument) -> object:
    if isinstance(value, Pointer):
        return _Address(value.dtype, 0 if value.is_aligned else 1)
    if isinstance(value, Descriptor):
        layout = NVMMASharedLayout(**{name: _listed(field) for name, field in value.layout})
        base: Any = _Address(value.dtype, 0)
        return TensorDescriptor(base, [1024, 1024], [1024, 1], list(value.box), layout)
    return value


def _listed(value: Any) -> Any:
    return [_listed(one) for one in value] if isinstance(value, tuple) else value


def _weight(call: KernelCall) -> int:
    """Estimates the work of a compilation: the longest first, so that none of them ends last."""
    kernel = call.kernel()
    return len(kernel.arg_names) * (3 if kernel.is_gluon() else 1)


def num_processes_for(available_bytes: int) -> int:
    """Returns the usable cores, as far as the host memory goes."""
    most = available_bytes // _PROCESS_BYTES
    return max(1, min(len(os.sched_getaffinity(0)), most, _MAX_PROCESSES))
