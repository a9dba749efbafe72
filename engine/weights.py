"""A base's safetensors read into the parameters of the decoder; q, k, v and gate, up are fused.

Every expected tensor must be there with its shape, and no other, but for a few that mean nothing
and for the parts of a larger model that no text reaches. Reads tensor by tensor: no second copy of
the model in memory. The layers' matrices can be kept in FP8: each is quantised as it is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import UnsupportedModelError
from engine.model_config import ModelConfig
from engine.weight_files import weight_files
from kernels.e4m3 import FEATURES, E4m3Rows, Matrix, empty_rows
from lora.module_names import canonical, is_of_other_part

logger = logging.getLogger(__name__)

_DTYPES = ("F32", "F16", "BF16")
_HARMLESS = re.compile(r"(?:model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor | None  # [H], of what enters attention
    attention_post_norm: torch.Tensor | None  # [H], of what attention adds
    mlp_norm: torch.Tensor | None  # [H], of what enters the MLP
    mlp_post_norm: torch.Tensor | None  # [H], of what the MLP adds
    qkv: Matrix  # [(Hq + 2 * Hkv) * D, H]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]; of all heads together [Hq * D]
    k_norm: torch.Tensor | None
    o: Matrix  # [H, Hq * D]
    o_bias: torch.Tensor | None
    gate_up: Matrix  # [2 * I, H]
    gate_up_bias: torch.Tensor | None
    down: Matrix  # [H, I]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H], the embedding itself if tied
    # All of them by the names of the files, parts of fused ones as views. A tied head is the
    # embedding's own object.
    parameters: Mapping[str, Matrix]


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_fp8: bool = False,
) -> Weights:
    """Reads a base. `is_fp8`: the matrices of the layers become e4m3 rows."""
    builder = _Builder(config, dtype, device, is_fp8=is_fp8)
    weights = builder.build()
    assert builder.places.keys() == expected_shapes(config).keys()
    offset = config.family.norm_offset
    for name, tensor in stream_tensors(folder, config):
        place = builder.places[name]
        if isinstance(place, E4m3Rows):
            place.write_(tensor)
            continue
        place.copy_(tensor)
        if offset and _is_norm(name):
            place += offset  # in float32, as norms with an offset are kept
    return weights


def empty_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_fp8: bool = False
) -> Weights:
    """Returns weights of any content; on the meta device, shapes without memory."""
    return _Builder(config, dtype, device, is_fp8=is_fp8).build()


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_fp8: bool = False
) -> Weights:
    """Returns random weights, as vLLM's `--load-format dummy`: made on the device, no files. Scaled
    so that activations keep their size; the same on every call with one device and shape. In FP8,
    those of the other type quantised."""
    builder = _Builder(config, dtype, device, is_fp8=is_fp8)
    weights = builder.build()
    generator = torch.Generator(device).manual_seed(0)
    for name, place in builder.places.items():
        if isinstance(place, E4m3Rows):
            drawn = torch.empty(place.shape, dtype=dtype, device=device)
            place.write_(drawn.normal_(0.0, place.shape[-1] ** -0.5, generator=generator))
        elif _is_norm(name):
            place.fill_(1)
        elif name.endswith(".bias"):
            place.zero_()
        else:
            place.normal_(0.0, place.shape[-1] ** -0.5, generator=generator)
    return weights


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
    qkv_size = config.q_size + 2 * config.kv_size
    qkv = (
        [("qkv_proj", qkv_size)]
        if family.has_fused_projections
        else [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
    )
    gate_up = (
        [("gate_up_proj", 2 * inner)]
        if family.has_fused_projections
        else [("gate_proj", inner), ("up_proj", inner)]
    )
    linears = (
        *((f"self_attn.{name}", size, hidden, config.has_qkv_bias) for name, size in qkv),
        ("self_attn.o_proj", hidden, config.q_size, config.has_o_bias),
        *((f"mlp.{name}", size, hidden, config.has_mlp_bias) for name, size in gate_up),
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


def stream_tensors(folder: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each expected tensor once, after all names, shapes and types were checked."""
    files = weight_files(folder)
    holder = _check_headers(files, config)
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                known = _known_name(name, config)
                if known is not None and holder.get(known) == path:
                    yield known, file.get_tensor(name)


