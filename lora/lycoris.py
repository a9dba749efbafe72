"""LoHa and LoKr adapters as LoRA: the change of each module's weight, factored by singular values.

LoHa (Hyeon-Woo et al., "FedPara", arXiv 2108.06098) is a Hadamard product of two products of rank
r: a product of rank r^2, whose factors are the row-wise Kronecker products of the two. LoKr (Yeh
et al., "LyCORIS", arXiv 2309.14859) is a Kronecker product: its singular values are the products of
those of the two factors, its singular vectors their Kronecker products. Where these have few
ranks, no module's change is formed as a matrix of the base's size, and by Eckart and Young no other
LoRA of the same rank is closer; see `low_rank` for the others.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lora.adapter import WEIGHTS_FILE, check_targets, open_weights, write_adapter
from lora.adapter_keys import is_unread, is_whole, spelling_in
from lora.errors import AdapterError
from lora.header import TensorFile
from lora.low_rank import (
    Conversion,
    ConversionLimits,
    Factors,
    decompose,
    flops,
    halves,
    is_small,
    least_rank,
)
from lora.module_names import canonical
from lora.peft_config import read_lycoris_config
from lora.sites import Site, Target, targets_by_module
from lora.untrusted import shown

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?P<part>hada_w[12]_[ab]|lokr_w[12](?:_[ab])?)(?:\.default)?"
)
_NAMES = {"LOHA": "LoHa", "LOKR": "LoKr"}

# Receives the minutes that the work will take, the modules done and all of them.
Notice = Callable[[float, int, int], None]
Parts = dict[str, torch.Tensor]  # float64, by the names of PEFT's parameters


def convert_to_lora(
    folder: Path,
    out: Path,
    sites: Sequence[Site],
    limits: ConversionLimits,
    notice: Notice = lambda minutes, done, total: None,
) -> Conversion:
    """Writes the LoHa or LoKr adapter of `folder` as a LoRA adapter to the empty folder `out`, with
    copies of its other files. Modules get their names in a model of text; those of a part for
    images are left out.

    Each module has the least rank whose relative error is within the limit. Raises AdapterError
    if that is more than the limit's rank, if the work would take longer than allowed or does, or if
    the files are not of such an adapter of these sites.
    """
    kind, config = read_lycoris_config(folder)
    targets = targets_by_module(sites)
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    largest = 0.0
    with open_weights(folder) as file:
        keys = _keys_by_module(file, kind, targets)
        config = replace(config, spelling=spelling_in(file.entries))
        check_targets(keys, targets, config)
        what = f"the conversion of {_NAMES[kind]} to LoRA"
        work = sum(_flops(file, kind, targets[m], keys[m], limits.max_rank) for m in keys)
        minutes = limits.check_estimate(work, what)
        began_s = time.monotonic()
        for done, (module, parts) in enumerate(keys.items()):
            notice(minutes, done, len(keys))
            limits.check_time(began_s, what)
            found = _read_parts(file, module, parts)
            scale = config.scale_of(module)
            factors = _factor(kind, targets[module], found, scale, limits.max_rank)
            rank, error = least_rank(factors, module, limits.max_rank, limits.max_error)
            prefix = f"base_model.model.{module}"
            a, b = halves(factors, rank)
            tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b
            ranks[module], largest = rank, max(largest, error)
    write_adapter(folder, out, _fields(ranks, config.base_name), tensors)
    return Conversion(_NAMES[kind], max(ranks.values()), largest)


def _flops(
    file: TensorFile, kind: str, target: Target, keys: Mapping[str, str], max_rank: int
) -> float:
    """Returns the operations of a module's decomposition; faults of its parts are found later."""
    shapes = {part: file.entries[key].shape for part, key in keys.items()}
    if kind == "LOHA":
        height, width = target.out_features, target.site.in_features
        inner = [(shapes.get(f"hada_w{i}_a") or (1,))[-1] for i in (1, 2)]
        rank = inner[0] * inner[1]
        if _is_dense(rank, height, width, max_rank):
            return flops(height, width, max_rank) + 2.0 * sum(inner) * height * width
        return 8.0 * (height + width) * rank**2 + 30.0 * rank**3
    wide = [shape for part, shape in shapes.items() if part in ("lokr_w1", "lokr_w2")]
    # The vectors of the product, some thousand numbers of each row and column.
    vectors = 8.0 * max_rank * (target.out_features + target.site.in_features)
    return vectors + sum(flops(*shape, max_rank) for shape in wide if len(shape) == 2)


def _keys_by_module(
    file: TensorFile, kind: str, targets: Mapping[str, Target]
) -> dict[str, dict[str, str]]:
    """Returns module -> part -> key, in the order of the targets."""
    found: dict[str, dict[str, str]] = {}
    prefix = {"LOHA": "hada_", "LOKR": "lokr_"}[kind]
    for key in file.entries:
        if is_unread(key):
            continue
        match = _KEY.fullmatch(key)
        if match is None or not match["part"].startswith(prefix):
            remedy = ": save with save_embedding_layers=False" if is_whole(key) else ""
            raise AdapterError(
                f"tensor {shown(key)} is not one of a {_NAMES[kind]} adapter{remedy}"
            )
        module = canonical(match["module"])
        if module not in targets or targets[module].site.kind != "linear":
            raise AdapterError(
                f"tensor {shown(key)} matches nothing: the base has no linear module "
                f"{shown(module)} that can be adapted"
            )
        if match["part"] in found.setdefault(module, {}):
            raise AdapterError(f"{match['part']} of {module} is in the file twice")
        found[module][match["part"]] = key
    if not found:
        raise AdapterError(f"{WEIGHTS_FILE} holds no {_NAMES[kind]} tensors")
    return {module: found[module] for module in targets if module in found}


