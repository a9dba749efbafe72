"""Decodes are written by arrays: each row has the numbers that it has alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.step_buffers import StepBuffers
from engine.step_rows import write_decodes
from engine.types import Request, SamplingParams, ScheduledBatch, ScheduledSequence, Sequence
from kernels.paged_plan import MIN_CHUNK, HeadShape, work_size, write_work

BLOCK = 16
HEADS = HeadShape(4, 2, 16)
MOST = 64  # rows
MAX_BLOCKS = 3 * MIN_CHUNK // BLOCK


def make_buffers(num_tables: int) -> StepBuffers:
    work = work_size(MOST, MOST, HEADS)
    device = torch.device("cpu")
    return StepBuffers(MOST, MOST, MOST, MAX_BLOCKS, work, 6, 9, device, num_tables)


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
@pytest.mark.parametrize("has_drafts", [False, True])
def test_each_row_has_the_numbers_that_it_has_alone(
    longest: int, num_tables: int, has_drafts: bool
) -> None:
    draw = random.Random(longest + num_tables + has_drafts)
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
        width, _ = write_decodes(buffers, tuple(parts), drawn_rows, size, BLOCK, HEADS)
        assert width == max(-(-row.end // BLOCK) for row in rows)
        for i, row in enumerate(rows):
            check_row(buffers, i, row, drawn_rows, size, width, num_tables)
        check_padding(buffers, len(rows), size, num_tables)
        check_attention(buffers, rows, size)


def check_row(
    buffers: StepBuffers,
    i: int,
    row: ScheduledSequence,
    drawn_rows: dict[Sequence, int],
    size: int,
    width: int,
    num_tables: int,
) -> None:
    sequence, position = row.sequence, row.end - 1
    tokens = [*sequence.token_ids[: row.known_end], *row.draft]
    host, floats, params = buffers.host, buffers.host_floats, sequence.request.params
    if position < len(tokens):
        assert (host("token_ids")[i], host("sources")[i]) == (tokens[position], -1)
    else:
        assert host("sources")[i] == drawn_rows[sequence]
    assert (host("positions")[i], host("kv_lens")[i]) == (position, row.end)
    assert (host("draw_positions")[i], host("choices")[i]) == (row.end, sequence.choice)
    assert (buffers.host_longs("seeds")[i], host("top_k")[i]) == (sequence.seed, params.top_k)
    for name in ("temperature", "top_p", "min_p"):
        assert floats(name)[i] == np.float32(getattr(params, name))
    names = ("slots", "window_slots")[:num_tables]
    tables = (sequence.block_table, sequence.window_table)
    for index, (name, table) in enumerate(zip(names, tables, strict=False)):
        assert host(name)[i] == table[position // BLOCK] * BLOCK + position % BLOCK
        first = sequence.num_dropped if index == num_tables - 1 else 0
        stop = -(-row.end // BLOCK)
        written = buffers.host_tables(size, width, index)[i]
        assert written[first:stop].tolist() == table[first:stop]
        assert set(written[:first]) <= {table[0]}


def check_padding(buffers: StepBuffers, first: int, size: int, num_tables: int) -> None:
    padding = slice(first, size)
    for name in ("token_ids", "positions", "kv_lens", "temperature"):
        assert not buffers.host(name)[padding].any()
    for name in ("sources", *("slots", "window_slots")[:num_tables]):
        assert (buffers.host(name)[padding] == -1).all()


def check_attention(buffers: StepBuffers, rows: tuple[ScheduledSequence, ...], size: int) -> None:
    kv_lens = np.array([row.end for row in rows] + [0] * (size - len(rows)), dtype=np.int32)
    starts = np.arange(size + 1, dtype=np.int32)
    assert (buffers.host("query_start")[: size + 1] == starts).all()
    expected = np.zeros_like(buffers.host("attention"))
    write_work(expected, starts, kv_lens, HEADS)
    assert (buffers.host("attention") == expected).all()
