"""Small GGUF files of random weights, with a byte-level tokenizer as SmolLM2's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

INNER_OVER_HIDDEN, HEADS, KV_HEADS, LAYERS = 2, 4, 2, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
# Where the float16 scales of a block lie. Its other bytes may be any.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    types: Sequence[str] = ("Q8_0",),
    *,
    hidden: int = 64,
    rope_freqs: Sequence[float] = (),
    scaling: tuple[str, float] | None = None,
    left_out: str = "",
    extra: str = "",
) -> Path:
    """Writes a file whose matrices have the types in turn, with one tensor left out or one more."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["\u0120"]
    tokens = ["<end>", "<start>", *letters, "he"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(hidden * INNER_OVER_HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // HEADS)
    writer.add_key_length(hidden // HEADS)
    writer.add_value_length(hidden // HEADS)
    if architecture.startswith("gemma") or architecture == "phi3":
        writer.add_sliding_window(16)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling[0]))
        writer.add_rope_scaling_factor(scaling[1])
        writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(letters) + 1)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    kinds = cycle(types)
    for name, shape in _shapes(architecture, hidden, len(tokens), extra):
        if name.removesuffix(".weight") == left_out:
            continue
        if len(shape) == 1:
            vector = generator.normal(loc=1.0, scale=0.1, size=shape).astype(np.float32)
            writer.add_tensor(name, vector)
        else:
            kind = GGMLQuantizationType[next(kinds)]
            writer.add_tensor(name, _blocks(generator, shape, kind), raw_dtype=kind)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(
    architecture: str, hidden: int, vocab: int, extra: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = hidden // HEADS * KV_HEADS
    inner = hidden * INNER_OVER_HIDDEN
    attention = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    mlp = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
    if architecture == "phi3":
        attention = {"attn_qkv": (hidden + 2 * kv, hidden)}
        mlp = {"ffn_up": (2 * inner, hidden)}
    matrices = attention | mlp | {"attn_output": (hidden, hidden), "ffn_down": (hidden, inner)}
    norms = ["attn_norm", "ffn_norm"]
    if architecture.startswith("gemma"):
        norms += ["post_attention_norm", "post_ffw_norm"]
    yield "token_embd.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    for i in range(LAYERS):
        for name, shape in matrices.items():
            yield f"blk.{i}.{name}.weight", shape
        for name in norms:
            yield f"blk.{i}.{name}.weight", (hidden,)
        if architecture == "qwen2":
            for name, shape in attention.items():
                yield f"blk.{i}.{name}.bias", shape[:1]
        if architecture in ("qwen3", "gemma3"):
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"blk.{i}.{name}.weight", (hidden // HEADS,)
    if extra:
        yield f"{extra}.weight", (2, hidden)


def _blocks(
    generator: np.random.Generator, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> np.ndarray:
    values = generator.normal(scale=0.2, size=shape).astype(np.float32)
    if kind.name not in _SCALES:
        made: np.ndarray = gguf.quants.quantize(values, kind)
        return made
    # gguf cannot write these: blocks of random bytes with scales of random floats.
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for place in _SCALES[kind.name]:
        scale = generator.uniform(0.0001, 0.001, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = scale[:, :, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)
