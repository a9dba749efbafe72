"""The rows of a step in its static buffers: tokens, lengths, sampling parameters, block tables.

The device waits for a step with drafts to be written, because its rows follow the newest tokens:
decodes are written by a number of array operations that does not grow with their rows, from the
columns of `engine.decode_columns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.decode_columns import DecodeColumns
from engine.step_buffers import SLOTS, StepBuffers
from engine.types import ScheduledSequence, Sequence
from kernels.lora_runs import spread
from kernels.paged_plan import HeadShape, WorkCounts, write_decode_work, write_work

_SEED_MASK = 2**64 - 1
Parts = tuple[ScheduledSequence, ...]
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def write_decodes(
    buffers: StepBuffers,
    columns: DecodeColumns,
    parts: Parts,
    drawn_rows: Mapping[Sequence, int],
    num_rows: int,
    block_size: int,
    heads: HeadShape,
    max_queries: int,
) -> tuple[int, int, WorkCounts]:
    """Writes the rows of decodes: one for the newest token of each part, and one for each token of
    its draft. Up to `max_queries` rows of a part are one sequence of attention, in which each row
    sees the keys up to its own. Rows past these become padding. Returns the number of sequences and
    the width of the tables that the step sends, and the work of attention."""
    host = buffers.host
    token_ids, sources = host("token_ids"), host("sources")
    sources[:num_rows] = -1
    newest: list[int] = []
    for sequence, start, _, _, draft in parts:
        known = sequence.token_ids
        if start < len(known):
            newest.append(known[start])
            newest += draft
        else:  # without a draft
            sources[len(newest)] = drawn_rows[sequence]
            newest.append(0)
    count = len(newest)
    token_ids[:count] = newest
    numbers, width = columns.update(parts, block_size)
    spans = [(end, end - start) for _, start, end, _, _ in parts]
    ends, queries = np.array(spans, dtype=np.int32).T
    if queries.max() > max_queries:
        owners, queries, ends = _pieces(queries, ends, max_queries)
        numbers = numbers[owners]
    num_sequences = len(numbers)
    total = num_sequences + num_rows - count  # with padding
    query_start, kv_lens = host("query_start")[: total + 1], host("kv_lens")[:total]
    kv_lens[:num_sequences], kv_lens[num_sequences:] = ends, 0
    queries_of = np.ones(total, dtype=np.int32)
    queries_of[:num_sequences] = queries
    query_start[0] = 0
    queries_of.cumsum(out=query_start[1:])
    # The last row of a sequence sees all its keys, each other one a key less than the next.
    rows = np.arange(num_sequences).repeat(queries)
    positions, numbers_of_rows = np.arange(count, dtype=np.int32), numbers[rows]
    positions += (kv_lens - query_start[1:])[rows]
    host("positions")[:count] = positions
    blocks = positions // block_size
    for index, name in enumerate(SLOTS[: buffers.num_tables]):
        table = columns.tables[index]
        buffers.host_tables(num_sequences, width, index)[:] = table[numbers, :width]
        slots = host(name)
        slots[:count] = (table[numbers_of_rows, blocks] - blocks) * block_size + positions
        slots[count:num_rows] = -1
    token_ids[count:num_rows] = host("positions")[count:num_rows] = 0
    columns.write_draws(buffers, numbers_of_rows)
    np.add(positions, 1, out=host("draw_positions")[:count])
    buffers.host_floats("temperature")[count:num_rows] = 0.0  # of padding, which is discarded
    work = write_decode_work(host("attention"), kv_lens, heads, queries_of)
    return num_sequences, width, work


def _pieces(queries: Ints, ends: Ints, max_queries: int) -> tuple[Longs, Ints, Ints]:
    """Cuts parts with so many rows, which end there, into sequences of attention. Returns the
    number of the part, the rows, and the keys that the last row sees, of each."""
    counts = (-(-queries // max_queries)).astype(np.int64)
    owners, index = spread(counts)
    # The rows of the part from the piece on: all pieces but the last are full.
    left = queries[owners] - max_queries * index
    rows = np.minimum(left, max_queries).astype(np.int32)
    return owners, rows, ends[owners] - (left - rows).astype(np.int32)


def write_tokens(
    buffers: StepBuffers,
    parts: Parts,
    drawn_rows: Mapping[Sequence, int],
    num_rows: int,
    block_size: int,
) -> list[int]:
    """Returns query_start. Rows past the batch's tokens become padding."""
    host = buffers.host
    token_ids, sources = host("token_ids"), host("sources")
    positions, slots = host("positions"), host("slots")
    sources[:num_rows] = -1
    query_start = [0]
    row = 0
    for part in parts:
        sequence, start, end = part.sequence, part.start, part.end
        known, table = sequence.token_ids, sequence.block_table
        if end - start == 1:
            if start < len(known):
                token_ids[row] = known[start]
            else:
                sources[row] = drawn_rows[sequence]
            positions[row] = start
            slots[row] = table[start // block_size] * block_size + start % block_size
            row += 1
        else:
            span = slice(row, row + end - start)
            row = span.stop
            tokens = [*known[start : part.known_end], *part.draft]
            token_ids[span.start : span.start + len(tokens)] = tokens
            if len(tokens) < end - start:
                sources[row - 1] = drawn_rows[sequence]
            positions[span] = np.arange(start, end)
            slots[span] = _slots(table, start, end, block_size)
        query_start.append(row)
    token_ids[row:num_rows] = positions[row:num_rows] = 0
    slots[row:num_rows] = -1
    if buffers.num_tables > 1:
        _write_window_slots(buffers, parts, query_start, num_rows, block_size)
    return query_start


def _write_window_slots(
    buffers: StepBuffers, parts: Parts, query_start: list[int], num_rows: int, block_size: int
) -> None:
    """Writes the slots of the second block table."""
    slots = buffers.host("window_slots")
    for part, row in zip(parts, query_start, strict=False):
        table, start, end = part.sequence.window_table, part.start, part.end
        if end - start == 1:
            slots[row] = table[start // block_size] * block_size + start % block_size
        else:
            slots[row : row + end - start] = _slots(table, start, end, block_size)
    slots[query_start[-1] : num_rows] = -1


def _slots(
    table: list[int], start: int, end: int, block_size: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    first = start // block_size
    blocks = np.array(table[first : -(-end // block_size)], dtype=np.int32)
    places = np.arange(start, end, dtype=np.int32)
    slots: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = (
        blocks[places // block_size - first] * block_size + places % block_size
    )
    return slots


def write_attention(
    buffers: StepBuffers, parts: Parts, starts: list[int], heads: HeadShape
) -> WorkCounts:
    """Writes the sequences of a step outside a graph. `starts`: the first row of each, and their
    end."""
    host, count = buffers.host, len(parts)
    query_start, kv_lens = host("query_start")[: count + 1], host("kv_lens")[:count]
    query_start[:] = starts
    kv_lens[:] = [part.end for part in parts]
    return write_work(host("attention"), query_start, kv_lens, heads)


def write_sampling(buffers: StepBuffers, parts: Parts) -> None:
    """Writes the parameters of the draws of a step outside a graph: one for each part."""
    host, floats, count = buffers.host, buffers.host_floats, len(parts)
    sequences = [part.sequence for part in parts]
    params = [sequence.request.params for sequence in sequences]
    seeds = np.array([sequence.seed & _SEED_MASK for sequence in sequences], dtype=np.uint64)
    columns: list[tuple[np.ndarray[Any, Any], Any]] = [
        (floats("temperature"), [p.temperature for p in params]),
        (host("top_k"), [p.top_k for p in params]),
        (floats("top_p"), [p.top_p for p in params]),
        (floats("min_p"), [p.min_p for p in params]),
        (host("choices"), [sequence.choice for sequence in sequences]),
        (buffers.host_longs("seeds"), seeds.view(np.int64)),
        (host("draw_positions"), [part.end for part in parts]),
    ]
    for column, values in columns:
        column[:count] = values


def write_tables(buffers: StepBuffers, parts: Parts, num_rows: int, block_size: int) -> int:
    """Writes the block tables. Returns the width that the step sends of each."""
    stops = [-(-part.end // block_size) for part in parts]
    width = max(stops)
    for index in range(buffers.num_tables):
        rows = buffers.host_tables(num_rows, width, index)
        for row, part, stop in zip(rows, parts, stops, strict=False):
            sequence = part.sequence
            table = sequence.window_table if index else sequence.block_table
            first = sequence.num_dropped if index == buffers.num_tables - 1 else 0
            if first:
                row[:first] = table[0]  # all the same
            row[first:stop] = table[first:stop]
    return width