def _read_parts(file: TensorFile, module: str, keys: Mapping[str, str]) -> Parts:
    parts: Parts = {}
    for part, key in keys.items():
        tensor = file.read(key).double()
        if tensor.ndim != 2 or not tensor.numel():
            raise AdapterError(f"{part} of {module} has shape {list(tensor.shape)}")
        if not bool(tensor.isfinite().all()):
            raise AdapterError(f"{part} of {module} holds NaN or infinity")
        parts[part] = tensor
    return parts


def _factor(kind: str, target: Target, parts: Parts, scale: float, max_rank: int) -> Factors:
    """Returns the decomposition of the scaled change; of a Kronecker product its largest parts."""
    module = target.module
    if kind == "LOHA":
        first, second = (_pair(parts, f"hada_w{i}", module) for i in (1, 2))
        shapes = [(len(a), b.shape[1]) for a, b in (first, second)]
        if shapes[0] != shapes[1]:
            raise AdapterError(f"hada_w1 and hada_w2 of {module} have different shapes")
        _check_shape(shapes[0], target)
        if _is_dense(first[0].shape[1] * second[0].shape[1], *shapes[0], max_rank):
            product = (first[0] @ first[1]).mul_(second[0] @ second[1]).mul_(scale)
            return _svd((product,), module, max_rank)
        left = torch.einsum("ni,nj->nij", first[0], second[0]).flatten(1)
        right = torch.einsum("im,jm->ijm", first[1], second[1]).flatten(0, 1)
        return _svd((left * scale, right), module, max_rank)
    outer, inner = (_kron_part(parts, i, module) for i in (1, 2))
    height = len(outer[0]) * len(inner[0])
    width = outer[-1].shape[1] * inner[-1].shape[1]
    _check_shape((height, width), target)
    first_part, second_part = (_svd(part, module, max_rank) for part in (outer, inner))
    return _kron(first_part, second_part, scale, 2 * max_rank)


def _is_dense(rank: int, height: int, width: int, max_rank: int) -> bool:
    """Returns whether a change of this rank is decomposed as a matrix, not by its factors."""
    if rank >= min(height, width):
        return True
    return not is_small(rank, rank, max_rank) and not is_small(height, width, max_rank)


def _kron_part(parts: Parts, index: int, module: str) -> tuple[torch.Tensor, ...]:
    """Returns the two factors of a part, or the whole part."""
    name = f"lokr_w{index}"
    if name not in parts:
        return _pair(parts, name, module)
    if f"{name}_a" in parts or f"{name}_b" in parts:
        raise AdapterError(f"{module} has {name} whole and in factors")
    return (parts[name],)


def _pair(parts: Parts, name: str, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = f"{name}_a", f"{name}_b"
    for half in (a, b):
        if half not in parts:
            raise AdapterError(f"{half} of {module} is missing")
    if parts[a].shape[1] != parts[b].shape[0]:
        raise AdapterError(f"{a} and {b} of {module} have different ranks")
    return parts[a], parts[b]


def _svd(factors: Sequence[torch.Tensor], module: str, max_rank: int) -> Factors:
    """Decomposes one matrix, or the product of two, [n, r] and [r, m], in float64."""
    if not all(bool(factor.isfinite().all()) for factor in factors):
        raise AdapterError(f"the change of {module} overflows float64")
    left, right = factors[0], factors[-1]
    if len(factors) == 1:
        return decompose(left, max_rank)
    if left.shape[1] >= min(left.shape[0], right.shape[1]):
        return _svd((left @ right,), module, max_rank)
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    small = decompose(r_left @ r_right.T, max_rank)
    return Factors(q_left @ small.u, small.sigma, small.v @ q_right.T, small.rest)


def _kron(first: Factors, second: Factors, scale: float, count: int) -> Factors:
    """Returns the `count` largest singular values of scale times the Kronecker product, with their
    vectors; of the others the values alone."""
    values = torch.outer(first.sigma, second.sigma).flatten() * abs(scale)
    sigma, order = values.sort(descending=True, stable=True)
    i, j = order[:count] // len(second.sigma), order[:count] % len(second.sigma)
    u = torch.einsum("nk,mk->nmk", first.u[:, i], second.u[:, j]).flatten(0, 1)
    v = torch.einsum("kn,km->knm", first.v[i], second.v[j]).flatten(1)
    norms = [float(torch.linalg.vector_norm(part.sigma)) for part in (first, second)]
    # (K + R) x (L + S), kept and left out: all but K x L is left out.
    rest = math.hypot(first.rest * math.hypot(norms[1], second.rest), norms[0] * second.rest)
    return Factors(u * math.copysign(1.0, scale), sigma, v, rest * abs(scale))


def _check_shape(found: tuple[int, int], target: Target) -> None:
    """Checks the shape of a change before anything of that size is made: small factors may claim
    any size."""
    wanted = target.out_features, target.site.in_features
    if found != wanted:
        raise AdapterError(
            f"the change of {target.module} has shape {list(found)}, the base has {list(wanted)}"
        )


def _fields(ranks: Mapping[str, int], base_name: str | None) -> dict[str, object]:
    """Returns the configuration. Alpha is the rank in every module: the scale is 1, and in B and
    A."""
    largest = max(ranks.values())
    others = {module: rank for module, rank in ranks.items() if rank != largest}
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_name,
        "r": largest,
        "lora_alpha": largest,
        "target_modules": list(ranks),
        "rank_pattern": others,
        "alpha_pattern": others,
        "bias": "none",
        "inference_mode": True,
    }
