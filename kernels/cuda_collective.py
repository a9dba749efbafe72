"""The exchanges of ranks on CUDA devices of one host: NCCL, and memory that the devices share.

Small sums read the other devices' memory directly (torch.distributed._symmetric_memory): one shot,
in which every rank adds all parts, or two, in which each adds its share and writes it to all. On a
pair of H200s 8 KiB took 6.6 us, by NCCL 9.6; 1 MiB 10.1, by NCCL 17.0. Large sums, devices that are
no peers, and types other than bfloat16 and float32 use NCCL. All of it can be captured in graphs,
with `capture_error_mode="thread_local"`, as NCCL's watchdog queries events meanwhile. Every rank
gets the same bits; parts are added in their own type, in the order of the ranks in shared memory.

torch's `one_shot_all_reduce_copy` is not used: it signals before all threads of a block have
copied.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
from torch import distributed

from kernels.collective import MISSING, Collective, RowMemory, max_shared_rows
from kernels.exchange_environment import set_environment

logger = logging.getLogger(__name__)

ONE_SHOT_BYTES = 128 * 1024  # of two ranks; of more, every rank reads as many times as much
_TYPES = (torch.bfloat16, torch.float32)  # of torch's kernels
_RELEASE_S = 2.0
_GAVE_UP = "gave-up"  # a key of the ranks' rendezvous
_KEY_POLL_S = 1e-3
_C10D: Any = distributed  # torch's stubs lack the following names


class Nccl:
    """Exchanges by NCCL, on the current stream."""

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        """Returns once all ranks are there. Raises RuntimeError."""
        self.rank = rank
        self.size = size
        self.device = device
        options = _C10D.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        prefixed = _C10D.PrefixStore("nccl", store)
        self.backend = _C10D.ProcessGroupNCCL(prefixed, rank, size, options)
        # The communicator is made by the first exchange, which must not be part of a graph.
        self.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.contiguous()
        if total.numel():
            options = _C10D.AllreduceOptions()
            options.asyncOp = False
            _finish(self.backend.allreduce([total], options))
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        parts = x.new_empty((self.size, rows, columns))
        if parts.numel():
            options = torch._C._distributed_c10d.AllgatherOptions()
            options.asyncOp = False
            _finish(self.backend._allgather_base(parts, x.contiguous(), options))
        return parts.transpose(0, 1).reshape(rows, self.size * columns)

    def row_memory(self, x: torch.Tensor, kind: int) -> RowMemory | None:
        return None

    def broadcast_(self, x: torch.Tensor) -> None:
        if x.numel():
            options = _C10D.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
            _finish(self.backend.broadcast([x], options))

    def abort(self) -> None:
        with suppress(RuntimeError):
            self.backend.abort()


class SymmetricMemory:
    """Sums through memory that all devices of the group map; all else by NCCL."""

    def __init__(
        self,
        nccl: Nccl,
        store: NumberedStore,
        max_bytes: int,
        row_bytes: int = 0,
        one_shot_bytes: int | None = None,
    ) -> None:
        """`max_bytes`: of a sum in shared memory. `row_bytes`: of the rows that kernels exchange by
        themselves. `one_shot_bytes`: up to which a sum takes one shot; None: the usual size. Raises
        RuntimeError. It makes no exchange, as another rank may raise, too; no rank may send a row
        before all have made theirs."""
        self.rank = nccl.rank
        self.size = nccl.size
        self._nccl = nccl
        self._one_shot_bytes = (
            2 * ONE_SHOT_BYTES // nccl.size if one_shot_bytes is None else one_shot_bytes
        )
        self._max_bytes = max_bytes
        private: Any = torch._C._distributed_c10d
        shared = private._SymmetricMemory
        # The operations find the group by its name in this process, which may open several.
        if self.rank == 0:
            store.set("name", f"loraplex-{uuid.uuid4()}".encode())
        self._name = store.get("name").decode()
        self._store = store  # torch calls its methods in Python, so it has to stay
        group = self._group = _C10D.ProcessGroup(store, self.rank, self.size)
        kind = _C10D.ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(nccl.device, kind, nccl.backend)
        group._set_group_name(self._name)
        private._register_process_group(self._name, group)
        sums = max(16, -(-max_bytes // 16) * 16)
        self._row_bytes = 0 if row_bytes % 16 else row_bytes  # 0: kernels exchange no rows
        rows = RowMemory.num_bytes(self.size, self._row_bytes)
        total = (sums + 2 * rows,)
        self._buffer = shared.empty_strided_p2p(total, (1,), torch.uint8, nccl.device)
        self._handle = shared.rendezvous(self._buffer, self._name)
        self._pads = [self._handle.get_signal_pad(r, [], torch.int32) for r in range(self.size)]
        self._row_memory = [self._memory_from(start) for start in (sums, sums + rows)]
        self._rows = self._buffer[sums:].view(torch.int8)
        self._rows.fill_(MISSING)
        self._beside = torch.cuda.Stream(nccl.device)  # type: ignore[no-untyped-call]

    def _memory_from(self, start: int) -> RowMemory:
        places = [*(base + start for base in self._handle.buffer_ptrs), self.rank]
        ranks = torch.tensor(places, dtype=torch.int64, device=self._nccl.device)
        return RowMemory(ranks, max_shared_rows(self.size))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        num_bytes = x.numel() * x.itemsize
        if not num_bytes:
            self._wait_for_others()
            return x
        is_shared = num_bytes <= self._max_bytes and x.dtype in _TYPES and num_bytes % 4 == 0
        if not is_shared:
            return self._nccl.all_reduce(x)
        part: torch.Tensor = self._buffer[:num_bytes].view(x.dtype).view(x.shape)
        part.copy_(x)
        if num_bytes <= self._one_shot_bytes:
            out = torch.empty_like(part)
            torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._name, out)
            return out
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self._name)
        return part

    def _wait_for_others(self) -> None:
        """Takes the place of a sum of nothing, as at the end of a step without logits: the rows of
        the next step, of the same kind as the last ones of this step, must not come before every
        rank has read those."""
        part = self._buffer[:16].view(torch.float32)
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._name, torch.empty_like(part))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._nccl.all_gather(x)

    def row_memory(self, x: torch.Tensor, kind: int) -> RowMemory | None:
        memory = self._row_memory[kind]
        has_room = x.shape[1] * x.itemsize == self._row_bytes and 0 < len(x) <= memory.max_rows
        return memory if has_room else None

    def broadcast_(self, x: torch.Tensor) -> None:
        self._nccl.broadcast_(x)

    def abort(self) -> None:
        """Writes the numbers and signals for which kernels of this device wait, until none is left:
        nothing else ends a kernel whose peer is gone."""
        # Beside the release of these kernels: NCCL waits a minute for the device to end its work.
        aborting = threading.Thread(target=self._nccl.abort, name="abort-nccl", daemon=True)
        aborting.start()
        device = self._nccl.device
        ends_s = time.monotonic() + _RELEASE_S
        with torch.cuda.device(device), torch.cuda.stream(self._beside):
            while not _is_idle(device) and time.monotonic() < ends_s:
                for rank, pad in enumerate(self._pads):
                    pad.fill_(1 if rank == self.rank else 0)
                self._rows.zero_()
                time.sleep(1e-3)
        aborting.join(_RELEASE_S)


class NumberedStore(_C10D.Store):  # type: ignore[misc]
    """A store for one rendezvous: torch numbers all those of a process, and a rank whose process
    had another group before would wait for keys that no other rank writes. Of a rank that gives up,
    the others learn while they wait for its keys."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(self._own(key))
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises RuntimeError if a rank gives up, or after the time."""
        own = [self._own(key) for key in keys]
        limit_s = (self._store.timeout if timeout is None else timeout).total_seconds()
        ends_s = time.monotonic() + limit_s
        while not self._store.check(own):
            if self._store.check([_GAVE_UP]):
                raise RuntimeError("another rank gave up")
            if time.monotonic() > ends_s:
                raise RuntimeError(f"no other rank wrote {own} within {limit_s:.0f} s")
            time.sleep(_KEY_POLL_S)

    def give_up(self) -> None:
        self._store.set(_GAVE_UP, b"")

    def _own(self, key: str) -> str:
        """Replaces the number in CUDASymmetricMemory/NUMBER/RANK by that of this store."""
        name, _, rest = key.partition("/")
        number, _, rank = rest.partition("/")
        if not (number.isdigit() and rank):
            return key
        return f"{name}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"


def are_peers(size: int) -> bool:
    """Returns True if the first devices of this process reach each other's memory."""
    pairs = combinations(range(size), 2)
    return all(
        torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)
        for a, b in pairs
    )


