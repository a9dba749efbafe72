"""The matrices of a base's layers that stay in 4 bits, and their forms.

A matrix holds the weights of several modules, as q, k and v, and has one form: groups of one size,
scales of one type and, where columns are sorted by their groups, one order. GPTQ finds one order
for modules that read the same input. Other matrices are dequantized.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from engine.checkpoint import Checkpoint
from engine.config import EngineConfig
from engine.devices import lacking_capability
from engine.errors import UnsupportedModelError
from engine.model_config import ModelConfig
from engine.parallel.shards import Shard
from engine.stored_int4 import as_grouped, likely_form
from engine.weight_shapes import expected_shapes, layer_matrices
from kernels.backend import Capability
from kernels.int4 import Int4Format

logger = logging.getLogger(__name__)

Int4Forms = Mapping[str, Int4Format]  # by the name of the first weight in a matrix
NO_INT4: Int4Forms = MappingProxyType({})
FIRST_CAPABILITY: Capability = (8, 0)  # of CUDA, with bfloat16 on the tensor cores


def stores_int4(model: ModelConfig) -> bool:
    """Returns True if config.json names a scheme of 4-bit integers."""
    quantization = model.quantization
    return quantization is not None and any(
        as_grouped(scheme) is not None for _, scheme in quantization.targets
    )


def stored_forms(
    model: ModelConfig, checkpoint: Checkpoint, num_ranks: int = 1
) -> tuple[dict[str, Int4Format], Counter[str]]:
    """Returns the forms of the matrices that can stay in 4 bits on each of the ranks, and of the
    others the reasons with their counts. Reads headers and small parts."""
    shard = Shard(model, 0, num_ranks)
    forms: dict[str, Int4Format] = {}
    reasons: Counter[str] = Counter()
    for index in range(model.num_layers):
        for names in layer_matrices(model, index).values():
            found = _form(checkpoint, [name.removesuffix(".weight") for name in names])
            if isinstance(found, Int4Format):
                found = _obstacle_of_cut(found, names[0], shard) or found
            if isinstance(found, str):
                reasons[found] += 1
            else:
                forms[names[0]] = found
    return forms, reasons


def likely_forms(model: ModelConfig, num_ranks: int = 1) -> dict[str, Int4Format]:
    """Returns the forms of a base of which config.json is all that there is, for random weights."""
    if model.quantization is None:
        return {}
    shard = Shard(model, 0, num_ranks)
    shapes = expected_shapes(model)
    forms: dict[str, Int4Format] = {}
    for index in range(model.num_layers):
        for names in layer_matrices(model, index).values():
            scheme = model.scheme_of(names[0].removesuffix(".weight"))
            found = likely_form(scheme, shapes[names[0]][1])
            if found is not None and _obstacle_of_cut(found, names[0], shard) is None:
                forms[names[0]] = found
    return forms


def possible_forms(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, capability: Capability | None
) -> tuple[Int4Forms, ...]:
    """Returns the possible forms of the matrices that `resolve_int4` keeps, if only config.json of
    the base is at hand. They differ in the properties on which the kernels depend: the type of the
    scales, whether a base of GPTQ has zero points, and whether ranks dequantize the matrices that
    they cut by columns, because the columns are sorted."""
    likely = resolve_int4(replace(config, load_format="dummy"), model, dtype, capability)
    if not likely:
        return (NO_INT4,)
    method = None if model.quantization is None else model.quantization.method
    zeros: tuple[bool | None, ...] = (False, True) if method == "gptq" else (None,)
    found = tuple(
        {
            name: replace(
                form, scale_type=kind, has_zeros=form.has_zeros if given is None else given
            )
            for name, form in likely.items()
        }
        for kind in (torch.float16, torch.bfloat16)
        for given in zeros
    )
    shard = Shard(model, 0, config.tensor_parallel_size)
    if shard.size == 1 or method == "awq":  # which sorts no columns
        return found
    whole = {
        n: form for n, form in likely.items() if shard.inputs(n.removesuffix(".weight")) is None
    }
    return *found, whole


def resolve_int4(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, capability: Capability | None
) -> dict[str, Int4Format]:
    """Returns the matrices to keep in 4 bits, by their forms. `quantization: auto` keeps the
    matrices of a 4-bit checkpoint where kernels multiply them, `int4` everywhere. `capability`: of
    the CUDA device whose kernels multiply, None for the references. Reads the headers of the base's
    files. Raises UnsupportedModelError."""
    if config.quantization not in ("auto", "int4"):
        return {}
    is_asked = config.quantization == "int4"
    if not stores_int4(model):
        if is_asked:
            words = "plain weights" if model.quantization is None else model.quantization.words
            raise UnsupportedModelError(
                f"quantization is int4: it keeps the integers of GPTQ, AWQ and pack-quantized "
                f"checkpoints of 4 bits, and this base is stored as {words}"
            )
        return {}
    obstacle = _obstacle(dtype, capability, is_asked=is_asked)
    if obstacle is not None:
        if is_asked:
            raise UnsupportedModelError(f"quantization is int4: {obstacle}")
        logger.info("the base's 4-bit weights are dequantized: %s", obstacle)
        return {}
    if config.load_format == "dummy":
        return likely_forms(model, config.tensor_parallel_size)
    checkpoint = Checkpoint(Path(config.model_path), model)
    forms, reasons = stored_forms(model, checkpoint, config.tensor_parallel_size)
    if is_asked and not forms:
        raise UnsupportedModelError(
            "quantization is int4: no matrix of the layers can stay in 4 bits: "
            f"{describe_reasons(reasons)}"
        )
    if reasons:
        logger.warning(
            "%d of %d matrices of the layers are dequantized: %s",
            reasons.total(),
            reasons.total() + len(forms),
            describe_reasons(reasons),
        )
    return forms


def _obstacle(dtype: torch.dtype, capability: Capability | None, *, is_asked: bool) -> str | None:
    if capability is None:
        return None if is_asked else "only kernels multiply by them as they are"
    if lacking := lacking_capability(capability, FIRST_CAPABILITY):
        return lacking
    if dtype == torch.float32:
        return "it needs dtype bfloat16 or float16, which is float32"
    return None


def describe_reasons(reasons: Counter[str]) -> str:
    return "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())


def _form(checkpoint: Checkpoint, modules: list[str]) -> Int4Format | str:
    """Returns the form of the matrix of some modules, or the reason why it has none."""
    forms: list[Int4Format] = []
    for module in modules:
        found = checkpoint.int4_form(module)
        if isinstance(found, str):
            return f"of {module.rpartition('.')[2]}: {found}"
        forms.append(found)
    first = forms[0]
    for form in forms[1:]:
        if (form.group_size, form.scale_type) != (first.group_size, first.scale_type):
            return f"{_short(modules)} have groups or scales of different kinds"
    if any(form.has_order for form in forms):
        orders = [checkpoint.int4_order(module) for module in modules]
        if any(order is None or not torch.equal(order, orders[0]) for order in orders):  # type: ignore[arg-type]
            return f"{_short(modules)} sort their columns differently"
    return replace(first, has_zeros=any(form.has_zeros for form in forms))


def _obstacle_of_cut(form: Int4Format, weight: str, shard: Shard) -> str | None:
    """Returns the reason why a rank cannot have its part of a matrix in 4 bits; None: it can."""
    module = weight.removesuffix(".weight")
    columns = shard.inputs(module)
    if columns is None:
        return None
    name, size = module.rpartition(".")[2], form.group_size
    if form.has_order:
        return f"of {name}: the ranks cut its columns, which are sorted by their groups"
    if (columns[1] - columns[0]) % size:
        return f"of {name}: {shard.size} ranks cut its groups of {size} columns"
    return None


def _short(modules: list[str]) -> str:
    return ", ".join(module.rpartition(".")[2] for module in modules)
