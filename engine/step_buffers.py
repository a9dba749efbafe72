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

Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

_ALIGNMENT = 4  # words: 16 bytes, the alignment of a kernel's vector load
_PER_TOKEN = ("token_ids", "sources", "positions", "slots", "logit_rows")
SLOTS = ("slots", "window_slots")  # of each block table
_PER_DRAW = ("temperature", "top_k", "top_p", "min_p", "choices", "draw_positions")


@dataclass(frozen=True, slots=True)
class _Field:
    start: int
    size: int


class StepBuffers:
    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_draws: int,
        max_blocks: int,  # per sequence
        attention_words: int,
        lora_words: int,
        head_words: int,
        device: torch.device,
        num_tables: int = 1,  # per sequence
    ) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.num_tables = num_tables
        self._fields, self._tables_start = _place(
            max_tokens, max_seqs, max_draws, attention_words, lora_words, head_words, num_tables
        )
        num_words = self._tables_start + num_tables * max_seqs * max_blocks
        self._device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._tables = tuple(
            torch.zeros((max_seqs, max_blocks), dtype=torch.int32, device=device)
            for _ in range(num_tables)
        )
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._views = [self._host_views(one.numpy()) for one in self._hosts]
        self.turn = 0  # the host buffer that is written
        # The ends of the copies from the two; None: there was none yet, or no device.
        self._sent: list[torch.cuda.Event | None] = [None, None]

    @staticmethod
    def num_words(
        max_tokens: int,
        max_seqs: int,
        max_draws: int,
        max_blocks: int,
        attention_words: int,
        lora_words: int,
        head_words: int,
        num_tables: int = 1,
    ) -> int:
        """Returns the words of buffers of these sizes."""
        _, tables_start = _place(
            max_tokens, max_seqs, max_draws, attention_words, lora_words, head_words, num_tables
        )
        return tables_start + num_tables * max_seqs * max_blocks

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

    def host_tables(
        self, num_rows: int, width: int, table: int = 0
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns [num_rows, width], to be written whole."""
        size = num_rows * width
        flat = self._hosts[self.turn].numpy()[self._tables_start + table * size :]
        return flat[:size].reshape(num_rows, width)

    def device(self, name: str) -> torch.Tensor:
        field = self._fields[name]
        return self._device[field.start : field.start + field.size]

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
        words: Words = self._hosts[self.turn].numpy()[self._span(num_rows, width, with_head)]
        return words

    def send(self, num_rows: int, width: int, *, with_head: bool = False) -> None:
        """Sends everything up to the end of the packed tables, then the tables to their rows."""
        span = self._span(num_rows, width, with_head)
        self._device[span].copy_(self._hosts[self.turn][span], non_blocking=True)
        if self._device.is_cuda:
            sent = self._sent[self.turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record()
            self._sent[self.turn] = sent
        packed = self._device[self._tables_start : span.stop].view(-1, num_rows, width)
        for table, entries in zip(self._tables, packed.unbind(), strict=True):
            table[:num_rows, :width].copy_(entries)

    def _host_views(self, words: Words) -> dict[str, Words]:
        """Returns the fields of one of the host's buffers: made once, not for each use."""
        views: dict[str, Words] = {}
        for name, field in self._fields.items():
            views[name] = words[field.start : field.start + field.size]
        return views

    def _span(self, num_rows: int, width: int, with_head: bool) -> slice:
        start = 0 if with_head else self._fields["seeds"].start
        return slice(start, self._tables_start + len(self._tables) * num_rows * width)


def _place(
    max_tokens: int,
    max_seqs: int,
    max_draws: int,
    attention_words: int,
    lora_words: int,
    head_words: int,
    num_tables: int,
) -> tuple[dict[str, _Field], int]:
    """Returns the places of the fields, and that of the tables behind them."""
    sizes = {
        "head": head_words,
        "seeds": 2 * max_draws,  # 64-bit, hence before fields of any number of words
        **dict.fromkeys(_PER_TOKEN + SLOTS[1:num_tables], max_tokens),
        **dict.fromkeys(_PER_DRAW, max_draws),
        "kv_lens": max_seqs,
        "query_start": max_seqs + 1,
        "attention": attention_words,
        "lora": lora_words,
    }
    fields: dict[str, _Field] = {}
    start = 0
    for name, size in sizes.items():
        fields[name] = _Field(start, size)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return fields, start
