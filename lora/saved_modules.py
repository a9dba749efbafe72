"""Saved modules (PEFT's modules_to_save) as LoRA: a head and an embedding that were trained whole.

The difference to the base's own weight [V, H] becomes A and B of the module. If few rows differ it
is exact: a one for each of these tokens in one half, their differences in the other. Otherwise it
is factored by its singular values. As in PEFT, a saved embedding leaves a tied head as it is, and
the reverse.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from lora.adapter import open_weights, write_adapter
from lora.adapter_keys import extended_remedy, is_unread, parse_key, spelling_in
from lora.errors import AdapterError
from lora.header import TensorFile
from lora.low_rank import (
    Conversion,
    ConversionLimits,
    decompose,
    flops,
    halves,
    least_rank,
    working_bytes,
)
from lora.lycoris import Notice
from lora.module_names import canonical
from lora.peft_config import read_fields, refuse_other_tasks
from lora.sites import Site, Target, targets_by_module
from lora.untrusted import shown
from lora.vectors import BaseParameter, parse_vector_key

_MODULES = {"lm_head": "lm_head", "embed_tokens": "model.embed_tokens"}
_KEY = re.compile(r"base_model\.model\.(?P<module>.+?)(?:\.modules_to_save(?:\.default)?)?\.weight")
_EMBEDDING = "model.embed_tokens"
_HALF = 2  # bytes of a number of a row on the device
_CHUNK = 4096  # rows that are compared at a time
_GIB = 1024**3
# PEFT has the first two at all modules with LoRA, and the last never before an invocation: saved
# modules differ in both.
_ALONE = ("use_dora", "lora_bias", "alora_invocation_tokens")


@dataclass(frozen=True, slots=True)
class _Halves:
    a: torch.Tensor  # of PEFT's: [r, V] of an embedding, [r, H] of a head
    b: torch.Tensor  # [H, r], [V, r]
    error: float


def convert_saved(
    folder: Path,
    out: Path,
    sites: Sequence[Site],
    base: BaseParameter,
    limits: ConversionLimits,
    available_bytes: int,
    notice: Notice = lambda minutes, done, total: None,
) -> Conversion | None:
    """Writes the adapter of `folder` without saved modules, and LoRA in their place, to the empty
    folder `out`, with copies of its other files; None: it has none, and nothing is written.

    `available_bytes`: of memory. Raises AdapterError for other modules than the head and the
    embedding, for shapes that are not the base's, if the rows would take more bytes, more ranks or
    more time than the limits allow, or if memory does not suffice.
    """
    fields = read_fields(folder)
    if not fields.get("modules_to_save"):
        return None
    refuse_other_tasks(fields)
    wanted = _names(fields)
    targets = targets_by_module(sites)
    with open_weights(folder) as file:
        written = _keys(file, wanted, targets)
        keys = {module: own[0] for module, own in written.items()}
        saved = {key for own in written.values() for key in own}
        pairs = _pairs(file, saved, targets)
        _check_others(file, keys, saved, pairs)
        found = _differences(file, keys, base, limits, available_bytes, notice)
        _check_equal(file, written)
        _check_alone(fields, found)
        _check_bytes(found, limits)
        tensors = {key: file.read(key) for key in file.entries if key not in saved}
        spelling = spelling_in(file.entries)
    for module, lora in found.items():
        prefix = f"base_model.model.{spelling.spell(module)}"
        ends = ("lora_A.weight", "lora_B.weight")
        if module == _EMBEDDING:
            ends = ("lora_embedding_A", "lora_embedding_B")
        tensors |= {f"{prefix}.{ends[0]}": lora.a, f"{prefix}.{ends[1]}": lora.b}
    ranks = {spelling.spell(module): len(lora.a) for module, lora in found.items()}
    served = [spelling.spell(module) for module in targets if module in pairs or module in found]
    # Sorted: the digest of equal adapters is equal.
    write_adapter(folder, out, _fields(fields, served, ranks), dict(sorted(tensors.items())))
    largest = max((lora.error for lora in found.values()), default=0.0)
    notes = [f"the saved {m} equals the base's: it is left out" for m in keys if m not in found]
    kind = f"saved {' and '.join(found)}" if found else ""
    return Conversion(kind, max(ranks.values(), default=0), largest, tuple(notes))


def _differences(
    file: TensorFile,
    keys: Mapping[str, str],
    base: BaseParameter,
    limits: ConversionLimits,
    available_bytes: int,
    notice: Notice,
) -> dict[str, _Halves]:
    """Returns the halves of the modules that differ from the base's."""
    found: dict[str, _Halves] = {}
    began_s = time.monotonic()
    for module, key in keys.items():
        limits.check_time(began_s, f"the conversion of the saved {module}")
        weight = base(f"{module}.weight")
        if weight is None:
            raise AdapterError(f"the base has no weight of {module} to compare with")
        assert isinstance(weight, torch.Tensor)  # heads and embeddings are never quantized
        change = _change(file, key, module, weight, limits.max_rank, available_bytes)
        if change is not None:
            a, b, error = _as_lora(change, module, len(weight), limits, notice)
            if module == _EMBEDDING:  # its product is that of the transposed matrix
                a, b = b.T, a.T
            found[module] = _Halves(a.contiguous(), b.contiguous(), error)
    return found


