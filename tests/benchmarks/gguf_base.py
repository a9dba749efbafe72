"""The demo's base out of its GGUF file, where transformers is too old to read one: weights and
config.json, what the engine needs, no tokenizer.

The numbers are those of `engine.tools.gguf`: blocks spread to float32, rounded to bfloat16. Of the
Llama family only, and of what this file uses of it.

    python -m tests.benchmarks.gguf_base FILE.gguf FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Numbers = npt.NDArray[np.float32]

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def convert(path: Path, folder: Path) -> None:
    reader = gguf.GGUFReader(path)

    def value(name: str) -> object:
        field = reader.get_field(f"llama.{name}")
        assert field is not None, name
        return field.contents()

    heads, kv_heads = int(str(value("attention.head_count"))), value("attention.head_count_kv")
    hidden = value("embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "max_position_embeddings": value("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": value("block_count"),
        "num_key_value_heads": kv_heads,
        "head_dim": int(str(hidden)) // heads,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "vocab_size": value("vocab_size"),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    tensors = {}
    for tensor in reader.tensors:
        name = _name(tensor.name)
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            numbers = _halves(numbers, heads)
        elif name.endswith("k_proj.weight"):
            numbers = _halves(numbers, int(str(kv_heads)))
        tensors[name] = torch.from_numpy(np.array(numbers)).to(
            torch.bfloat16
        )  # a copy: the file's is read-only
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors")


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    block, layer, module, end = name.split(".")
    assert (block, end) == ("blk", "weight"), name
    return f"model.layers.{layer}.{_MODULES[module]}.weight"


def _halves(weight: Numbers, heads: int) -> Numbers:
    """Rows of a rotated pair lie side by side in the file, half a head apart in safetensors."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    convert(arguments.file, arguments.folder)


if __name__ == "__main__":
    main()
