"""The fields that we read from a PEFT `adapter_config.json`: modules, ranks, scales.

Matching of modules and patterns follows PEFT's own (`check_target_module_exists`,
`get_pattern_key`); fields that change the arithmetic beyond B A * scale are refused by name. Reads
the file's text only: no tensors, and module names come from the caller's sites.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from lora.errors import AdapterError
from lora.module_names import Spelling
from lora.patterns import Limits, NameList, Pattern, PatternTable, compile_pattern
from lora.sites import Site
from lora.untrusted import open_regular, parse_object, read_up_to, shown, shown_value

T = TypeVar("T")
CONFIG_FILE = "adapter_config.json"
_MAX_BYTES = 1024 * 1024
_MAX_LAYER_PATTERNS = 64
_MAX_INVOCATION = 512  # tokens
_LAYERS_NAME = re.compile(r"[A-Za-z0-9_]+(?:\\?\.[A-Za-z0-9_]+)*", re.ASCII)

CONVERTED_KINDS = ("LOHA", "LOKR")  # values of peft_type that registration turns into LoRA
# Learned keys, values or embeddings of tokens that precede a prompt.
_PROMPT_KINDS = (
    *("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"),
    *("ADAPTION_PROMPT", "CPT", "CARTRIDGE"),
)

# Values of task_type with a head of their own, which PEFT trains and saves beside the LoRA.
_HEADED_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")

# Fields that change the arithmetic and must therefore be absent, null, false or empty.
_UNSUPPORTED = {
    "fan_in_fan_out": "fan_in_fan_out",
    "modules_to_save": "modules_to_save (fully trained modules)",
    "layer_replication": "layer_replication",
    "target_parameters": "target_parameters",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "ensure_weight_tying": "ensure_weight_tying",
}
_REMEDIES = {
    "modules_to_save": "loraplex register adapter converts lm_head and embed_tokens; train others "
    "with LoRA, or merge the adapter and register a base",
    "layer_replication": "register the base with the replicated layers",
    "target_parameters": "target modules instead",
    "ensure_weight_tying": "target the embedding alone, or merge the adapter and register a base",
}
# These start from a changed base weight (or a variant); others only choose the start of training.
_UNSUPPORTED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    rank: int
    alpha: float
    ranks: PatternTable[int]
    alphas: PatternTable[float]
    use_rslora: bool
    target_modules: Pattern | NameList | None  # None: all linear modules but the head
    exclude_modules: Pattern | NameList
    layers_to_transform: frozenset[int]
    layers_pattern: tuple[str, ...]
    use_dora: bool = False
    lora_bias: bool = False
    trains_biases: bool = False  # of the base
    # Tokens whose rows of the embedding are trained, by the end of a module's name.
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    base_name: str | None = None  # of the base that it was trained on, as the file names it
    # aLoRA: the adapter is active from the last occurrence of these in the prompt on; (): always
    invocation: tuple[int, ...] = ()
    spelling: Spelling = field(default_factory=Spelling)  # of the names above

    def rank_of(self, module: str) -> int:
        return self.ranks.find(self.spelling.spell(module), self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = self.alphas.find(self.spelling.spell(module), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, site: Site, module: str) -> bool:
        name = self.spelling.spell(module)
        if self.exclude_modules.matches(name):
            return False
        if self.target_modules is None:
            return site.kind == "linear" and site.name != "lm_head"
        if not self.target_modules.matches(name):
            return False
        if isinstance(self.target_modules, Pattern) or not self.layers_to_transform:
            return True
        is_named = name in self.target_modules.names
        return is_named or self._layer_of(name) in self.layers_to_transform

    def _layer_of(self, module: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\." for p in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<idx>\d+)\."]:
            match = re.match(pattern, module)
            if match is not None:
                return int(match["idx"])
        return None


def read_peft_config(folder: Path) -> PeftConfig:
    return parse_peft_config(read_fields(folder))


def parse_peft_config(fields: dict[str, object]) -> PeftConfig:
    """Checks the fields of a file. Raises AdapterError."""
    _refuse_other_kinds(fields.get("peft_type"))
    refuse_other_tasks(fields)
    _refuse_unsupported(fields)
    config = replace(
        _parse(fields, "lora_alpha"),
        use_dora=_boolean(fields.get("use_dora"), "use_dora"),
        lora_bias=_boolean(fields.get("lora_bias"), "lora_bias"),
        trains_biases=_bias(fields.get("bias", "none")),
        token_indices=_token_indices(fields.get("trainable_token_indices")),
    )
    with_dora = {"lora_bias": config.lora_bias, "alora_invocation_tokens": config.invocation}
    for name, value in with_dora.items():
        if config.use_dora and value:
            raise AdapterError(f"use_dora and {name} are set, which PEFT refuses together")
    return config


def read_lycoris_config(folder: Path) -> tuple[str, PeftConfig]:
    """Returns the kind, LOHA or LOKR, and the fields that such adapters share with LoRA."""
    fields = read_fields(folder)
    kind = fields.get("peft_type")
    if kind not in CONVERTED_KINDS:
        raise AdapterError(f"peft_type is {shown_value(kind)}, neither 'LOHA' nor 'LOKR'")
    refuse_other_tasks(fields)
    if fields.get("modules_to_save"):
        raise AdapterError(
            "modules_to_save is supported with peft_type 'LORA' alone: merge the adapter and "
            "register a base, or make LoRA of it with PEFT's convert_to_lora"
        )
    assert isinstance(kind, str)
    return kind, _parse(fields, "alpha")


def _parse(fields: dict[str, object], alpha: str) -> PeftConfig:
    """`alpha`: the name of the field in this kind."""
    _refuse_what_peft_does(fields)
    limits = Limits()
    targets = fields.get("target_modules")
    if not targets:
        raise AdapterError(f"{CONFIG_FILE} names no target_modules")
    is_all = isinstance(targets, str) and targets.lower() == "all-linear"
    return PeftConfig(
        rank=_rank(fields.get("r"), f"{CONFIG_FILE}: r"),
        alpha=_number(fields.get(alpha), alpha),
        ranks=_table(fields.get("rank_pattern"), "rank_pattern", _rank, limits),
        alphas=_table(fields.get("alpha_pattern"), "alpha_pattern", _number, limits),
        use_rslora=_boolean(fields.get("use_rslora"), "use_rslora"),
        target_modules=None if is_all else _module_names(targets, "target_modules", limits),
        exclude_modules=_module_names(fields.get("exclude_modules"), "exclude_modules", limits),
        layers_to_transform=_layers(fields.get("layers_to_transform")),
        layers_pattern=_layers_pattern(fields.get("layers_pattern")),
        base_name=base if isinstance(base := fields.get("base_model_name_or_path"), str) else None,
        invocation=_invocation(fields.get("alora_invocation_tokens")),
    )


def read_fields(folder: Path) -> dict[str, object]:
    """Returns the configuration unchecked. Raises AdapterError if it is not a JSON object."""
    try:
        with open_regular(folder / CONFIG_FILE) as file:
            text = read_up_to(file, _MAX_BYTES + 1)
    except FileNotFoundError:
        raise AdapterError(f"the folder has no {CONFIG_FILE}") from None
    except OSError as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error.strerror}") from None
    if len(text) > _MAX_BYTES:
        raise AdapterError(f"{CONFIG_FILE} is larger than {_MAX_BYTES} bytes")
    return parse_object(text, CONFIG_FILE)


def _refuse_other_kinds(kind: object) -> None:
    if kind == "LORA":
        return
    remedy = ""
    if kind in _PROMPT_KINDS:
        remedy = "; it changes no weights and cannot become LoRA: train LoRA"
    elif kind in CONVERTED_KINDS:
        remedy = "; loraplex register adapter converts LoHa and LoKr to LoRA"
    elif isinstance(kind, str):
        remedy = (
            "; PEFT's convert_to_lora makes LoRA of some other kinds, and where it does not: train "
            "LoRA, or merge the adapter (merge_and_unload) and register a base"
        )
    raise AdapterError(f"peft_type is {shown_value(kind)}, only 'LORA' is served{remedy}")


def refuse_other_tasks(fields: Mapping[str, object]) -> None:
    """Raises AdapterError for an adapter of a model that generates no text, such as a reward
    model."""
    if (task := fields.get("task_type")) in _HEADED_TASKS:
        raise AdapterError(
            f"task_type is {shown_value(task)}: the adapter belongs to a model with a head that "
            "scores or labels texts, and only adapters of models that generate text are served "
            "(task_type CAUSAL_LM)"
        )


def _refuse_unsupported(fields: dict[str, object]) -> None:
    for name, words in _UNSUPPORTED.items():
        if fields.get(name):
            remedy = f": {_REMEDIES[name]}" if name in _REMEDIES else ""
            raise AdapterError(f"the adapter uses {words}, which is not supported{remedy}")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_UNSUPPORTED_INITS):
        raise AdapterError(
            f"init_lora_weights is {shown_value(init)}: such an adapter fits a changed base; save "
            "it with PEFT's path_initial_model_for_weight_conversion"
        )


def _refuse_what_peft_does(fields: dict[str, object]) -> None:
    """Refuses configurations for which PEFT raises; no adapter can have been trained with them."""
    has_pattern = isinstance(fields.get("target_modules"), str)
    for name in ("layers_to_transform", "layers_pattern"):
        if has_pattern and fields.get(name) is not None:
            raise AdapterError(f"{name} cannot be used when target_modules is a pattern")
    if fields.get("layers_pattern") and fields.get("layers_to_transform") is None:
        raise AdapterError("layers_pattern without layers_to_transform has no meaning")


def _module_names(value: object, field: str, limits: Limits) -> Pattern | NameList:
    if value is None:
        return NameList(frozenset())
    if isinstance(value, str):
        return compile_pattern(value, field, limits)
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return NameList(frozenset(value))
    raise AdapterError(f"{field} is neither a list of names nor a regular expression")


def _table(
    value: object, field: str, parse: Callable[[object, str], T], limits: Limits
) -> PatternTable[T]:
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise AdapterError(f"{field} is not a JSON object")
    values = {key: parse(item, f"{field}['{shown(key)}']") for key, item in value.items()}
    return PatternTable(values, field, limits)


def _layers(value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise AdapterError("layers_to_transform is neither an integer nor a list of integers")
    return frozenset(layers)


def _layers_pattern(value: object) -> tuple[str, ...]:
    """Accepts names only: PEFT matches patterns in several ways, and the choice would matter
    here."""
    names = [value] if isinstance(value, str) and value else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AdapterError("layers_pattern is neither a name nor a list of names")
    if len(names) > _MAX_LAYER_PATTERNS:
        raise AdapterError(f"layers_pattern has {len(names)} names, the limit is 64")
    for name in names:
        if len(name) > 128 or not _LAYERS_NAME.fullmatch(name):
            raise AdapterError(f"layers_pattern: {shown(name)} is not the name of a list of layers")
    return tuple(names)


def _invocation(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    field = "alora_invocation_tokens"
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_INVOCATION:
        raise AdapterError(
            f"{field} must be a list of 1 to {_MAX_INVOCATION} token ids, not {shown_value(value)}"
        )
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise AdapterError(f"{field} holds {shown_value(token)}, which is not a token id")
    return tuple(value)


def _rank(value: object, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(f"{field} must be an integer of at least 1, not {shown_value(value)}")
    return value


def _number(value: object, field: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if math.isfinite(number):
            return number
    raise AdapterError(f"{field} must be a finite number, not {shown_value(value)}")


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    if not value:
        return {}
    lists = value if isinstance(value, dict) else {"embed_tokens": value}
    return {name.rpartition(".")[2]: _tokens(name, found) for name, found in lists.items()}


def _tokens(module: str, value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value):
        return tuple(value)
    raise AdapterError(
        f"trainable_token_indices of {shown(module)} must be a list of token ids, not "
        f"{shown_value(value)}"
    )


def _bias(value: object) -> bool:
    if value not in ("none", "all", "lora_only"):
        raise AdapterError(f"bias must be none, all or lora_only, not {shown_value(value)}")
    return value != "none"


def _boolean(value: object, field: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{field} must be true or false, not {shown_value(value)}")
    return bool(value)
