"""The rows of a step in its static buffers: tokens, lengths, sampling parameters, block tables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.step_buffers import StepBuffers
from engine.types import ScheduledSequence, Sequence
from kernels.paged_plan import HeadShape, WorkCounts, write_work

_SEED_MASK = 2**64 - 1
Parts = tuple[ScheduledSequence, ...]


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
            if part.draft:  # a row of a draft in a graph
                token_ids[row] = part.draft[-1]
            elif start < len(known):
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
    buffers: StepBuffers, parts: Parts, num_rows: int, heads: HeadShape
) -> WorkCounts:
    """Writes `num_rows` sequences; rows past the batch are padding, with one query and no
    keys."""
    host = buffers.host
    query_start, kv_lens = host("query_start"), host("kv_lens")
    lengths = [part.end - part.start for part in parts] + [1] * (num_rows - len(parts))
    query_start[0] = 0
    np.cumsum(lengths, out=query_start[1 : num_rows + 1])
    kv_lens[: len(parts)] = [part.end for part in parts]
    kv_lens[len(parts) : num_rows] = 0
    return write_work(host("attention"), query_start[: num_rows + 1], kv_lens[:num_rows], heads)


def write_sampling(buffers: StepBuffers, parts: Parts, num_rows: int) -> None:
    host, floats, count = buffers.host, buffers.host_floats, len(parts)
    params = [part.sequence.request.params for part in parts]
    floats("temperature")[:count] = [p.temperature for p in params]
    host("top_k")[:count] = [p.top_k for p in params]
    floats("top_p")[:count] = [p.top_p for p in params]
    floats("min_p")[:count] = [p.min_p for p in params]
    seeds = np.array([part.sequence.seed & _SEED_MASK for part in parts], dtype=np.uint64)
    buffers.host_longs("seeds")[:count] = seeds.view(np.int64)
    host("choices")[:count] = [part.sequence.choice for part in parts]
    host("draw_positions")[:count] = [part.end for part in parts]
    floats("temperature")[count:num_rows] = 0.0  # padding is drawn greedily and discarded


def write_tables(buffers: StepBuffers, parts: Parts, num_rows: int, block_size: int) -> int:
    """Writes the block tables. Returns the width that the step sends of each."""
    widths = [-(-part.end // block_size) for part in parts]
    width = max(widths)
    for index in range(buffers.num_tables):
        rows = buffers.host_tables(num_rows, width, index)
        is_last = index == buffers.num_tables - 1
        for i, part in enumerate(parts):
            sequence, stop = part.sequence, widths[i]
            table = sequence.window_table if index else sequence.block_table
            first = sequence.num_dropped if is_last else 0
            if first:
                rows[i, :first] = table[0]  # all the same
            rows[i, first:stop] = table[first:stop]
    return width
