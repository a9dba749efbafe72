"""Decodes are written by arrays: each row has the numbers that it has alone, and sees its keys."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.decode_columns import DecodeColumns
from engine.step_buffers import BufferSizes, StepBuffers
from engine.step_rows import write_decodes
from engine.types import Request, SamplingParams, ScheduledBatch, ScheduledSequence, Sequence
from kernels.paged_plan import (
    HEADER,
    ITEM,
    MAX_SPLITS,
    MIN_CHUNK,
    HeadShape,
    work_size,
    write_work,
)

BLOCK = 16
HEADS = HeadShape(4, 2, 16)
MOST = 64  # rows
MAX_BLOCKS = 3 * MIN_CHUNK // BLOCK


def make_buffers(num_tables: int) -> StepBuffers:
    work = work_size(MOST, MOST, HEADS)
    device = torch.device("cpu")
    return StepBuffers(BufferSizes(MOST, MOST, MOST, MAX_BLOCKS, work, 6, 9, num_tables), device)


def make_decode(
    draw: random.Random, number: int, length: int, num_drafted: int, is_known: bool
) -> ScheduledSequence:
    params = SamplingParams(
        temperature=draw.choice((0.0, 0.7)),
        top_k=draw.randrange(9),
        top_p=draw.random(),
        min_p=draw.random(),
    )
    request = Request(f"r{number}", tuple(draw.choices(range(1000), k=length)), params)
    sequence = Sequence(
        request, draw.randrange(3), draw.getrandbits(63), [*request.prompt_token_ids]
    )
    if not is_known:
        sequence.token_ids.pop()
    # One block more than the step needs, as after a draft that was cut.
    count = (length + num_drafted) // BLOCK + 1
    sequence.block_table = draw.sample(range(10_000), count)
    sequence.num_dropped = draw.randrange((length - 1) // BLOCK + 1)
    sequence.window_table = [7] * sequence.num_dropped + draw.sample(range(10_000), count)
    del sequence.window_table[count:]
    draft = tuple(draw.choices(range(1000), k=num_drafted))
    return ScheduledSequence(sequence, length - 1, length + num_drafted, True, draft)


@pytest.mark.parametrize("longest", [40, 3 * MIN_CHUNK - 8])
@pytest.mark.parametrize("num_tables", [1, 2])
@pytest.mark.parametrize(
    ("has_drafts", "max_queries"), [(False, 1), (True, 1), (True, 3), (True, 9)]
)
def test_each_row_has_the_numbers_that_it_has_alone(
    longest: int, num_tables: int, has_drafts: bool, max_queries: int
) -> None:
    draw = random.Random(longest + num_tables + has_drafts + max_queries)
    columns = DecodeColumns(MOST, MAX_BLOCKS, num_tables)
    for _ in range(10):
        parts = []
        for number in range(draw.randrange(1, 9)):
            num_drafted = draw.choice((0, 1, 4)) if has_drafts else 0
            is_known = bool(num_drafted) or draw.random() < 0.5
            length = draw.randrange(2, longest)
            parts.append(make_decode(draw, number, length, num_drafted, is_known))
        rows = ScheduledBatch(tuple(parts)).rows
        drawn_rows = {part.sequence: 100 + i for i, part in enumerate(parts)}
        buffers, size = make_buffers(num_tables), len(rows) + draw.randrange(4)
        buffers.begin()
        num_sequences, width, _ = write_decodes(
            buffers, columns, tuple(parts), drawn_rows, size, BLOCK, HEADS, max_queries
        )
        assert width == max(-(-row.end // BLOCK) for row in rows)
        check_padding(buffers, len(rows), num_sequences, size, num_tables)
        starts = buffers.host("query_start")
        number = 0  # of the row's sequence of attention
        for i, row in enumerate(rows):
            number += i == starts[number + 1]
            queries = int(starts[number + 1] - starts[number])
            assert queries <= max_queries
            seen = buffers.host("kv_lens")[number] - (starts[number + 1] - 1 - i)
            assert seen == row.end
            table_rows = [
                buffers.host_tables(num_sequences, width, index)[number]
                for index in range(num_tables)
            ]
            check_row(buffers, i, row, drawn_rows, table_rows)
        assert number == num_sequences - 1
        check_items(buffers, num_sequences + size - len(rows))
        if max_queries == 1:
            check_as_any_step(buffers, rows, size)


def check_row(
    buffers: StepBuffers,
    i: int,
    row: ScheduledSequence,
    drawn_rows: dict[Sequence, int],
    table_rows: list[np.ndarray],
) -> None:
    sequence, position = row.sequence, row.end - 1
    tokens = [*sequence.token_ids[: row.known_end], *row.draft]
    host, floats, params = buffers.host, buffers.host_floats, sequence.request.params
    if position < len(tokens):
        assert (host("token_ids")[i], host("sources")[i]) == (tokens[position], -1)
    else:
        assert host("sources")[i] == drawn_rows[sequence]
    assert host("positions")[i] == position
    assert (host("draw_positions")[i], host("choices")[i]) == (row.end, sequence.choice)
    assert (buffers.host_longs("seeds")[i], host("top_k")[i]) == (sequence.seed, params.top_k)
    for name in ("temperature", "top_p", "min_p"):
        assert floats(name)[i] == np.float32(getattr(params, name))
    tables = (sequence.block_table, sequence.window_table)
    for index, written in enumerate(table_rows):
        name, table = ("slots", "window_slots")[index], tables[index]
        assert host(name)[i] == table[position // BLOCK] * BLOCK + position % BLOCK
        first = sequence.num_dropped if index == len(table_rows) - 1 else 0
        stop = -(-row.end // BLOCK)
        assert written[first:stop].tolist() == table[first:stop]
        assert set(written[:first]) <= {table[0]}


def check_padding(
    buffers: StepBuffers, first: int, num_sequences: int, size: int, num_tables: int
) -> None:
    padding = slice(first, size)
    for name in ("token_ids", "positions", "temperature"):
        assert not buffers.host(name)[padding].any()
    for name in ("sources", *("slots", "window_slots")[:num_tables]):
        assert (buffers.host(name)[padding] == -1).all()
    total = num_sequences + size - first
    assert not buffers.host("kv_lens")[num_sequences:total].any()
    starts = buffers.host("query_start")[num_sequences : total + 1]
    assert starts.tolist() == list(range(first, size + 1))


def check_items(buffers: StepBuffers, total: int) -> None:
    """Every key is in one item, and every query of a split has a slot of its own."""
    work, starts = buffers.host("attention"), buffers.host("query_start")
    assert work[1] == total
    items = work[HEADER : HEADER + ITEM * work[0]].reshape(-1, ITEM).tolist()
    used: set[int] = set()
    for number in range(total):
        own = sorted(item for item in items if item[0] == number)
        ends = [0, *(item[2] for item in own)]
        assert [item[1] for item in own] == ends[:-1]
        assert ends[-1] == buffers.host("kv_lens")[number]
        assert [(item[3] >> 5) & 15 for item in own] == list(range(len(own)))
        assert {item[3] & 31 for item in own} == {len(own)}
        if len(own) > 1:
            (first,) = {item[3] >> 9 for item in own}
            slots = set(range(first, first + len(own) * int(starts[number + 1] - starts[number])))
            assert not used & slots
            used |= slots
    assert max(used, default=0) < MOST * MAX_SPLITS


def check_as_any_step(buffers: StepBuffers, rows: tuple[ScheduledSequence, ...], size: int) -> None:
    """The work is that of any step with sequences of one query."""
    kv_lens = np.array([row.end for row in rows] + [0] * (size - len(rows)), dtype=np.int32)
    starts = np.arange(size + 1, dtype=np.int32)
    expected = np.zeros_like(buffers.host("attention"))
    write_work(expected, starts, kv_lens, HEADS)
    assert (buffers.host("attention") == expected).all()


@pytest.mark.parametrize("num_tables", [1, 2])
def test_columns_follow_sequences_that_grow_end_and_are_preempted(num_tables: int) -> None:
    draw = random.Random(num_tables)
    columns = DecodeColumns(6, MAX_BLOCKS, num_tables)
    running: list[ScheduledSequence] = []
    for number in range(300):
        if len(running) < 6 and draw.random() < 0.5:
            running.append(make_decode(draw, number, draw.randrange(2, 200), 0, True))
            running[-1].sequence.num_dropped = 0
        if running and draw.random() < 0.2:
            running.pop(draw.randrange(len(running)))
        running = [grown(draw, part, num_tables > 1) for part in running]
        parts = tuple(part for part in running if draw.random() < 0.9)
        numbers, most = columns.update(parts, BLOCK)
        assert most == max((-(-part.end // BLOCK) for part in parts), default=0)
        buffers = make_buffers(num_tables)
        columns.write_draws(buffers, numbers)
        assert len(set(numbers.tolist())) == len(parts)
        for i, (part, row) in enumerate(zip(parts, numbers, strict=True)):
            sequence, stop = part.sequence, -(-part.end // BLOCK)
            assert buffers.host_longs("seeds")[i] == sequence.seed
            assert buffers.host("top_k")[i] == sequence.request.params.top_k
            tables = (sequence.block_table, sequence.window_table)[:num_tables]
            for index, table in enumerate(tables):
                assert columns.tables[index][row, :stop].tolist() == table[:stop]


def grown(draw: random.Random, part: ScheduledSequence, has_windows: bool) -> ScheduledSequence:
    """The next step of a sequence, which was perhaps preempted, or whose window has moved on."""
    sequence, end = part.sequence, part.end + draw.randrange(1, 40)
    more = draw.sample(range(10_000), -(-end // BLOCK) - part.end // BLOCK)
    if draw.random() < 0.1:
        sequence.num_dropped = 0
        sequence.block_table = draw.sample(range(10_000), len(sequence.block_table))
        sequence.window_table = draw.sample(range(10_000), len(sequence.window_table))
    sequence.block_table += more
    sequence.window_table += more
    last = sequence.window_table if has_windows else sequence.block_table
    sequence.num_dropped = draw.randrange(sequence.num_dropped, end // BLOCK + 1)
    last[: sequence.num_dropped] = [7] * sequence.num_dropped
    return ScheduledSequence(sequence, end - 1, end, True)
