"""The messages between ranks: a step's arrays in a slot, small messages with files, and their
limits."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.inputs import StepArrays, step_arrays
from engine.largest_step import step_limits
from engine.model_config import parse_model_config
from engine.parallel.channel import Link, Shared, StepSegment, slot_size
from engine.step_inputs import StepInputs, decode_limits
from engine.types import SamplingParams, ScheduledBatch, ScheduledSequence
from kernels.paged_plan import attention_scratch
from lora.pool import AdapterPool
from tests.engine_helpers import BLOCK_SIZE, GREEDY, VOCAB, make_sequence, part, random_prompt

_MAX_SEQS = 6
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}
_CONFIG = EngineConfig(
    "", "", max_num_seqs=_MAX_SEQS, max_num_batched_tokens=12 * _MAX_SEQS, block_size=BLOCK_SIZE
)
_LIMITS = step_limits(_CONFIG, parse_model_config(_MODEL, {}), 24 * BLOCK_SIZE, 1)
_PARAMS = (GREEDY, SamplingParams(prompt_logprobs=1))
_PARTS = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.sampled_from((None, "a", "0.5*a+b", "ü" * 40)),
        st.integers(1, 12),
        st.sampled_from(_PARAMS),
    ),
    min_size=1,
    max_size=_MAX_SEQS,
)


def _segment() -> StepSegment:
    return StepSegment(slot_size(_LIMITS))


def _step(parts: list[tuple[int, str | None, int, SamplingParams]]) -> StepArrays:
    sequences = [
        make_sequence(random_prompt(length, i), 24 * i, params, key)
        for i, (length, key, _, params) in enumerate(parts)
    ]
    scheduled = tuple(
        part(one, min(count, len(one.token_ids)))
        for one, (_, _, count, _) in zip(sequences, parts, strict=True)
    )
    return step_arrays(ScheduledBatch(scheduled), BLOCK_SIZE)


@settings(deadline=None)
@given(first=_PARTS, second=_PARTS)
def test_a_step_is_read_as_it_was_written_whatever_was_there_before(
    first: list[tuple[int, str | None, int, SamplingParams]],
    second: list[tuple[int, str | None, int, SamplingParams]],
) -> None:
    ours = _segment()
    other = StepSegment(ours.slot_ints, os.dup(ours.file))
    for parts in (first, second):
        step = _step(parts)
        ours.write(1, step)
        found = other.read(1)
        np.testing.assert_equal(asdict(found), asdict(step))


def test_a_step_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit 64 integers"):
        StepSegment(64).write(0, _step([(40, None, 40, GREEDY)]))


def test_a_slot_has_room_for_a_block_table_of_each_draft_token() -> None:
    """One sequence, of which the graph of decodes has eight: as many as its attention takes where
    it has a window."""
    config = replace(_CONFIG, max_num_seqs=1, max_num_batched_tokens=8, speculation="suffix")
    length = 8192 * BLOCK_SIZE
    limits = step_limits(config, parse_model_config(_MODEL, {}), length, 1)
    assert limits.max_draws == 8
    cpu = torch.device("cpu")
    pool = AdapterPool((), 0, torch.float32, cpu, host_bytes=0)
    scratch, drawn = attention_scratch(8, limits.heads, cpu), torch.zeros(8, dtype=torch.int32)
    rows = replace(decode_limits(limits), max_queries=1)
    inputs = StepInputs(rows, pool, scratch, drawn, is_decode=True)
    prompt = [1] * (length - 7)
    sequence = make_sequence(prompt, num_blocks=8192)
    whole = ScheduledSequence(sequence, len(prompt) - 1, length, True, (1,) * 7)
    layout = inputs.write_for_graph(ScheduledBatch((whole,)), {}, 8)
    assert layout.num_sequences == 8
    words, segment = inputs.words(layout), StepSegment(slot_size(limits))
    segment.write_words(0, words)
    assert np.array_equal(segment.words(0, len(words)), words)


def test_memory_holds_no_file_after_the_file_was_closed() -> None:
    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_files()
    ours = [Shared(8192) for _ in range(8)]
    others = [Shared(8192, os.dup(one.file)) for one in ours]
    for one in ours:
        one.close_file()
    assert num_files() == before
    for i, (one, other) in enumerate(zip(ours, others, strict=True)):
        one.ints(4096, 2)[1] = i
        assert other.tensor(4104, 8).view(torch.int64).item() == i
        other.floats(8, 1)[0] = 0.5
        assert one.floats(8, 1)[0] == 0.5


def test_a_long_message_and_a_file_arrive_in_order() -> None:
    own, other = map(Link, socket.socketpair())
    shared = Shared(4096)
    shared.tensor(0, 4).fill_(7)
    blocks = list(range(20_000))
    own.send({"do": "keep"}, shared.file)
    # The peer has to read while a message of this length is sent.
    sender = threading.Thread(target=own.send, args=({"blocks": blocks},))
    sender.start()
    message, file = other.receive()
    assert message == {"do": "keep"}
    assert file is not None
    assert Shared(4096, file).tensor(0, 4).tolist() == [7] * 4
    assert other.receive() == ({"blocks": blocks}, None)
    sender.join()
    own.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()
