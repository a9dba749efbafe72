"""Tiny random model folders as registration meets them, written without Hugging Face's help."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INTERMEDIATE, VOCAB = 32, 48, 256


def make_base_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    torch.manual_seed(0)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_adapter_folder(
    folder: Path,
    *,
    rank: int = 2,
    hidden_size: int = HIDDEN,
    layer: str = "model.layers.0",
    b_scale: float = 1.0,
    trained_on: str | None = None,
) -> Path:
    folder.mkdir(parents=True)
    config = {
        "base_model_name_or_path": trained_on,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {}
    for name in ("q_proj", "v_proj"):
        prefix = f"base_model.model.{layer}.self_attn.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden_size)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(hidden_size, rank) * b_scale
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _byte_tokenizer() -> Tokenizer:
    """A token a byte, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
