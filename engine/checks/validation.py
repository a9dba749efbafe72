"""The checks of registration before a folder is stored: would the engine accept it, and what does
it contain?

The code that loads also judges here, so that a registered folder is not refused later. Reads tensor
by tensor; a base of any size needs the memory of its largest tensor. Free of the registry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint, base_reader
from engine.errors import UnsupportedModelError
from engine.host_memory import available_bytes
from engine.json_values import read_json
from engine.model_config import ModelConfig, lora_sites, read_model_config
from engine.weight_shapes import expected_shapes
from lora.adapter import Adapter, read_adapter
from lora.errors import AdapterError
from lora.low_rank import MAX_RANK as MAX_RANK
from lora.low_rank import Conversion
from lora.low_rank import ConversionLimits as ConversionLimits
from lora.lycoris import Notice as Notice
from lora.lycoris import convert_to_lora
from lora.peft_config import CONVERTED_KINDS, read_fields
from lora.saved_modules import convert_saved

_CHAT_TEMPLATE_FILES = ("chat_template.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class BaseReport:
    architecture: str
    num_parameters: int  # a tied head is not counted again
    vocab_size: int
    max_model_len: int
    has_chat_template: bool  # without one only raw completions can be served
    warnings: tuple[str, ...]
    quantization: str = ""  # of the files, in words; empty: plain weights


@dataclass(frozen=True, slots=True)
class AdapterReport:
    rank: int  # the largest of any module
    targets: tuple[str, ...]  # last parts of the module names, sorted
    num_parameters: int
    num_tensors: int
    kind: str  # LoRA or DoRA, with or without biases, in words
    is_noop: bool  # it changes nothing
    invocation: tuple[int, ...]  # aLoRA: it is active from these tokens on; (): always
    warnings: tuple[str, ...]


def check_base(folder: Path) -> BaseReport:
    """Raises UnsupportedModelError with the reason."""
    config = read_model_config(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UnsupportedModelError("the folder has no tokenizer.json")
    for name, _, tensor in Checkpoint(folder, config).stream(torch.device("cpu")):
        if not bool(tensor.isfinite().all()):
            raise UnsupportedModelError(f"{name} holds NaN or infinity")
    has_template = _has_chat_template(folder)
    warnings: list[str] = []
    if not has_template:
        warnings.append("no chat template: chat completions cannot be served")
    if not config.eos_token_ids:
        warnings.append("no end-of-sequence token: only max_tokens and stop strings end an answer")
    if config.is_text_part:
        warnings.append("only text is served: the part of the model for images is not read")
    if config.usual_len < config.max_len:
        warnings.append(
            f"max_model_len is {config.usual_len} unless it is configured: if it is larger, up to "
            f"{config.max_len}, all sequences are turned by the frequencies of long ones"
        )
    quantization = config.quantization
    if quantization is not None and quantization.method == "awq":
        warnings.append(
            "AWQ moved scales into norms and rows: adapters that were trained on the unquantized "
            "base are registered with --unquantized-base FOLDER"
        )
    return BaseReport(
        quantization="" if quantization is None else quantization.words,
        architecture=config.architecture,
        num_parameters=sum(math.prod(shape) for shape in expected_shapes(config).values()),
        vocab_size=config.vocab_size,
        max_model_len=config.max_len,
        has_chat_template=has_template,
        warnings=tuple(warnings),
    )


def check_adapter(folder: Path, base_folder: Path) -> AdapterReport:
    """Raises AdapterError with the reason, UnsupportedModelError for the base's folder."""
    base = read_model_config(base_folder)
    adapter = read_checked(folder, "", base_folder, base)
    if unknown := [token for token in adapter.invocation if token >= base.vocab_size]:
        raise AdapterError(
            f"alora_invocation_tokens holds {unknown[0]}, and the base has {base.vocab_size} tokens"
        )
    warnings = []
    if adapter.is_noop:
        warnings.append(
            "the adapter changes nothing: every lora_B or lora_A, or its scale, is zero"
        )
    if adapter.num_unread:
        warnings.append(
            f"{adapter.num_unread} tensors of the part of the model for images are not read: they "
            "change nothing of a text"
        )
    return AdapterReport(
        rank=adapter.rank,
        targets=tuple(sorted({module.rsplit(".", 1)[-1] for module in adapter.modules})),
        num_parameters=adapter.num_parameters,
        num_tensors=adapter.num_tensors,
        kind=adapter.kind,
        is_noop=adapter.is_noop,
        invocation=adapter.invocation,
        warnings=tuple(warnings),
    )


def convert_adapter(
    folder: Path,
    base_folder: Path,
    out: Path,
    limits: ConversionLimits,
    notice: Notice = lambda minutes, done, total: None,
) -> Conversion | None:
    """Writes an adapter of a kind that is served as LoRA only (LoHa, LoKr, saved modules) as LoRA
    to the empty folder `out`; None: it is of another kind, and nothing is written. Raises
    AdapterError."""
    fields = read_fields(folder)
    config = read_model_config(base_folder)
    sites = lora_sites(config)
    if fields.get("peft_type") in CONVERTED_KINDS:
        return convert_to_lora(folder, out, sites, limits, notice)
    if fields.get("peft_type") != "LORA":
        return None
    base = base_reader(base_folder, config)
    return convert_saved(folder, out, sites, base, limits, available_bytes(), notice)


def read_checked(folder: Path, digest: str, base_folder: Path, config: ModelConfig) -> Adapter:
    """Reads the adapter as the engine does; of the base, only parameters that the adapter's file
    refers to: DoRA's modules, trained biases, copies."""
    base = base_reader(base_folder, config)
    return read_adapter(folder, digest, lora_sites(config), MAX_RANK, base)


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in _CHAT_TEMPLATE_FILES):
        return True
    values = read_json(folder / "tokenizer_config.json") or {}
    return bool(values.get("chat_template"))
