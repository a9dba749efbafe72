"""Messages between the first rank and another: small ones over a socket, numbers in shared memory.

A message is a JSON object behind its length, perhaps with an open file; a step's numbers lie in one
of two slots of a segment that all ranks map. By the end of the socket each side learns at once that
the other died. Nothing is pickled, and nothing has a name that could outlive the processes:
segments are anonymous files (memfd), passed over the socket.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from engine.inputs import Ints, StepArrays
from engine.parallel.shards import MAX_RANKS
from engine.step_buffers import Words
from engine.step_inputs import StepLimits, max_words

_LENGTH = struct.Struct("<I")
_SEND_S = 10.0  # a peer that reads nothing for so long hangs
_PAGE = mmap.PAGESIZE
_KEY_INTS = 512  # for the adapter keys of each sequence of a step: 4 KiB
_BEATS_BYTES = _PAGE


class Link:
    """One side of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Mapping[str, object], file: int | None = None) -> None:
        """Raises OSError if the peer died or hangs."""
        text = json.dumps(message).encode()
        header = _LENGTH.pack(len(text))
        self._end.settimeout(_SEND_S)
        if file is None:
            self._end.sendall(header + text)
        else:
            socket.send_fds(self._end, [header], [file])
            self._end.sendall(text)

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """Waits for a message: returns it and its file, which the caller closes. Raises EOFError if
        the peer died."""
        self._end.settimeout(None)
        header, files, _, _ = socket.recv_fds(self._end, _LENGTH.size, 1)
        header += self._read(_LENGTH.size - len(header))
        message: dict[str, Any] = json.loads(self._read(_LENGTH.unpack(header)[0]))
        return message, files[0] if files else None

    def shut_down(self) -> None:
        """Lets the peer see the end; the descriptor stays, as a thread may poll it."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = self._end.recv(size - len(found))
            if not part:
                raise EOFError("the peer closed the connection")
            found += part
        return bytes(found)


class Shared:
    """Memory of several processes, zeros at first."""

    def __init__(self, num_bytes: int, file: int | None = None) -> None:
        """`file`: of a peer's segment, which is closed; None: a new one."""
        self.file = os.memfd_create("loraplex") if file is None else file
        if file is None:
            os.ftruncate(self.file, num_bytes)
        # Not by `mmap`, which holds a descriptor of its own as long as the memory: hundreds of
        # adapters would use up those that a process may have.
        self._bytes = torch.from_file(
            f"/proc/self/fd/{self.file}", shared=True, size=num_bytes, dtype=torch.uint8
        )
        if file is not None:
            self.close_file()

    def tensor(self, first: int, num_bytes: int) -> torch.Tensor:
        """Returns [num_bytes] uint8, which keep the memory alive."""
        return self._bytes[first : first + num_bytes]

    def ints(self, first: int, count: int) -> Ints:
        return self.tensor(first, 8 * count).view(torch.int64).numpy()

    def floats(self, first: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return self.tensor(first, 8 * count).view(torch.float64).numpy()

    def close_file(self) -> None:
        """The memory stays."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.close_file()


class StepSegment:
    """Two slots for steps, each rank's last sign of life, and how many steps it has taken."""

    def __init__(self, slot_ints: int, file: int | None = None) -> None:
        self.slot_ints = slot_ints
        self._shared = Shared(_BEATS_BYTES + 2 * 8 * slot_ints, file)
        self.beats_s = self._shared.floats(0, MAX_RANKS)  # of time.monotonic, which hosts share
        self.num_taken = self._shared.ints(8 * MAX_RANKS, MAX_RANKS)
        self._slots = [
            self._shared.ints(_BEATS_BYTES + 8 * slot_ints * i, slot_ints) for i in range(2)
        ]

    @property
    def file(self) -> int:
        return self._shared.file

    def write(self, slot: int, step: StepArrays) -> None:
        write_step(self._slots[slot], step)

    def read(self, slot: int) -> StepArrays:
        return read_step(self._slots[slot])

    def write_words(self, slot: int, words: Words) -> None:
        """Raises ValueError if there is no room."""
        room = self._slots[slot].view(np.int32)
        if len(words) > len(room):
            raise ValueError(f"a step of {len(words)} words does not fit {len(room)}")
        room[: len(words)] = words

    def words(self, slot: int, count: int) -> Words:
        """Returns a view of the words of `write_words`, until the slot is written again."""
        words: Words = self._slots[slot].view(np.int32)[:count]
        return words


def slot_size(max_tokens: int, limits: StepLimits) -> int:
    """Returns the integers that a step of this size takes at most, as arrays or as words. Of memory
    that no step has touched, the system has no pages."""
    of_sequence = 10 + limits.num_tables * limits.max_blocks + _KEY_INTS
    arrays = 3 * max_tokens + limits.max_seqs * of_sequence + 64
    return max(arrays, -(-max_words(max_tokens, limits) // 2))


def write_step(slot: Ints, step: StepArrays) -> None:
    """Writes counts, then arrays. Raises ValueError if there is no room."""
    keys = sorted({key for key, _ in step.runs if key is not None})
    text = json.dumps(keys).encode()
    text += b" " * (-len(text) % 8)
    counts = [
        len(step.token_ids),
        len(step.kv_lens),
        len(step.logit_rows),
        step.num_samples,
        len(step.prompt_rows),
        len(step.runs),
        len(text) // 8,
        *(table.shape[1] for table in step.tables),
    ]
    owners = [-1 if key is None else keys.index(key) for key, _ in step.runs]
    lists: list[Sequence[int]] = [
        step.query_start,
        step.kv_lens,
        step.logit_rows,
        step.prompt_rows,
        owners,
        [count for _, count in step.runs],
    ]
    parts: list[Ints] = [
        np.array([len(counts), *counts], dtype=np.int64),
        step.token_ids,
        step.positions,
        *(np.array(one, dtype=np.int64) for one in lists),
        np.frombuffer(text, dtype=np.int64),
        *(table.ravel() for table in step.tables),
    ]
    if sum(map(len, parts)) > len(slot):
        raise ValueError(f"a step of {counts} does not fit {len(slot)} integers")
    begin = 0
    for part in parts:
        slot[begin : begin + len(part)] = part
        begin += len(part)


def read_step(slot: Ints) -> StepArrays:
    begin = int(slot[0]) + 1
    tokens, seqs, rows, num_samples, prompts, runs, text, *widths = slot[1:begin].tolist()

    def take(count: int) -> Ints:
        nonlocal begin
        begin += count
        return slot[begin - count : begin].copy()  # the slot is written again

    token_ids, positions = take(tokens), take(tokens)
    query_start, kv_lens = take(seqs + 1).tolist(), take(seqs).tolist()
    logit_rows, prompt_rows = take(rows).tolist(), take(prompts).tolist()
    owners, lengths = take(runs).tolist(), take(runs).tolist()
    keys = json.loads(take(text).tobytes())
    tables = tuple(take(seqs * width).reshape(seqs, width) for width in widths)
    return StepArrays(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        kv_lens=kv_lens,
        tables=tables,
        logit_rows=tuple(logit_rows),
        num_samples=num_samples,
        prompt_rows=tuple(prompt_rows),
        runs=tuple(
            (None if owner < 0 else keys[owner], length)
            for owner, length in zip(owners, lengths, strict=True)
        ),
    )
