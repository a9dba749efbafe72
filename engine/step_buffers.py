"""The small numbers of a step: written on the host, copied to the device in one transfer.

CUDA graphs hold the addresses of the device's copy, so it never moves. The host has two buffers in
turn: while step n's copy may still wait for the device, step n+1 is written into the other. All
fields are 32-bit words of one array; block tables come last, packed to the width in use, so that a
step copies only the columns that it needs. The plan of the head comes first: only steps that need
it copy it. Models of full and windowed layers have a second block table, and slots of it. The words
are the same on all ranks of a tensor-parallel group: the others copy the first rank's words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.host_words import copy_to_device

Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

_Copy = tuple[torch.Tensor, torch.Tensor]  # target, source
_MOST_COPIES = 64  # whose views are kept
_ALIGNMENT = 4  # words: 16 bytes, the alignment of a kernel's vector load
_PER_TOKEN = ("token_ids", "sources", "positions", "slots", "logit_rows")
SLOTS = ("slots", "window_slots")  # of each block table
# One behind the other; the last one differs from draw to draw of a sequence.
PER_DRAW = ("temperature", "top_k", "top_p", "min_p", "choices", "draw_positions")


@dataclass(frozen=True, slots=True)
class BufferSizes:
    max_tokens: int
    max_seqs: int
    max_draws: int
    max_blocks: int  # per sequence
    attention_words: int
    lora_words: int
    head_words: int
    num_tables: int = 1  # per sequence

    @property
    def fields(self) -> dict[str, slice]:
        """The places of the fields, one behind the other."""
        sizes = {
            "head": self.head_words,
            "seeds": 2 * self.max_draws,  # 64-bit, hence before fields of any number of words
            **dict.fromkeys(_PER_TOKEN + SLOTS[1 : self.num_tables], self.max_tokens),
            **dict.fromkeys(PER_DRAW, self.max_draws),
            "kv_lens": self.max_seqs,
            "query_start": self.max_seqs + 1,
            "attention": self.attention_words,
            "lora": self.lora_words,
        }
        fields: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            fields[name] = slice(start, start + size)
            start += _aligned(size)
        return fields

    @property
    def tables_start(self) -> int:
        """The place of the tables, behind the fields."""
        return _aligned(self.fields["lora"].stop)

    @property
    def num_words(self) -> int:
        return self.tables_start + self.num_tables * self.max_seqs * self.max_blocks


class StepBuffers:
    def __init__(self, sizes: BufferSizes, device: torch.device) -> None:
        self.num_tables = sizes.num_tables
        self._fields, self._tables_start = sizes.fields, sizes.tables_start
        num_words = sizes.num_words
        self._device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._tables = tuple(
            torch.zeros((sizes.max_seqs, sizes.max_blocks), dtype=torch.int32, device=device)
            for _ in range(sizes.num_tables)
        )
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        # The words and the fields of each: made once, not for each use.
        self._words: list[Words] = [one.numpy() for one in self._hosts]
        self._views = [
            {name: words[place] for name, place in self._fields.items()} for words in self._words
        ]
        self.turn = 0  # the host buffer that is written
        # The views of recent sends, by the host buffer and the size: steps of the same sequences
        # differ in their numbers alone.
        self._copies: dict[tuple[int, int, int, bool], list[_Copy]] = {}
        # The ends of the copies from the two; None: there was none yet, or no device.
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def begin(self) -> None:
        """Begins a new step on the host. Waits until the step before last was copied, which it is
        where that step was collected."""
        self.turn ^= 1
        sent = self._sent[self.turn]
        if sent is not None:
            sent.synchronize()

    def host(self, name: str) -> Words:
        return self._views[self.turn][name]

    def host_floats(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return self.host(name).view(np.float32)

    def host_longs(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return self.host(name).view(np.int64)

    def host_draws(self) -> Words:
        """Returns [fields of a draw, draws], in the order of `PER_DRAW`."""
        start, stop = self._fields[PER_DRAW[0]].start, self._fields[PER_DRAW[-1]].start
        stride = (stop - start) // (len(PER_DRAW) - 1)
        return self._words[self.turn][start : stop + stride].reshape(len(PER_DRAW), stride)

    def host_tables(
        self, num_rows: int, width: int, table: int = 0
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns [num_rows, width], to be written whole."""
        size = num_rows * width
        start = self._tables_start + table * size
        return self._words[self.turn][start : start + size].reshape(num_rows, width)

    def device(self, name: str) -> torch.Tensor:
        return self._device[self._fields[name]]

    def device_floats(self, name: str) -> torch.Tensor:
        return self.device(name).view(torch.float32)

    def device_longs(self, name: str) -> torch.Tensor:
        return self.device(name).view(torch.int64)

    def device_slots(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Returns [num_tokens] of each table."""
        return tuple(self.device(name)[:num_tokens] for name in SLOTS[: self.num_tables])

    def device_tables(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """Returns [num_rows, max_blocks] of each table; columns past the width last sent hold old
        numbers."""
        return tuple(table[:num_rows] for table in self._tables)

    def words(self, num_rows: int, width: int, *, with_head: bool = False) -> Words:
        """Returns the part of the host's buffer that `send` copies."""
        return self._words[self.turn][self._span(num_rows, width, with_head)]

    def send(self, num_rows: int, width: int, *, with_head: bool = False) -> None:
        """Sends everything up to the end of the packed tables, then the tables to their rows."""
        key = self.turn, num_rows, width, with_head
        copies = self._copies.get(key)
        if copies is None:
            if len(self._copies) == _MOST_COPIES:
                self._copies.clear()
            copies = self._copies[key] = self._views_of(num_rows, width, with_head)
        (fields, host), *tables = copies
        copy_to_device(host, fields)
        if self._device.is_cuda:
            sent = self._sent[self.turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record()
            self._sent[self.turn] = sent
        for rows, entries in tables:
            rows.copy_(entries)

    def _views_of(self, num_rows: int, width: int, with_head: bool) -> list[_Copy]:
        """Returns the targets and sources of the copies of a step: from the host, then of each
        table on the device."""
        span = self._span(num_rows, width, with_head)
        packed = self._device[self._tables_start : span.stop].view(-1, num_rows, width)
        rows = [table[:num_rows, :width] for table in self._tables]
        sent = self._device[span], self._hosts[self.turn][span]
        return [sent, *zip(rows, packed.unbind(), strict=True)]

    def _span(self, num_rows: int, width: int, with_head: bool) -> slice:
        start = 0 if with_head else self._fields["seeds"].start
        return slice(start, self._tables_start + len(self._tables) * num_rows * width)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