def open_exchange(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    max_bytes: int,
    row_bytes: int,
    timeout_s: float,
) -> Collective:
    """Joins the ranks, each on the device of its number."""
    set_environment()
    torch.cuda.set_device(device)
    nccl = Nccl(store, rank, size, device, timeout_s)
    if not max_bytes or not are_peers(size):
        logger.info("exchanges of %d ranks by NCCL: the devices are no peers", size)
        return nccl
    shared: SymmetricMemory | None = None
    own_store = NumberedStore(_C10D.PrefixStore("symmetric", store))
    try:
        shared = SymmetricMemory(nccl, own_store, max_bytes, row_bytes)
    except (RuntimeError, AttributeError, TypeError) as error:
        logger.warning("rank %d has no memory that devices share: %s", rank, str(error)[:500])
        own_store.give_up()  # at once: NCCL ends a rank that waits in the sum below for a minute
    # All ranks or none. The sum also keeps rows back until every rank's memory is filled.
    have = nccl.all_reduce(torch.tensor([float(shared is not None)], device=device))
    if shared is None or have.item() < size:
        logger.warning("exchanges of %d ranks by NCCL: slower for small steps", size)
        return nccl
    logger.info("exchanges of %d ranks up to %d bytes in shared memory", size, max_bytes)
    return shared


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def _is_idle(device: torch.device) -> bool:
    """Returns True if the steps' stream has nothing left, or is broken."""
    try:
        return bool(torch.cuda.default_stream(device).query())
    except RuntimeError:
        return True
