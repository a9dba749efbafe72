"""A small GGUF file, written here, comes out as a base that validates and computes the same."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checks.validation import check_base
from engine.tools.gguf import convert_gguf
from tests.engine_helpers import Job, hf_greedy, load_hf, make_runner, make_sequence, run_mixed

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_gguf(path: Path) -> Path:
    """A byte-level tokenizer (as SmolLM2's) and random weights in 8-bit blocks."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["\u0120"]
    tokens = ["<end>", "<start>", *letters, "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(letters) + 1)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv_size, HIDDEN), "attn_v": (kv_size, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN)}
    shapes |= {"ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    quantized = {"token_embd": (len(tokens), HIDDEN)} | {
        f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()
    }
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in quantized.items():
        values = generator.normal(scale=0.2, size=shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    norms = [f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in [*norms, "output_norm"]:
        values = generator.normal(loc=1.0, scale=0.1, size=HIDDEN).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    with pytest.raises((OSError, ValueError)):
        convert_gguf(path, tmp_path / "base", lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_folder_is_never_written_to(tmp_path: Path) -> None:
    out = tmp_path / "base"
    out.mkdir()
    with pytest.raises(FileExistsError):
        convert_gguf(tmp_path / "any.gguf", out, lambda _: None)
    assert list(out.iterdir()) == []
