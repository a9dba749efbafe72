"""The vectors of an adapter's file: DoRA's magnitudes, biases of lora_B, biases of the base.

They become a module's affine rows. With the base's product y, its bias b included, PEFT computes

    y + (g - 1) (y - b) + g s B A x   DoRA
    y + s c + s B A x                 a bias c of lora_B
    y + (t - b) + s B A x             a trained bias t in place of b

so gains are g - 1, offsets the terms without x or y, and g is part of B.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kernels.matrix import Matrix
from lora.adapter_keys import module_of
from lora.dora import dora_gains
from lora.errors import AdapterError
from lora.header import TensorFile
from lora.module_weights import ModuleWeights, is_finite
from lora.peft_config import PeftConfig
from lora.sites import Target
from lora.untrusted import shown

# Returns a parameter of the base by its name, as "model.layers.0.mlp.up_proj.weight"; None: the
# base has none of this name, or the caller lacks it. A tied head is the embedding's own object.
# The layers' matrices may be quantised.
BaseParameter = Callable[[str], Matrix | None]

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.(?:"
    r"(?P<magnitude>lora_magnitude_vector(?:\.default)?(?:\.weight)?)"
    r"|(?P<lora_bias>lora_B(?:\.default)?\.bias)"
    r"|(?P<bias>(?:base_layer\.)?bias))"
)
_WORDS = {
    "magnitude": "a magnitude of DoRA",
    "lora_bias": "a bias of lora_B",
    "bias": "a bias of the base",
}
Keys = dict[str, dict[str, str]]  # module -> magnitude, lora_bias or bias -> key


def parse_vector_key(key: str, targets: Mapping[str, Target]) -> tuple[str, str] | None:
    """Returns the module and the kind of a vector's key, None if the key is not a vector's."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    module, kind = module_of(key, match["module"], targets), str(match.lastgroup)
    if targets[module].site.is_optional:
        raise AdapterError(
            f"tensor {shown(key)} is {_WORDS[kind]}, which is not supported at {module}: leave it "
            "out of target_modules"
        )
    return module, kind


def check_vectors(
    file: TensorFile,
    vectors: Keys,
    pairs: Mapping[str, object],
    config: PeftConfig,
    targets: Mapping[str, Target],
) -> None:
    """Checks that the file has the vectors that the configuration names, and no others. `pairs`:
    the modules with A and B."""
    is_named = {
        "magnitude": (config.use_dora, "use_dora"),
        "lora_bias": (config.lora_bias, "lora_bias"),
        "bias": (config.trains_biases, "bias"),
    }
    for module, keys in vectors.items():
        for kind, key in keys.items():
            named, field = is_named[kind]
            if not named:
                raise AdapterError(
                    f"tensor {shown(key)} is {_WORDS[kind]}, but adapter_config.json does not set "
                    f"{field}"
                )
            if kind != "bias" and module not in pairs:
                raise AdapterError(f"tensor {shown(key)} belongs to a module without lora_B")
            shape, size = file.entries[key].shape, targets[module].out_features
            if shape != (size,):
                raise AdapterError(
                    f"tensor {shown(key)} has shape {list(shape)}, the base has [{size}]"
                )
    for module in pairs:
        for kind in ("magnitude", "lora_bias"):
            named, field = is_named[kind]
            if named and targets[module].site.is_optional:
                raise AdapterError(
                    f"{field} is not supported at {module}: leave it out of target_modules"
                )
            if named and kind not in vectors.get(module, {}):
                raise AdapterError(f"{_WORDS[kind]} is missing for {module}")


def with_vectors(
    plain: ModuleWeights,
    file: TensorFile,
    module: str,
    keys: Mapping[str, str],
    base: BaseParameter,
) -> ModuleWeights:
    """Reads a module's vectors, at least one, and adds them to its weights; `base`: for the
    parameters that they refer to."""
    found = {kind: file.read(key).double() for kind, key in keys.items()}
    for kind, vector in found.items():
        if not bool(vector.isfinite().all()):
            raise AdapterError(f"{_WORDS[kind]} of {module} holds NaN or infinity")
    gains = torch.zeros(plain.lora_b.shape[1], dtype=torch.float64)
    offsets = torch.zeros_like(gains)
    bias = torch.zeros_like(gains)  # of the base
    parameter = base(f"{module}.bias") if "magnitude" in found else None
    if "bias" in found:
        parameter = _of_base(base, module, "bias")
    if parameter is not None:
        assert isinstance(parameter, torch.Tensor)
        bias = parameter.cpu().double()
    g, norm = None, None
    if "magnitude" in found:
        weight = _of_base(base, module, "weight")
        g, norm = dora_gains(weight, plain.lora_a, plain.lora_b.T, plain.scale, found["magnitude"])
        if not bool(g.isfinite().all()):
            raise AdapterError(
                f"DoRA's magnitudes of {module} cannot be divided by the norms of its rows: a row "
                "is zero, or too large"
            )
        gains = g - 1
        offsets -= gains * bias
    if "bias" in found:
        offsets += found["bias"] - bias
    if "lora_bias" in found:
        offsets += plain.scale * found["lora_bias"]
    rows = torch.stack((gains, offsets)) if bool(offsets.any()) else gains[None]
    rows = rows.float()
    if not bool(rows.isfinite().all()):
        raise AdapterError(f"the gains or offsets of {module} overflow float32")
    if g is None:
        return replace(plain, affine=rows)
    b = plain.b * g.float()
    if not is_finite(b):
        raise AdapterError(f"lora_B of {module} times DoRA's gains overflows float32")
    return ModuleWeights(plain.lora_a, b, affine=rows, norm=norm)


def _of_base(base: BaseParameter, module: str, name: str) -> Matrix:
    parameter = base(f"{module}.{name}")
    if parameter is None:
        raise AdapterError(
            f"the adapter needs the base's {name} of {module}, and the base has none"
        )
    return parameter
