"""A base's safetensors read into the parameters of the decoder; q, k, v and gate, up are fused.

One file or shards with an index; every expected tensor must be there with its shape, and no other
(but for a few that mean nothing). Reads tensor by tensor: no second copy of the model in memory.
Pickles are never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import UnsupportedModelError
from engine.json_values import read_json
from engine.model_config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
_DTYPES = ("F32", "F16", "BF16")
_HARMLESS = re.compile(r"(?:model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(Hq + 2 * Hkv) * D, H]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    o: torch.Tensor  # [H, Hq * D]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 * I, H]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [H, I]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H], the embedding itself if tied
    # All of them by the names of the files, parts of fused ones as views. A tied head is the
    # embedding's own object.
    parameters: Mapping[str, torch.Tensor]


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Weights:
    builder = _Builder(config, dtype, device)
    weights = builder.build()
    assert builder.places.keys() == expected_shapes(config).keys()
    for name, tensor in stream_tensors(folder, config):
        builder.places[name].copy_(tensor)
    return weights


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Returns weights of any content; on the meta device, shapes without memory."""
    return _Builder(config, dtype, device).build()


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Returns random weights, as vLLM's `--load-format dummy`: made on the device, no files. Scaled
    so that activations keep their size; the same on every call with one device and shape."""
    builder = _Builder(config, dtype, device)
    weights = builder.build()
    generator = torch.Generator(device).manual_seed(0)
    for name, place in builder.places.items():
        if name.endswith("norm.weight"):
            place.fill_(1)
        elif name.endswith(".bias"):
            place.zero_()
        else:
            place.normal_(0.0, place.shape[-1] ** -0.5, generator=generator)
    return weights


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that the files must hold."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.ties_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = (
        ("self_attn.q_proj", config.q_size, hidden, config.has_qkv_bias),
        ("self_attn.k_proj", config.kv_size, hidden, config.has_qkv_bias),
        ("self_attn.v_proj", config.kv_size, hidden, config.has_qkv_bias),
        ("self_attn.o_proj", hidden, config.q_size, config.has_o_bias),
        ("mlp.gate_proj", inner, hidden, config.has_mlp_bias),
        ("mlp.up_proj", inner, hidden, config.has_mlp_bias),
        ("mlp.down_proj", hidden, inner, config.has_mlp_bias),
    )
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for module, out_features, in_features, has_bias in linears:
            shapes[f"{layer}.{module}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{layer}.{module}.bias"] = (out_features,)
        if config.has_qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def stream_tensors(folder: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each expected tensor once, after all names, shapes and types were checked."""
    files = _weight_files(folder)
    expected = expected_shapes(config)
    holder = _check_headers(files, expected, config.ties_embeddings)
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if holder.get(name) == path:
                    yield name, file.get_tensor(name)


def read_tensor(folder: Path, name: str) -> torch.Tensor | None:
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = read_json(folder / INDEX_FILE)
    if index is None:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pth") for p in folder.glob(pattern))
        if pickles:
            raise UnsupportedModelError(
                f"the weights are a pickle ({pickles[0]}), which is never read: save as safetensors"
            )
        raise UnsupportedModelError(f"the folder has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModelError(f"{INDEX_FILE} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise UnsupportedModelError(f"{INDEX_FILE} names {name!r}, not a file of the folder")
        if not (folder / name).is_file():
            raise UnsupportedModelError(f"{INDEX_FILE} names {name}, which is missing")
    return [folder / name for name in sorted(names)]


def _check_headers(
    files: list[Path], expected: dict[str, tuple[int, ...]], ties_embeddings: bool
) -> dict[str, Path]:
    """Returns the file of each tensor."""
    holder: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if _HARMLESS.fullmatch(name) or (ties_embeddings and name == "lm_head.weight"):
                        continue
                    if name not in expected:
                        raise UnsupportedModelError(f"{path.name} holds {name}, which is unknown")
                    if name in holder:
                        raise UnsupportedModelError(f"{name} is in {holder[name].name} and again")
                    view = file.get_slice(name)
                    _check_entry(name, tuple(view.get_shape()), view.get_dtype(), expected[name])
                    holder[name] = path
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from None
    missing = [name for name in expected if name not in holder]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModelError(f"tensor {missing[0]}{more} is missing")
    return holder


def _check_entry(name: str, shape: tuple[int, ...], dtype: str, expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise UnsupportedModelError(
            f"{name} has shape {list(shape)}, config.json makes it {list(expected)}"
        )
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"{name} has type {dtype}, known are {', '.join(_DTYPES)}")


class _Builder:
    """Allocates the parameters and records, for each tensor of the files, its destination."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.places: dict[str, torch.Tensor] = {}
        self._config = config
        self._shapes = expected_shapes(config)
        self._dtype = dtype
        self._device = device

    def build(self) -> Weights:
        embedding = self._make("model.embed_tokens.weight")
        layers = tuple(self._layer(i) for i in range(self._config.num_layers))
        norm = self._make("model.norm.weight")
        head = embedding if self._config.ties_embeddings else self._make("lm_head.weight")
        parameters = dict(self.places)
        if self._config.ties_embeddings:
            parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]
        return Weights(embedding, layers, norm, head, parameters)

    def _layer(self, index: int) -> LayerWeights:
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = [f"{attention}.{name}_proj" for name in "qkv"]
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        return LayerWeights(
            input_norm=self._make(f"{layer}.input_layernorm.weight"),
            qkv=self._make(*(f"{module}.weight" for module in qkv)),
            qkv_bias=self._make_if_expected(*(f"{module}.bias" for module in qkv)),
            q_norm=self._make_if_expected(f"{attention}.q_norm.weight"),
            k_norm=self._make_if_expected(f"{attention}.k_norm.weight"),
            o=self._make(f"{attention}.o_proj.weight"),
            o_bias=self._make_if_expected(f"{attention}.o_proj.bias"),
            post_norm=self._make(f"{layer}.post_attention_layernorm.weight"),
            gate_up=self._make(*(f"{module}.weight" for module in gate_up)),
            gate_up_bias=self._make_if_expected(*(f"{module}.bias" for module in gate_up)),
            down=self._make(f"{mlp}.down_proj.weight"),
            down_bias=self._make_if_expected(f"{mlp}.down_proj.bias"),
        )

    def _make(self, *names: str) -> torch.Tensor:
        """Allocates one parameter with the named tensors stacked in it."""
        sizes = [self._shapes[name][0] for name in names]
        shape = (sum(sizes), *self._shapes[names[0]][1:])
        parameter = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.places.update(zip(names, torch.split(parameter, sizes), strict=True))
        return parameter

    def _make_if_expected(self, *names: str) -> torch.Tensor | None:
        return self._make(*names) if names[0] in self._shapes else None
