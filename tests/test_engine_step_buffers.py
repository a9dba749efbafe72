"""Words written on the host arrive in the device's twin, whatever the step needed."""

from __future__ import annotations

from itertools import pairwise

import torch

from engine.decode_graphs import graph_sizes
from engine.step_buffers import BufferSizes, StepBuffers


def make_buffers() -> StepBuffers:
    return StepBuffers(BufferSizes(5, 3, 3, 7, 11, 6, 9), torch.device("cpu"))


def test_every_field_has_words_of_its_own() -> None:
    buffers = make_buffers()
    names = {"seeds": 6, "token_ids": 5, "kv_lens": 3, "query_start": 4, "attention": 11, "lora": 6}
    buffers.begin()
    for value, name in enumerate(names, start=1):
        buffers.host(name)[:] = value
    buffers.host_tables(2, 3)[:] = [[1, 2, 3], [4, 5, 6]]
    buffers.send(2, 3)
    for value, (name, size) in enumerate(names.items(), start=1):
        assert buffers.device(name).tolist() == [value] * size
    (table,) = buffers.device_tables(2)
    assert table[:, :3].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert buffers.device("seeds").data_ptr() % 16 == 0


def test_the_head_s_plan_is_sent_only_if_needed() -> None:
    buffers = make_buffers()
    buffers.begin()
    buffers.host("head")[:] = 4
    buffers.host("lora")[:] = 5
    buffers.host_tables(1, 1)[:] = 6
    buffers.send(1, 1)
    assert buffers.device("head").tolist() == [0] * 9
    assert buffers.device("lora").tolist() == [5] * 6
    buffers.send(1, 1, with_head=True)
    assert buffers.device("head").tolist() == [4] * 9
    assert buffers.device_tables(1)[0][0, 0] == 6


def test_each_of_many_steps_sends_its_own_numbers() -> None:
    buffers = make_buffers()
    for number in range(200):
        num_rows, width = number % 3 + 1, number // 3 % 7 + 1
        buffers.begin()
        buffers.host("token_ids")[:] = number
        buffers.host("head")[:] = number
        buffers.host_tables(num_rows, width)[:] = number
        buffers.send(num_rows, width, with_head=number % 5 == 0)
        assert buffers.device("token_ids").tolist() == [number] * 5
        assert buffers.device("head").tolist() == [number - number % 5] * 9
        (table,) = buffers.device_tables(num_rows)
        assert (table[:, :width] == number).all()


def test_a_second_block_table_has_slots_and_rows_of_its_own() -> None:
    buffers = StepBuffers(BufferSizes(5, 3, 3, 7, 11, 6, 9, num_tables=2), torch.device("cpu"))
    buffers.begin()
    for value, name in enumerate(("slots", "window_slots", "kv_lens", "lora"), start=1):
        buffers.host(name)[:] = value
    buffers.host_tables(2, 3)[:] = [[1, 2, 3], [4, 5, 6]]
    buffers.host_tables(2, 3, 1)[:] = [[7, 8, 9], [10, 11, 12]]
    buffers.send(2, 3)
    assert [one.tolist() for one in buffers.device_slots(4)] == [[1] * 4, [2] * 4]
    assert buffers.device("lora").tolist() == [4] * 6
    first, second = (table[:, :3].tolist() for table in buffers.device_tables(2))
    assert (first, second) == ([[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]])


def test_floats_and_longs_are_the_same_words() -> None:
    buffers = make_buffers()
    buffers.begin()
    buffers.host_floats("temperature")[:] = 0.5
    buffers.host_longs("seeds")[:] = [-1, 2**62, 3]
    buffers.send(1, 1)
    assert buffers.device_floats("temperature").tolist() == [0.5] * 3
    assert buffers.device_longs("seeds").tolist() == [-1, 2**62, 3]


def test_a_step_is_written_while_the_last_ones_copy_may_still_be_read() -> None:
    buffers = make_buffers()
    buffers.begin()
    first = buffers.host("token_ids")
    first[:] = 1
    buffers.begin()
    buffers.host("token_ids")[:] = 2
    assert first.tolist() == [1] * 5
    buffers.begin()
    assert buffers.host("token_ids").tolist() == [1] * 5


def test_graphs_waste_little_of_a_batch() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(6) == (1, 2, 4, 6)
    sizes = graph_sizes(300)
    assert (sizes[0], sizes[-1]) == (1, 300)
    for low, high in pairwise(sizes):
        assert high - low <= max(8, high // 4)