def _names(fields: Mapping[str, object]) -> list[str]:
    """Returns the modules of the base that are saved. Raises AdapterError for all others."""
    named = fields["modules_to_save"]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise AdapterError("modules_to_save is not a list of names")
    ends = [name.rpartition(".")[2] for name in named]
    if others := [name for name, end in zip(named, ends, strict=True) if end not in _MODULES]:
        raise AdapterError(
            f"the adapter saves whole modules ({', '.join(map(shown, others))}), which is not "
            "supported but for lm_head and embed_tokens: train them with LoRA, or merge the "
            "adapter and register a base"
        )
    return [_MODULES[end] for end in dict.fromkeys(ends)]


def _keys(
    file: TensorFile, wanted: Sequence[str], targets: Mapping[str, Target]
) -> dict[str, list[str]]:
    """Returns module -> keys of the saved modules: PEFT's save_embedding_layers, which it sets for
    an extended vocabulary, writes them a second time."""
    keys: dict[str, list[str]] = {}
    for key in file.entries:
        match = None if is_unread(key) else _KEY.fullmatch(key)
        if match is None or (module := canonical(match["module"])) not in wanted:
            continue
        keys.setdefault(module, []).append(key)
    for module in wanted:
        if module not in targets:
            raise AdapterError(f"modules_to_save names {module}, which the base does not have")
        if module not in keys:
            raise AdapterError(f"modules_to_save names {module}, the file has no weight of it")
    return keys


def _check_equal(file: TensorFile, written: Mapping[str, Sequence[str]]) -> None:
    """Refuses a module that the file has twice with other numbers: either might be served."""
    for module, (first, *others) in written.items():
        one = file.entries[first]
        for key in others:
            other = file.entries[key]
            is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
            if not is_alike or not torch.equal(file.read(first), file.read(key)):
                raise AdapterError(
                    f"the saved {module} is in the file twice with other numbers: {shown(key)} and "
                    f"{shown(first)}; save with save_embedding_layers=False"
                )


def _check_others(
    file: TensorFile, keys: Mapping[str, str], saved: Set[str], pairs: Set[str]
) -> None:
    for module in keys:
        if module in pairs:
            raise AdapterError(f"{module} is saved as a whole and has LoRA: train it in one way")
    if all(key in saved for key in file.entries):
        raise AdapterError("the adapter has saved modules alone and no LoRA: register a base")


def _pairs(file: TensorFile, saved: set[str], targets: Mapping[str, Target]) -> set[str]:
    """Returns the modules with A or B; keys of other tensors are judged when the result is read."""
    found = set()
    for key in file.entries:
        if is_unread(key) or key in saved or ".lora_" not in key:
            continue
        if parse_vector_key(key, targets) is None:
            found.add(parse_key(key, targets)[0])
    return found


def _check_alone(fields: Mapping[str, object], found: Mapping[str, object]) -> None:
    for name in _ALONE:
        if found and fields.get(name):
            raise AdapterError(
                f"the adapter has {name} and saves {' and '.join(found)}, which is not supported "
                "together: train the module with LoRA, or merge the adapter and register a base"
            )


