"""An adapter as stored in a folder (PEFT's format), checked in full, and as held in memory.

All or nothing: each tensor of the file must belong to a site of the base with the right shape, each
module that the configuration targets must have its pair, every number must be finite; an adapter
that we do not compute exactly is refused with the reason. Modules are found in any of the forms of
`module_names`; those of a part for images, which no text reaches, are left unread. Pickles are
never read. Free of the pool and the registry; the caller provides the folder's digest.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from lora.adapter_keys import (
    copied_module,
    extended_remedy,
    is_unread,
    is_whole,
    parse_key,
    spelling_in,
)
from lora.convert import in_turns
from lora.errors import AdapterError
from lora.header import ReadBuffer, TensorEntry, TensorFile, read_header
from lora.module_weights import ModuleWeights as ModuleWeights
from lora.module_weights import is_finite
from lora.peft_config import CONFIG_FILE, PeftConfig, read_peft_config
from lora.sites import Site, Target, targets_by_module
from lora.trained_tokens import own_tokens, parse_token_key, read_tokens
from lora.untrusted import open_regular, shown, shown_value
from lora.vectors import BaseParameter, Keys, check_vectors, parse_vector_key, with_vectors

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth")
# Whose length is that of the vocabulary.
_VOCABULARY = {"model.embed_tokens": "in_features", "lm_head": "out_features"}


@dataclass(frozen=True, slots=True)
class Adapter:
    digest: str
    rank: int  # the largest of any module
    modules: Mapping[str, ModuleWeights]
    num_parameters: int
    is_noop: bool  # it changes nothing: an untrained adapter has B = 0
    kind: str = "LoRA"  # or DoRA or aLoRA, with or without biases, in words
    num_tensors: int = 0  # of the file
    num_unread: int = 0  # tensors of a part for images
    invocation: tuple[int, ...] = ()  # as `PeftConfig.invocation`


@dataclass(frozen=True, slots=True)
class TensorMatch:
    """The match between tensors of the file and modules of the base."""

    num_matched: int
    unmatched: tuple[str, ...]  # the reason for each other tensor


def match_tensors(path: Path, sites: Sequence[Site]) -> TensorMatch:
    """Matches the tensors by the file's header alone, to report every mismatch; `read_adapter`
    refuses at the first. Raises AdapterError."""
    targets = targets_by_module(sites)
    reasons: list[str] = []
    with open_weights(path) as file:
        keys = tuple(file.entries)
    read = [key for key in keys if not is_unread(key)]
    for key in read:
        try:
            _parse(key, targets)
        except AdapterError as error:
            reasons.append(str(error))
    return TensorMatch(len(read) - len(reasons), tuple(reasons))


def read_adapter(
    path: Path,
    digest: str,
    sites: Sequence[Site],
    max_rank: int,
    base: BaseParameter = lambda name: None,
    buffer: ReadBuffer | None = None,
) -> Adapter:
    """Reads and checks an adapter; raises AdapterError. DoRA needs weights of the base, trained
    biases its biases, and PEFT saves an adapted embedding (or head) with a copy of the base's own
    weight: `base` returns ours, and without it such a file is refused. The weights are in `buffer`
    until its next use; None: in memory of their own."""
    config = read_peft_config(path)
    targets = targets_by_module(sites)
    with open_weights(path) as file:
        config = replace(config, spelling=spelling_in(file.entries))
        pairs, vectors, tokens = _check_header(file, targets, config, max_rank, base)
        modules = _read_modules(file, pairs, config, buffer or ReadBuffer())
        for module, keys in in_turns(vectors.items()):
            plain = modules.get(module) or _no_change(targets[module])
            modules[module] = with_vectors(plain, file, module, keys, base)
        tokens = own_tokens(file, tokens, config.token_indices, base)
        rows = read_tokens(file, tokens, config.token_indices, pairs, targets, max_rank, base)
        modules |= {module: ModuleWeights(*halves) for module, halves in rows.items()}
        found = (*pairs.values(), *vectors.values(), tokens)
        used = [file.entries[key] for keys in found for key in keys.values()]
        num_unread = sum(map(is_unread, file.entries))
    if num_unread:
        logger.info("%d tensors of the part for images are left unread", num_unread)
    return Adapter(
        digest=digest,
        rank=max(weights.rank for weights in modules.values()),
        modules=modules,
        num_parameters=sum(math.prod(entry.shape) for entry in used),
        is_noop=all(weights.is_noop for weights in modules.values()),
        kind=_kind(config, vectors, tokens),
        num_tensors=len(used),
        num_unread=num_unread,
        invocation=config.invocation,
    )


@contextmanager
def open_weights(path: Path) -> Iterator[TensorFile]:
    """Opens the weights of a folder. Raises AdapterError."""
    try:
        with open_regular(path / WEIGHTS_FILE) as file:
            yield read_header(file, WEIGHTS_FILE)
    except FileNotFoundError:
        raise AdapterError(_no_weights_reason(path)) from None
    except OSError as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error.strerror}") from None


def write_adapter(
    folder: Path, out: Path, fields: Mapping[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    """Writes an adapter made of that in `folder` to the empty folder `out`, with copies of its
    other files; a tokenizer or a chat template may be among them."""
    for path in sorted(folder.iterdir()):
        if path.name in (CONFIG_FILE, WEIGHTS_FILE) or path.suffix in _PICKLES or path.is_dir():
            continue
        with open_regular(path) as source, (out / path.name).open("wb") as target:
            shutil.copyfileobj(source, target)
    (out / CONFIG_FILE).write_text(json.dumps(fields, indent=1) + "\n")
    # One entry: the order of several changes with each call, and with it the content's digest.
    save_file(tensors, out / WEIGHTS_FILE, {"format": "pt"})


def _parse(key: str, targets: Mapping[str, Target]) -> tuple[str, str, str]:
    """Returns the role of a tensor (pair, vector, tokens or copy), its module and its part. Raises
    AdapterError if it has none."""
    if (module := copied_module(key, targets)) is not None:
        return "copy", module, key
    if (module := parse_token_key(key, targets)) is not None:
        return "tokens", module, ""
    if (vector := parse_vector_key(key, targets)) is not None:
        return "vector", *vector
    return "pair", *parse_key(key, targets)


def _check_header(
    file: TensorFile,
    targets: Mapping[str, Target],
    config: PeftConfig,
    max_rank: int,
    base: BaseParameter,
) -> tuple[Keys, Keys, dict[str, str]]:
    """Makes all checks that need only the header, and those of copies of the base's weights.
    Returns the keys of A and B, in the order of the targets, of vectors and of trained tokens, by
    module."""
    found: dict[str, Keys] = {role: {} for role in ("pair", "vector", "tokens", "copy")}
    for key in in_turns(file.entries):
        if is_unread(key):
            continue
        role, module, part = _parse(key, targets)
        parts = found[role].setdefault(module, {})
        if part in parts:
            words = {"pair": f"lora_{part}", "vector": part, "tokens": "trained tokens"}[role]
            verb = "are" if role == "tokens" else "is"
            raise AdapterError(f"{words} of {module} {verb} in the file twice")
        parts[part] = key
    pairs, vectors = found["pair"], found["vector"]
    tokens = {module: keys[""] for module, keys in found["tokens"].items()}
    _check_complete(pairs)
    check_targets(pairs, targets, config)
    for module, keys in in_turns(pairs.items()):
        a, b = file.entries[keys["A"]], file.entries[keys["B"]]
        _check_shapes(targets[module], a, b, config.rank_of(module), max_rank)
    check_vectors(file, vectors, pairs, config, targets)
    if config.invocation:
        _check_invocable(pairs, vectors, tokens, targets)
    for module, copies in found["copy"].items():
        for key in copies:
            _check_base_copy(module, file, key, base)
    ordered = {module: pairs[module] for module in targets if module in pairs}
    return ordered, vectors, tokens


def _check_invocable(
    pairs: Keys, vectors: Keys, tokens: Mapping[str, str], targets: Mapping[str, Target]
) -> None:
    """Refuses the parts of an adapter that PEFT applies to all tokens, before its invocation too:
    no KV block would be the base's."""
    embeddings = [module for module in pairs if targets[module].site.kind == "embedding"]
    parts = [(module, "an embedding") for module in embeddings]
    parts += [(module, "of which tokens are trained") for module in tokens]
    parts += [(module, "whose bias is trained") for module in vectors if "bias" in vectors[module]]
    for module, what in parts:
        raise AdapterError(
            f"the adapter has alora_invocation_tokens and {module}, {what}, which is not supported"
        )


