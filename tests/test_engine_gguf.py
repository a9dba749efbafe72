"""A small GGUF file, written here, comes out as a base that validates and computes the same."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checks.validation import check_base
from engine.errors import UnsupportedModelError
from engine.model_config import read_model_config
from engine.tools.gguf import TYPES, convert_gguf
from engine.tools.gguf_config import llama3_divisors
from engine.weight_files import SINGLE_FILE
from tests.engine_helpers import Job, hf_greedy, load_hf, make_runner, make_sequence, run_mixed
from tests.gguf_files import TEMPLATE, write_gguf


def test_a_gguf_file_becomes_a_base_that_computes_the_same(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    told: list[str] = []
    out = tmp_path / "base"
    convert_gguf(path, out, told.append)
    report = check_base(out)
    assert (report.architecture, report.max_model_len) == ("LlamaForCausalLM", 64)
    assert report.has_chat_template
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    prompt = tokenizer("hello world")["input_ids"]
    assert len(prompt) == len("hello world") - 1  # "he" is one
    source = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    for name, weight in load_hf(out).state_dict().items():
        torch.testing.assert_close(weight, source.state_dict()[name], rtol=2**-8, atol=0)
    runner = make_runner(out)
    assert runner.model_config.eos_token_ids == (0,)
    outputs = run_mixed(runner, [Job(make_sequence(prompt))], 8)[0]
    assert outputs == hf_greedy(load_hf(out), prompt, 8)
    assert told


def test_what_is_not_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnsupportedModelError, match="the version of GGUF is 0"):
        convert_gguf(path, tmp_path / "base", lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_folder_is_never_written_to(tmp_path: Path) -> None:
    out = tmp_path / "base"
    out.mkdir()
    with pytest.raises(FileExistsError):
        convert_gguf(tmp_path / "any.gguf", out, lambda _: None)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_each_type_and_architecture_is_read_as_transformers_does(
    tmp_path: Path, architecture: str
) -> None:
    """Every second matrix of a layer has another type of blocks."""
    hidden = 512 if architecture == "qwen3" else 256  # transformers takes heads of 128 for granted
    path = write_gguf(tmp_path / "tiny.gguf", architecture, TYPES, hidden=hidden)
    out = tmp_path / "base"
    convert_gguf(path, out, lambda _: None)
    found = load_file(out / SINGLE_FILE)
    source = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    assert found
    for name, tensor in found.items():
        assert torch.equal(tensor, source[name].to(tensor.dtype)), name
    check_base(out)


def test_positions_of_llama_3_are_recognised_by_their_divisors(tmp_path: Path) -> None:
    divisors = llama3_divisors(16, 10000.0, 8.0, 8192)
    path = write_gguf(tmp_path / "tiny.gguf", rope_freqs=divisors)
    convert_gguf(path, tmp_path / "base", lambda _: None)
    rope = read_model_config(tmp_path / "base").ropes[0]
    assert rope is not None
    assert (rope.kind, rope.factor, rope.original_max_len) == ("llama3", 8.0, 8192)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"architecture": "falcon"}, "general.architecture is 'falcon'"),
        ({"rope_freqs": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}, "register the safetensors"),
        ({"scaling": ("yarn", 0.0)}, "rope.scaling.type is 'yarn' with factor 0.0"),
        ({"left_out": "token_embd"}, "token_embd.weight is missing in the file"),
        ({"left_out": "blk.1.ffn_up"}, r"tensor model.layers.1.mlp.up_proj.weight is missing"),
        ({"extra": "blk.1.ffn_gate_inp"}, "holds blk.1.ffn_gate_inp.weight, which is unknown"),
        ({"types": ("IQ4_NL",)}, "has type IQ4_NL, known are F32"),
    ],
)
def test_what_is_not_read_exactly_is_refused_by_name(
    tmp_path: Path, more: dict[str, object], message: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **more)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=message):
        convert_gguf(path, tmp_path / "base", lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


_ONE_KEY = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a"
_NUMBER = struct.pack("<QcII", 1, b"a", 4, 7)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(20), "the version of GGUF is 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), f"number of tensors is {2**62}, at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), f"number of keys is {2**62}, at most"),
        (_ONE_KEY + struct.pack("<IIQ", 9, 0, 2**40), f"elements of a is {2**40}, at most"),
        (_ONE_KEY + struct.pack("<IIQ", 9, 4, 2**20), "a at byte 49 takes 4194304 more, the file"),
        (_ONE_KEY + struct.pack("<IQ", 8, 2**63), f"a at byte 45 takes {2**63} more"),
        (_ONE_KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, "a has type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + _NUMBER * 2, "the key a is in the file twice"),
    ],
)
def test_a_header_that_is_wrong_is_refused_before_it_is_followed(
    tmp_path: Path, data: bytes, message: str
) -> None:
    """gguf's reader follows the count of elements until memory is full."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=message):
        convert_gguf(path, tmp_path / "base", lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("part", [0.001, 0.02, 0.3, 0.7, 0.9999])
def test_a_file_that_was_cut_off_is_refused_with_the_place(tmp_path: Path, part: float) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(UnsupportedModelError, match=r"the file has \d+: it is cut off"):
        convert_gguf(path, tmp_path / "base", lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("key", "number", "message"),
    [
        (
            "llama.block_count",
            struct.pack("<I", 2**24),
            "num_hidden_layers is 16777216: .* to 4096",
        ),
        ("llama.rope.freq_base", struct.pack("<f", -5.0), "freq_base is -5.0: it must be positive"),
        ("tokenizer.ggml.eos_token_id", struct.pack("<I", 9999), "eos_token_id is 9999, the model"),
        ("tokenizer.ggml.model", struct.pack("<Q", 4) + b"none", "cannot read the tokenizer"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(
    tmp_path: Path, key: str, number: bytes, message: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", rope_freqs=llama3_divisors(16, 10000.0, 8.0, 8192))
    data = bytearray(path.read_bytes())
    begin = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    data[begin : begin + len(number)] = number
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=message):
        convert_gguf(path, tmp_path / "base", lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_are_read(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", scaling=(kind, 4.0))
    convert_gguf(path, tmp_path / "base", lambda _: None)
    rope = read_model_config(tmp_path / "base").ropes[0]
    assert rope is not None
    assert (rope.kind, rope.factor) == (kind, 4.0)
