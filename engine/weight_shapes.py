"""The tensors of a base in full precision: their names and shapes follow from the configuration."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.model_config import ModelConfig
from kernels.e4m3 import FEATURES


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that the files must hold, named as in a model of
    text."""
    hidden, inner, family = config.hidden_size, config.intermediate_size, config.family
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.ties_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    qkv = _rows(family.qkv_modules, (config.q_size, config.kv_size, config.kv_size))
    gate_up = _rows(family.gate_up_modules, (inner, inner))
    linears = (
        *((f"self_attn.{name}", size, hidden, config.has_qkv_bias) for name, size in qkv.items()),
        ("self_attn.o_proj", hidden, config.q_size, config.has_o_bias),
        *((f"mlp.{name}", size, hidden, config.has_mlp_bias) for name, size in gate_up.items()),
        ("mlp.down_proj", hidden, inner, config.has_mlp_bias),
    )
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        for norm in family.norms.values():
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        for module, out_features, in_features, has_bias in linears:
            shapes[f"{layer}.{module}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{layer}.{module}.bias"] = (out_features,)
        if family.qk_norm != "none":
            is_whole = family.qk_norm == "all"
            q_size, k_size = (
                size if is_whole else config.head_dim for size in (config.q_size, config.kv_size)
            )
            shapes[f"{layer}.self_attn.q_norm.weight"] = (q_size,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (k_size,)
    return shapes


def _rows(modules: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """Returns the rows of each module, of which a fused one has all."""
    return dict(zip(modules, sizes if len(modules) > 1 else (sum(sizes),), strict=True))


def layer_matrices(config: ModelConfig, index: int) -> dict[str, tuple[str, ...]]:
    """Returns the matrices of a layer, by the fields of `LayerWeights`, with the names of the
    weights that are stacked in each."""
    family, layer = config.family, f"model.layers.{index}"
    return {
        "qkv": tuple(f"{layer}.self_attn.{name}.weight" for name in family.qkv_modules),
        "o": (f"{layer}.self_attn.o_proj.weight",),
        "gate_up": tuple(f"{layer}.mlp.{name}.weight" for name in family.gate_up_modules),
        "down": (f"{layer}.mlp.down_proj.weight",),
    }


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def is_matrix(name: str) -> bool:
    """Returns True for a linear of a layer: `..._proj.weight`."""
    return name.endswith("_proj.weight")


def check_fp8(config: ModelConfig, num_ranks: int = 1) -> None:
    """Raises UnsupportedModelError if a matrix of the layers has a shape without FP8 products.
    `config`: of the part that each of the ranks has."""
    for name, shape in expected_shapes(config).items():
        if is_matrix(name) and any(size % FEATURES for size in shape):
            where = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
            raise UnsupportedModelError(
                f"quantization is fp8: {name} has shape {list(shape)}{where}, and FP8 products "
                f"need multiples of {FEATURES}"
            )