def _change(
    file: TensorFile,
    key: str,
    module: str,
    weight: torch.Tensor,  # [V, H] of the base
    max_rank: int,
    available_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Returns the rows that differ from the base's, less the base's, in float32, and their numbers;
    all rows and None if more than `max_rank` differ; None if none does."""
    entry = file.entries[key]
    if entry.shape != tuple(weight.shape):
        raise AdapterError(
            f"the saved {module} has shape {list(entry.shape)}, the base has "
            f"{list(weight.shape)}{extended_remedy(entry.shape, weight.shape)}"
        )
    height, width = weight.shape
    needed = (entry.end - entry.begin) + (weight.element_size() + 4) * height * width
    needed += working_bytes(height, width, max_rank, 4)
    if needed > available_bytes:
        raise AdapterError(
            f"to factor the saved {module} of shape {list(entry.shape)}, {needed / _GIB:.1f} GiB "
            f"of memory are needed, {available_bytes / _GIB:.1f} are available"
        )
    own = file.read(key)
    coarser = max(own.dtype, weight.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    rows = []
    for first in range(0, height, _CHUNK):
        part = slice(first, first + _CHUNK)
        before, after = weight[part].cpu(), own[part]
        if not bool(after.isfinite().all()):
            raise AdapterError(f"the saved {module} holds NaN or infinity")
        differs = (after.to(coarser) != before.to(coarser)).any(dim=1)
        rows.append(differs.nonzero().flatten() + first)
    changed = torch.cat(rows)
    if not len(changed):
        return None
    if len(changed) <= max_rank:
        return own[changed].float() - weight[changed.to(weight.device)].cpu().float(), changed
    change = own.to(torch.float32, copy=True)
    for first in range(0, height, _CHUNK):
        change[first : first + _CHUNK] -= weight[first : first + _CHUNK].cpu().float()
    return change, None


def _as_lora(
    change: tuple[torch.Tensor, torch.Tensor | None],
    module: str,
    vocab: int,
    limits: ConversionLimits,
    notice: Notice,
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns A [r, H] and B [V, r] of a change B A, and its error."""
    rows, changed = change
    if changed is not None:
        # As trained tokens are served: exact, and a half type holds a one.
        ones = torch.zeros(vocab, len(changed), dtype=torch.float16)
        ones[changed, torch.arange(len(changed))] = 1
        return rows, ones, 0.0
    what = f"the conversion of the saved {module}"
    height, width = rows.shape
    notice(limits.check_estimate(flops(height, width, limits.max_rank), what), 0, 1)
    factors = decompose(rows, limits.max_rank)
    try:
        rank, error = least_rank(factors, module, limits.max_rank, limits.max_error)
    except AdapterError as refusal:
        raise AdapterError(
            f"the saved {module} differs from the base's in more than {limits.max_rank} rows, and "
            f"{refusal}; allow more (--max-error), train it with LoRA, or merge the adapter and "
            "register a base"
        ) from None
    return *halves(factors, rank), error


def _check_bytes(found: Mapping[str, _Halves], limits: ConversionLimits) -> None:
    sizes = {m: _HALF * (lora.a.numel() + lora.b.numel()) for m, lora in found.items()}
    if (total := sum(sizes.values())) > limits.max_bytes:
        each = ", ".join(
            f"{module} {size / 1024**2:.4g} MiB (rank {len(found[module].a)})"
            for module, size in sizes.items()
        )
        raise AdapterError(
            f"as LoRA the saved modules take {total / 1024**2:.4g} MiB of the device's memory, "
            f"allowed are {limits.max_bytes / 1024**2:.4g} (--max-saved-mib): {each}"
        )


def _fields(
    fields: Mapping[str, object], modules: Sequence[str], ranks: Mapping[str, int]
) -> dict[str, object]:
    """Names every module with LoRA; the ranks and alphas of the new ones come first, and make their
    scale 1."""
    is_rooted = bool(fields.get("use_rslora"))
    alphas = {name: math.sqrt(rank) if is_rooted else rank for name, rank in ranks.items()}
    tables = {}
    for key, own in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        before = fields.get(key)
        tables[key] = {**own, **(before if isinstance(before, dict) else {})}
    dropped = ("layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save")
    return {**fields, **dict.fromkeys(dropped), "target_modules": list(modules), **tables}