def read_tensor(folder: Path, name: str) -> torch.Tensor | None:
    """Returns a tensor by its name in a model of text."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if name in (key, canonical(key)):
                    tensor: torch.Tensor = file.get_tensor(key)
                    return tensor
    return None


def check_fp8(config: ModelConfig) -> None:
    """Raises UnsupportedModelError if a matrix of the layers has a shape without FP8 products."""
    for name, shape in expected_shapes(config).items():
        if _is_matrix(name) and any(size % FEATURES for size in shape):
            raise UnsupportedModelError(
                f"quantization is fp8: {name} has shape {list(shape)}, and FP8 products need "
                f"multiples of {FEATURES}"
            )


def _is_matrix(name: str) -> bool:
    """Returns True for a linear of a layer: `..._proj.weight`."""
    return name.endswith("_proj.weight")


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _known_name(name: str, config: ModelConfig) -> str | None:
    """Returns the name of a tensor as in a model of text; None: it means nothing to a text."""
    if config.is_text_part:
        if is_of_other_part(name):
            return None
        name = canonical(name)
    if _HARMLESS.fullmatch(name) or (config.ties_embeddings and name == "lm_head.weight"):
        return None
    return name


def _check_headers(files: list[Path], config: ModelConfig) -> dict[str, Path]:
    """Returns the file of each tensor."""
    expected = expected_shapes(config)
    holder: dict[str, Path] = {}
    num_others = 0
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    name = _known_name(key, config)
                    num_others += config.is_text_part and is_of_other_part(key)
                    if name is None:
                        continue
                    if name not in expected:
                        raise UnsupportedModelError(f"{path.name} holds {key}, which is unknown")
                    if name in holder:
                        raise UnsupportedModelError(f"{name} is in {holder[name].name} and again")
                    view = file.get_slice(key)
                    _check_entry(key, tuple(view.get_shape()), view.get_dtype(), expected[name])
                    holder[name] = path
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from None
    missing = [name for name in expected if name not in holder]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModelError(f"tensor {missing[0]}{more} is missing")
    if num_others:
        logger.info("%d tensors of the part for images are left unread", num_others)
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

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_fp8: bool
    ) -> None:
        self.places: dict[str, Matrix] = {}
        self._is_fp8 = is_fp8
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
        is_fused = self._config.family.has_fused_projections
        qkv = [f"{attention}.{name}_proj" for name in (["qkv"] if is_fused else "qkv")]
        gate_up = [f"{mlp}.{name}_proj" for name in (["gate_up"] if is_fused else ["gate", "up"])]
        norms = {
            place: self._make(f"{layer}.{norm}.weight")
            for place, norm in self._config.family.norms.items()
        }
        return LayerWeights(
            input_norm=norms.get("input_norm"),
            attention_post_norm=norms.get("attention_post_norm"),
            mlp_norm=norms.get("mlp_norm"),
            mlp_post_norm=norms.get("mlp_post_norm"),
            qkv=self._make_matrix(*(f"{module}.weight" for module in qkv)),
            qkv_bias=self._make_if_expected(*(f"{module}.bias" for module in qkv)),
            q_norm=self._make_if_expected(f"{attention}.q_norm.weight"),
            k_norm=self._make_if_expected(f"{attention}.k_norm.weight"),
            o=self._make_matrix(f"{attention}.o_proj.weight"),
            o_bias=self._make_if_expected(f"{attention}.o_proj.bias"),
            gate_up=self._make_matrix(*(f"{module}.weight" for module in gate_up)),
            gate_up_bias=self._make_if_expected(*(f"{module}.bias" for module in gate_up)),
            down=self._make_matrix(f"{mlp}.down_proj.weight"),
            down_bias=self._make_if_expected(f"{mlp}.down_proj.bias"),
        )

    def _make_matrix(self, *names: str) -> Matrix:
        """Allocates one matrix of a layer, in FP8 if the base is quantised."""
        if not self._is_fp8:
            return self._make(*names)
        sizes = [self._shapes[name][0] for name in names]
        rows = empty_rows(sum(sizes), self._shapes[names[0]][1], self._device)
        self.places.update(zip(names, rows.split(sizes), strict=True))
        return rows

    def _make(self, *names: str) -> torch.Tensor:
        """Allocates one parameter with the named tensors stacked in it."""
        sizes = [self._shapes[name][0] for name in names]
        shape = (sum(sizes), *self._shapes[names[0]][1:])
        is_wide = self._config.family.has_wide_norms and _is_norm(names[0])
        dtype = torch.float32 if is_wide else self._dtype
        parameter = torch.empty(shape, dtype=dtype, device=self._device)
        self.places.update(zip(names, torch.split(parameter, sizes), strict=True))
        return parameter

    def _make_if_expected(self, *names: str) -> torch.Tensor | None:
        return self._make(*names) if names[0] in self._shapes else None