def _read_modules(
    file: TensorFile,
    pairs: Mapping[str, Mapping[str, str]],
    config: PeftConfig,
    buffer: ReadBuffer,
) -> dict[str, ModuleWeights]:
    """Reads the weights and checks every number."""
    keys = [key for pair in pairs.values() for key in pair.values()]
    tensors, largest = file.read_all(keys, buffer)
    modules: dict[str, ModuleWeights] = {}
    for module, pair in in_turns(pairs.items()):
        a, b, scale = tensors[pair["A"]], tensors[pair["B"]], config.scale_of(module)
        if abs(scale) > torch.finfo(torch.float32).max:
            raise AdapterError(f"the scale of {module}, {scale:g}, overflows float32")
        # Rounded up: the products are of float32.
        bound = largest * max(1.0, abs(scale)) * (1 + 1e-6)
        if bound > torch.finfo(torch.float32).max:
            _check_numbers(a, b, module, scale)
            bound = math.inf
        modules[module] = ModuleWeights(a, b.T, scale, bound)
    return modules


def _no_change(target: Target) -> ModuleWeights:
    """Returns the weights of a module of which only the bias is trained: a slice with affine rows
    has A and B."""
    a, b = torch.zeros(1, target.site.in_features), torch.zeros(1, target.out_features)
    return ModuleWeights(a, b, 1.0, 0.0)


