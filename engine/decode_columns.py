"""The sampling parameters and block tables of decoding sequences, as arrays that steps share.

The device waits for a step with drafts to be written. Its rows are gathered from these arrays by a
few operations: one by one are written the parameters of a new sequence and the blocks that a
sequence has got since its last step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.step_buffers import PER_DRAW, StepBuffers
from engine.types import ScheduledSequence, Sequence

_TOP_K, _CHOICES = PER_DRAW.index("top_k"), PER_DRAW.index("choices")  # integers
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


@dataclass(slots=True)
class _Row:
    """The entries of a sequence's tables that are written. A table only grows, apart from entries
    that a window has passed, until the sequence is preempted: it then gets another list."""

    number: int
    tables: list[list[int] | None]
    counts: list[int]


class DecodeColumns:
    def __init__(self, max_seqs: int, max_blocks: int, num_tables: int) -> None:
        # The system gives memory only to the part that is written.
        self.tables = [np.zeros((max_seqs, max_blocks), dtype=np.int32) for _ in range(num_tables)]
        self._rows: dict[Sequence, _Row] = {}
        self._free = list(range(max_seqs))
        self._draws = np.zeros((len(PER_DRAW) - 1, max_seqs), dtype=np.int32)  # floats' bits, too
        self._seeds = np.zeros(max_seqs, dtype=np.int64)

    def update(self, parts: tuple[ScheduledSequence, ...], block_size: int) -> tuple[Ints, int]:
        """Brings the rows of the parts' sequences up to date. Returns their numbers, and the most
        entries of a table. Sequences without a part are forgotten."""
        rows, last, most = self._rows, len(self.tables) - 1, 0
        numbers: list[int] = []
        for sequence, _, end, _, _ in parts:
            row = rows.get(sequence)
            if row is None:
                row = self._add(sequence, parts)
            numbers.append(row.number)
            stop = -(-end // block_size)
            if stop > most:
                most = stop
            if row.counts[0] < stop or row.tables[0] is not sequence.block_table:
                self._extend(row, 0, sequence.block_table, stop)
            if last:
                self._extend(row, 1, sequence.window_table, stop)
            if sequence.num_dropped:
                table = sequence.window_table if last else sequence.block_table
                self.tables[last][row.number, : sequence.num_dropped] = table[0]  # all the same
        if len(rows) > len(parts):
            self._forget_others(parts)
        return np.array(numbers, dtype=np.int32), most

    def write_draws(self, buffers: StepBuffers, numbers: Ints) -> None:
        """Writes the parameters of draws of the sequences with these row numbers, without the
        positions."""
        count = len(numbers)
        buffers.host_draws()[:-1, :count] = self._draws.take(numbers, axis=1)
        buffers.host_longs("seeds")[:count] = self._seeds.take(numbers)

    def _extend(self, row: _Row, index: int, table: list[int], stop: int) -> None:
        if row.tables[index] is not table:
            row.tables[index], row.counts[index] = table, 0
        count = row.counts[index]
        if count < stop:
            self.tables[index][row.number, count:stop] = table[count:stop]
            row.counts[index] = stop

    def _add(self, sequence: Sequence, parts: tuple[ScheduledSequence, ...]) -> _Row:
        if not self._free:
            self._forget_others(parts)
        number, num_tables = self._free.pop(), len(self.tables)
        params = sequence.request.params
        floats = self._draws.view(np.float32)
        floats[:, number] = params.temperature, 0.0, params.top_p, params.min_p, 0.0
        self._draws[_TOP_K, number], self._draws[_CHOICES, number] = params.top_k, sequence.choice
        self._seeds[number] = sequence.seed
        row = _Row(number, [None] * num_tables, [0] * num_tables)
        self._rows[sequence] = row
        return row

    def _forget_others(self, parts: tuple[ScheduledSequence, ...]) -> None:
        """Forgets the sequences that have no part: they have ended, or wait."""
        kept = {part.sequence for part in parts}
        for sequence in [one for one in self._rows if one not in kept]:
            self._free.append(self._rows.pop(sequence).number)
