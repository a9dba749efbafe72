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
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
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


def _array(_: type, stored: tuple[list[int], bytes]) -> Ints:
    shape, numbers = stored
    return np.frombuffer(numbers, dtype=np.int64).reshape(shape).copy()  # to be written to


_encode = msgspec.msgpack.Encoder(enc_hook=lambda array: (array.shape, array.tobytes())).encode
_decode = msgspec.msgpack.Decoder(StepArrays, dec_hook=_array).decode


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
        """Raises ValueError if there is no room."""
        text, room = _encode(step), self._slots[slot].view(np.uint8)
        if 8 + len(text) > len(room):
            raise ValueError(f"a step of {len(text)} bytes does not fit {self.slot_ints} integers")
        self._slots[slot][0] = len(text)
        room[8 : 8 + len(text)] = np.frombuffer(text, dtype=np.uint8)

    def read(self, slot: int) -> StepArrays:
        size = int(self._slots[slot][0])
        return _decode(self._slots[slot].view(np.uint8)[8 : 8 + size].tobytes())

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


def slot_size(limits: StepLimits) -> int:
    """Returns the integers that a step of this size takes at most, as arrays or as words. Of memory
    that no step has touched, the system has no pages."""
    of_sequence = 10 + limits.num_tables * limits.max_blocks + _KEY_INTS
    arrays = 3 * limits.max_tokens + limits.max_seqs * of_sequence + 64
    return max(arrays, -(-max_words(limits) // 2))