def _kind(config: PeftConfig, vectors: Keys, tokens: Mapping[str, str]) -> str:
    has_biases = any({"lora_bias", "bias"} & keys.keys() for keys in vectors.values())
    more = [*(["biases"] if has_biases else []), *(["trained tokens"] if tokens else [])]
    name = "DoRA" if config.use_dora else "aLoRA" if config.invocation else "LoRA"
    return f"{name} with {' and '.join(more)}" if more else name


def _no_weights_reason(path: Path) -> str:
    pickles = sorted(p.name for end in _PICKLES for p in path.glob(f"*{end}"))
    if pickles:
        return (
            f"the weights are a pickle ({shown(pickles[0])}), which is never read: save as "
            "safetensors"
        )
    return f"the folder has no {WEIGHTS_FILE}"


def _check_complete(pairs: Keys) -> None:
    if not pairs:
        raise AdapterError(f"{WEIGHTS_FILE} holds no LoRA tensors")
    for module, keys in in_turns(pairs.items()):
        for half in "AB":
            if half not in keys:
                raise AdapterError(f"lora_{half} of {module} is missing")


def check_targets(
    found: Collection[str], targets: Mapping[str, Target], config: PeftConfig
) -> None:
    """Refuses modules with tensors in the file that are no targets of the configuration, and the
    reverse."""
    for module, target in in_turns(targets.items()):
        is_target = config.targets(target.site, module)
        if is_target and module not in found:
            raise AdapterError(f"target_modules names {module}, the file has no tensors for it")
        if module in found and not is_target:
            raise AdapterError(
                f"the file has tensors for {module}, which target_modules does not name"
            )


def _check_shapes(
    target: Target, a: TensorEntry, b: TensorEntry, configured_rank: int, max_rank: int
) -> None:
    module = target.module
    for half, entry in (("A", a), ("B", b)):
        if len(entry.shape) != 2:
            raise AdapterError(f"lora_{half} of {module} has shape {list(entry.shape)}, not 2-d")
    rank, in_features = a.shape
    out_features, rank_b = b.shape
    if rank != rank_b:
        raise AdapterError(f"lora_A of {module} has rank {rank}, its lora_B has rank {rank_b}")
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"{module} has rank {rank}, allowed are 1 to {max_rank}")
    if rank != configured_rank:
        raise AdapterError(
            f"{module} has rank {rank}, adapter_config.json has {shown_value(configured_rank)}"
        )
    for half, name, found, wanted in (
        ("A", "in_features", in_features, target.site.in_features),
        ("B", "out_features", out_features, target.out_features),
    ):
        if found != wanted:
            is_vocabulary = name == _VOCABULARY.get(module)
            remedy = extended_remedy((found,), (wanted,)) if is_vocabulary else ""
            raise AdapterError(
                f"lora_{half} of {module} has {name} {found}, the base has {wanted}{remedy}"
            )


def _check_base_copy(
    module: str, file: TensorFile, key: str, base_parameter: BaseParameter
) -> None:
    base = base_parameter(f"{module}.weight")
    if not isinstance(base, torch.Tensor):  # or quantized
        raise AdapterError(
            f"the file holds a copy of the base's weight of {module} that cannot be compared; save "
            "with save_embedding_layers=False"
        )
    shape = file.entries[key].shape  # checked before it is read: it may claim any size
    if shape != base.shape:
        raise AdapterError(
            f"the file's copy of the base's {module} has shape {list(shape)}, the base has "
            f"{list(base.shape)}{extended_remedy(shape, base.shape)}"
        )
    copy = file.read(key)
    coarser = max(copy.dtype, base.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    if torch.equal(copy.to(coarser), base.to("cpu", coarser)):
        return
    if is_whole(key):
        raise AdapterError(
            f"tensor {shown(key)} differs from the base's weight, and modules_to_save in "
            "adapter_config.json does not name it: name it there if it was trained, and loraplex "
            "register adapter converts it; otherwise the adapter belongs to another base"
        )
    raise AdapterError(
        f"the file's copy of the base's {module} differs from the base: it was trained too, or "
        "the adapter belongs to another base"
    )


def _check_numbers(a: torch.Tensor, b: torch.Tensor, module: str, scale: float) -> None:
    for half, tensor in (("A", a), ("B", b)):
        if not is_finite(tensor):
            raise AdapterError(f"lora_{half} of {module} holds NaN or infinity")
    if not is_finite(b.float() * scale):
        raise AdapterError(f"lora_B of {module} times its scale {scale} overflows float32")
