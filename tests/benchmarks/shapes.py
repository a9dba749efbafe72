"""Shapes of well-known models, as a config.json, and the settings of LoRA adapters for them.

Weights are random: speed depends on shapes only. Free of torch: the peers' runner reads it too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

# The letter of each linear in the names of cases and adapters.
LINEARS = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "g": "gate_proj",
    "u": "up_proj",
    "d": "down_proj",
}
ALL_LINEARS = "".join(LINEARS)
# Modules that are fused in the checkpoint: adapted if any of their parts is.
FUSED = {"qkv_proj": "qkv", "gate_up_proj": "gu"}


def is_target(module: str, targets: str) -> bool:
    """Returns True for a module below a layer, such as mlp.up_proj, that letters of `LINEARS`
    name."""
    name = module.split(".")[1]
    letters = FUSED.get(name) or next(key for key, value in LINEARS.items() if value == name)
    return not set(letters).isdisjoint(targets)


def parse_targets(text: str) -> str:
    """Returns the letters of "all", or of names by comma ("q_proj,v_proj"), in the model's order.
    Raises ValueError with the name that is none of a linear."""
    if text == "all":
        return ALL_LINEARS
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LINEARS.values():
            known = ", ".join(LINEARS.values())
            raise ValueError(f"{name!r} is no linear of a layer; there are {known}, or all")
    return "".join(letter for letter, name in LINEARS.items() if name in names)


def targets_argument(text: str) -> str:
    """Returns what `parse_targets` does, for argparse, which shows the words of this error only."""
    try:
        return parse_targets(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    architecture: str  # as in config.json
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_len: int = 8192
    more: Mapping[str, object] = field(default_factory=dict)  # keys of config.json

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The modules below a layer, each with its (in, out) features."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.architecture == "Phi3ForCausalLM":
            return {
                "self_attn.qkv_proj": (hidden, q_size + 2 * kv_size),
                "self_attn.o_proj": (q_size, hidden),
                "mlp.gate_up_proj": (hidden, 2 * inner),
                "mlp.down_proj": (inner, hidden),
            }
        return {
            "self_attn.q_proj": (hidden, q_size),
            "self_attn.k_proj": (hidden, kv_size),
            "self_attn.v_proj": (hidden, kv_size),
            "self_attn.o_proj": (q_size, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }

    def config(self) -> dict[str, object]:
        eos = self.vocab_size - 1
        return {
            "architectures": [self.architecture],
            "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_len,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": eos - 1,
            "eos_token_id": eos,
            "torch_dtype": "bfloat16",
            "dtype": "bfloat16",
            **self.more,
        }

    def write_config(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2) + "\n")
        return folder

    def adapter_config(
        self, rank: int, alpha: int, targets: str = ALL_LINEARS
    ) -> dict[str, object]:
        """Returns PEFT's adapter_config.json. `targets`: letters of `LINEARS`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,  # registered under several names
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [
                module.split(".")[1] for module in self.linears if is_target(module, targets)
            ],
        }


def in_gptq(shape: ModelShape) -> ModelShape:
    """Returns the shape as a base of GPTQ: 4 bits, symmetric, in groups of 128."""
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    return replace(shape, more={**shape.more, "quantization_config": scheme})


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            "llama-3-8b", "LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, 1e-5
        ),
        ModelShape(
            "llama-3-70b", "LlamaForCausalLM", 8192, 28672, 80, 64, 8, 128, 128256, 500000.0, 1e-5
        ),
        ModelShape(
            "llama-2-7b",
            "LlamaForCausalLM",
            4096,
            11008,
            32,
            32,
            32,
            128,
            32000,
            10000.0,
            1e-5,
            4096,
        ),
        ModelShape(
            "qwen3-8b", "Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 128, 151936, 1000000.0, 1e-6
        ),
        ModelShape(
            "qwen2.5-7b", "Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, 128, 152064, 1000000.0, 1e-6
        ),
        ModelShape(
            "llama-3.2-1b", "LlamaForCausalLM", 2048, 8192, 16, 32, 8, 64, 128256, 500000.0, 1e-5
        ),
        ModelShape(
            "gemma-3-4b",
            "Gemma3ForCausalLM",
            2560,
            10240,
            34,
            8,
            4,
            256,
            262208,
            1000000.0,
            1e-6,
            more={
                "model_type": "gemma3_text",
                "tie_word_embeddings": True,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "sliding_window": 1024,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ModelShape(
            "phi-4", "Phi3ForCausalLM", 5120, 17920, 40, 40, 10, 128, 100352, 250000.0, 1e-5
        ),
        ModelShape(
            "mistral-small-24b",
            "MistralForCausalLM",
            5120,
            32768,
            40,
            32,
            8,
            128,
            131072,
            100000000.0,
            1e-5,
            more={"sliding_window": None},
        ),
        ModelShape(
            "mistral-7b",
            "MistralForCausalLM",
            4096,
            14336,
            32,
            32,
            8,
            128,
            32000,
            10000.0,
            1e-5,
            32768,
            more={"sliding_window": 4096},
        ),
        ModelShape("tiny", "LlamaForCausalLM", 64, 128, 2, 4, 2, 16, 1024, 10000.0, 1e-5),
    )
}
