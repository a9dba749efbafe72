"""Tiny random bases of every family, adapters on all their sites, and all logits of our decoder."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from engine.inputs import build_inputs
from engine.kv_cache import KVCache, allocate_kv_cache
from engine.kv_layout import kv_layout
from engine.model import Model
from engine.model_config import lora_sites, read_model_config
from engine.parallel.shards import Shard
from engine.types import ScheduledBatch
from engine.weights import WeightBuilder
from lora.adapter import read_adapter
from lora.pool import AdapterPool
from tests.engine_helpers import BLOCK_SIZE, VOCAB, make_sequence, part

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
VOCABULARY = ("lm_head", "embed_tokens")
CPU = torch.device("cpu")
_NUM_BLOCKS = 64

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


@dataclass(frozen=True, slots=True)
class Variant:
    config: str  # the name of Hugging Face's class
    model: str
    changes: dict[str, object] = field(default_factory=dict)
    linears: tuple[str, ...] = LINEARS
    vision: dict[str, object] | None = None  # of a model of text and images
    outer: dict[str, object] = field(default_factory=dict)  # beside its two configurations


_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
_GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 6}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
VARIANTS = {
    "granite": Variant("GraniteConfig", "GraniteForCausalLM", _GRANITE | {"attention_bias": True}),
    "granite, tied": Variant(
        "GraniteConfig", "GraniteForCausalLM", _GRANITE | {"tie_word_embeddings": True}
    ),
    "smollm3": Variant("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}),
    "smollm3 with windows": Variant(
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    "ministral 3": Variant("Ministral3Config", "Ministral3ForCausalLM", {"rope_parameters": YARN}),
    "ministral 3 with a window": Variant(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {"rope_parameters": YARN, "sliding_window": 7, "tie_word_embeddings": True},
    ),
    "mistral 3": Variant(
        "MistralConfig",
        "Mistral3ForConditionalGeneration",
        {"sliding_window": None, "rope_theta": 1e6},
        vision=_PIXTRAL,
        outer={"tie_word_embeddings": False, "image_token_index": 1},
    ),
    "mistral 3 of ministral 3": Variant(
        "Ministral3Config",
        "Mistral3ForConditionalGeneration",
        {"rope_parameters": YARN},
        vision=_PIXTRAL,
        outer={"image_token_index": 1},
    ),
    "phi 3": Variant("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 9}, FUSED),
    "phi 4": Variant(
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 80,
            "head_dim": 8 * 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
        FUSED,
    ),
    "gemma 2": Variant(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma 3": Variant(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _GEMMA | {"layer_types": _TYPES, "rope_parameters": _BY_TYPE},
    ),
    "gemma 3 with images": Variant(
        "Gemma3TextConfig",
        "Gemma3ForConditionalGeneration",
        _GEMMA | {"layer_types": _TYPES},
        vision=_SIGLIP,
        outer={"mm_tokens_per_image": 4, "image_token_index": 1, "image_token_id": 1},
    ),
    "olmo 2": Variant("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo 3": Variant(
        "Olmo3Config", "Olmo3ForCausalLM", {"sliding_window": 6, "layer_types": _TYPES}
    ),
}


def make_family_base(folder: Path, variant: Variant) -> Path:
    """Saves a base as Hugging Face does, with weights large enough to tell its parts apart."""
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
        "initializer_range": 0.15,
    } | variant.changes
    config = getattr(transformers, variant.config)(**values)
    if variant.vision is not None:
        outer = getattr(transformers, variant.model).config_class
        config = outer(text_config=config, vision_config=variant.vision, **variant.outer)
    torch.manual_seed(7)
    model: PreTrainedModel = getattr(transformers, variant.model)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=0.0 if "Gemma" in variant.model else 1.0, std=0.2)
    model.save_pretrained(folder)
    return folder


def load_family(folder: Path) -> PreTrainedModel:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model: PreTrainedModel = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32
    )
    return model


def make_family_adapter(
    folder: Path, base: Path, targets: Many[str] | str, rank: int = 3, seed: int = 0, **more: object
) -> Path:
    torch.manual_seed(seed)
    names = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=names, init_lora_weights=False, **more
    )
    model = get_peft_model(load_family(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.08)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def expected_logits(base: Path, adapter: Path | None, ids: Many[int]) -> torch.Tensor:
    """Returns [len(ids), V] of Hugging Face and PEFT."""
    model: torch.nn.Module = load_family(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.float()


class Decoder:
    """Our decoder in float32 with a pool of adapters, each named as its folder."""

    def __init__(
        self,
        base: Path,
        adapters: Many[Path] = (),
        max_len: int | None = None,
        *,
        is_fp8: bool = False,
    ) -> None:
        self.config = read_model_config(base)
        sites = lora_sites(self.config)
        weights = WeightBuilder(Shard(self.config), torch.float32, CPU, is_fp8=is_fp8).load(base)
        self.model = Model(self.config, weights, max_len or self.config.usual_len)
        self.pool = AdapterPool(sites, 16 << 20, torch.float32, CPU, 64 << 20)
        for folder in adapters:
            self.pool.add(read_adapter(folder, folder.name, sites, 64, weights.parameters.get))
            while not self.pool.acquire(folder.name):
                self.pool.wait_pending()

    def logits(
        self, prompts: Many[tuple[Many[int], str | None]], chunk: int = 1000
    ) -> list[torch.Tensor]:
        """Returns [length, V] for each prompt and its adapter, all in the same steps of at most
        `chunk` tokens of each."""
        kv = self._empty_cache()
        sequences = [
            make_sequence(ids, 16 * i, adapter=adapter, num_blocks=16)
            for i, (ids, adapter) in enumerate(prompts)
        ]
        rows: list[list[torch.Tensor]] = [[] for _ in prompts]
        while any(s.num_computed_tokens < len(s.token_ids) for s in sequences):
            due = [
                (i, part(s, min(chunk, len(s.token_ids) - s.num_computed_tokens)))
                for i, s in enumerate(sequences)
                if s.num_computed_tokens < len(s.token_ids)
            ]
            batch = ScheduledBatch(tuple(scheduled for _, scheduled in due))
            first = 0
            found = self._step(batch, kv)
            for i, scheduled in due:
                count = scheduled.end - scheduled.start
                rows[i].append(found[first : first + count])
                first += count
                scheduled.sequence.num_computed_tokens = scheduled.end
        return [torch.cat(some) for some in rows]

    def _empty_cache(self) -> KVCache:
        # The sequences keep every key: the layers are one group.
        layout = kv_layout((None,) * self.config.num_layers, BLOCK_SIZE, self.config.max_len)
        return allocate_kv_cache(self.config, layout, _NUM_BLOCKS, torch.float32, CPU)

    @torch.inference_mode()
    def _step(self, batch: ScheduledBatch, kv: KVCache) -> torch.Tensor:
        inputs = build_inputs(batch, BLOCK_SIZE, CPU, self.pool)
        num_rows = sum(one.end - one.start for one in batch.sequences)
        every = replace(inputs, logit_rows=None, host_logit_rows=tuple(range(num_rows)))
        hidden = self.model.forward(every, kv, self.pool)
        return self.model.logits(hidden, every, 0, self.pool)
