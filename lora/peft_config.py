"""What we read from a PEFT `adapter_config.json`: which modules, which rank, which scale.

Matching of modules and patterns follows PEFT's own (`check_target_module_exists`,
`get_pattern_key`); whatever changes the arithmetic beyond B A * scale is refused by name. Knows the
file's text only: no tensors, and module names are those of the sites it is asked about.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora.errors import AdapterError
from lora.sites import Site

_MAX_BYTES = 1024 * 1024
_MAX_PATTERN = 4096  # characters; patterns of hundreds of alternatives are real
_MAX_UNBOUNDED = 8  # of *, + and {n,} in one pattern: backtracking grows with their number
_NESTED_REPEAT = re.compile(r"[*+}]\)(?:[*+]|\{\d*,)")

# Fields that change the arithmetic and must therefore be absent, null, false or empty.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias on lora_B (lora_bias)",
    "fan_in_fan_out": "fan_in_fan_out",
    "modules_to_save": "modules_to_save (fully trained modules)",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "trainable_token_indices",
    "target_parameters": "target_parameters",
    "alora_invocation_tokens": "aLoRA (alora_invocation_tokens)",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "ensure_weight_tying": "ensure_weight_tying",
}
# These start from a changed base weight (or a variant); others only choose where training begins.
_UNSUPPORTED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    use_rslora: bool
    target_modules: str | tuple[str, ...]  # a regular expression, or names
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = self.alpha_pattern.get(_pattern_key(self.alpha_pattern, module), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, site: Site, module: str) -> bool:
        if self.exclude_modules and _names(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear":
            return site.kind == "linear" and site.name != "lm_head"
        if not _names(self.target_modules, module):
            return False
        exact = not isinstance(self.target_modules, str) and module in self.target_modules
        if exact or isinstance(self.target_modules, str) or not self.layers_to_transform:
            return True
        return self._layer_of(module) in self.layers_to_transform

    def _layer_of(self, module: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\." for p in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<idx>\d+)\."]:
            match = re.match(pattern, module)
            if match is not None:
                return int(match["idx"])
        return None


def read_peft_config(path: Path) -> PeftConfig:
    fields = _read_json(path)
    _refuse_unsupported(fields)
    rank = fields.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"adapter_config.json: r must be an integer of at least 1, not {rank!r}")
    layers = fields.get("layers_to_transform")
    return PeftConfig(
        rank=rank,
        alpha=_number(fields.get("lora_alpha"), "lora_alpha"),
        rank_pattern=_rank_pattern(fields.get("rank_pattern")),
        alpha_pattern={
            key: _number(value, f"alpha_pattern[{key!r}]")
            for key, value in _patterns(fields.get("alpha_pattern"), "alpha_pattern").items()
        },
        use_rslora=_boolean(fields.get("use_rslora"), "use_rslora"),
        target_modules=_target_modules(fields.get("target_modules")),
        exclude_modules=_module_names(fields.get("exclude_modules"), "exclude_modules"),
        layers_to_transform=_layers(layers),
        layers_pattern=_layers_pattern(fields.get("layers_pattern")),
    )


def _read_json(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise AdapterError("the folder has no adapter_config.json") from None
    except OSError as error:
        raise AdapterError(f"adapter_config.json cannot be read: {error.strerror}") from None
    if len(text) > _MAX_BYTES:
        raise AdapterError(f"adapter_config.json is larger than {_MAX_BYTES} bytes")
    try:
        fields: object = json.loads(text)
    except (ValueError, RecursionError):
        raise AdapterError("adapter_config.json is not valid JSON") from None
    if not isinstance(fields, dict):
        raise AdapterError("adapter_config.json is not a JSON object")
    return fields


def _refuse_unsupported(fields: dict[str, object]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"peft_type is {kind!r}, only 'LORA' is served")
    for name, words in _UNSUPPORTED.items():
        if fields.get(name):
            raise AdapterError(f"the adapter uses {words}, which is not supported")
    bias = fields.get("bias", "none")
    if bias != "none":
        raise AdapterError(f"the adapter trains biases (bias is {bias!r}), which is not supported")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_UNSUPPORTED_INITS):
        raise AdapterError(
            f"init_lora_weights is {init!r}: such an adapter fits a changed base; save it with "
            "PEFT's path_initial_model_for_weight_conversion"
        )


def _target_modules(value: object) -> str | tuple[str, ...]:
    names = _module_names(value, "target_modules")
    if not names:
        raise AdapterError("adapter_config.json names no target_modules")
    return names


def _module_names(value: object, field: str) -> str | tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return value if value.lower() == "all-linear" else _pattern(value, field)
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise AdapterError(f"{field} is neither a list of names nor a regular expression")


def _rank_pattern(value: object) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for key, rank in _patterns(value, "rank_pattern").items():
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise AdapterError(f"rank_pattern[{key!r}] must be an integer of at least 1")
        ranks[key] = rank
    return ranks


def _patterns(value: object, field: str) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise AdapterError(f"{field} is not a JSON object")
    return {_pattern(key, field): item for key, item in value.items()}


def _pattern(value: str, field: str) -> str:
    """A regular expression of the adapter's, refused where matching it could take for ever."""
    unbounded = len(re.findall(r"[*+]\??|\{\d*,\}", value))
    if len(value) > _MAX_PATTERN or unbounded > _MAX_UNBOUNDED or _NESTED_REPEAT.search(value):
        raise AdapterError(f"{field}: the regular expression {value[:80]!r} is too complex")
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        raise AdapterError(f"{field}: {value[:80]!r} is not a regular expression") from None
    return value


def _layers(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise AdapterError("layers_to_transform is neither an integer nor a list of integers")
    return tuple(layers)


def _layers_pattern(value: object) -> tuple[str, ...]:
    names = _module_names(value, "layers_pattern")
    if isinstance(names, str):
        return (names,) if names else ()
    return tuple(_pattern(name, "layers_pattern") for name in names)


def _number(value: object, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterError(f"{field} must be a finite number, not {value!r}")
    return float(value)


def _boolean(value: object, field: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{field} must be true or false, not {value!r}")
    return bool(value)


def _names(targets: str | Sequence[str], module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _pattern_key(patterns: dict[str, int] | dict[str, float], module: str) -> str:
    """The first pattern that matches the end of the name, from a dot or the start on."""
    for key in patterns:
        if re.match(rf"(.*\.)?({key})$", module):
            return key
    return module
