"""An adapter as stored in a folder (PEFT's format), checked in full, and as held in memory.

All or nothing: each tensor of the file must belong to a site of the base with the right shape, each
module that the configuration targets must have its pair, every number must be finite; an adapter
that we do not compute exactly is refused with the reason. Pickles are never read. Free of the pool
and the registry; the caller provides the folder's digest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lora.convert import in_turns
from lora.errors import AdapterError
from lora.header import ReadBuffer, TensorEntry, TensorFile, read_header
from lora.peft_config import PeftConfig, read_peft_config
from lora.sites import Site, Target, targets_by_module
from lora.untrusted import open_regular, shown, shown_value

WEIGHTS_FILE = "adapter_model.safetensors"
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?:lora_(?P<linear>[AB])(?:\.default)?\.weight|lora_embedding_(?P<embedding>[AB])(?:\.default)?)"
)
_BASE_COPY = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.weight")


BaseWeight = Callable[[str], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The weights of one module, whose output gains (x a^T) b. They are kept as the file has them;
    `convert.copy_rows` makes a pool's rows of them in one pass."""

    lora_a: torch.Tensor  # [r, in_features] in the file's type
    lora_b: torch.Tensor  # [r, out_features] in the file's type: a view of PEFT's B
    scale: float = 1.0  # of lora_b
    bound: float = math.inf  # no number of lora_a, or of lora_b times the scale, is larger

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]

    @property
    def a(self) -> torch.Tensor:
        """[r, in_features] float32."""
        return self.lora_a.float()

    @property
    def b(self) -> torch.Tensor:
        """[r, out_features] float32, PEFT's B transposed, times the scale."""
        return (self.lora_b.float() * self.scale).contiguous()

    @property
    def is_noop(self) -> bool:
        return not (bool(self.lora_b.any()) and bool(self.lora_a.any()) and bool(self.b.any()))


@dataclass(frozen=True, slots=True)
class Adapter:
    digest: str
    rank: int  # the largest of any module
    modules: Mapping[str, ModuleWeights]
    num_parameters: int
    is_noop: bool  # it changes nothing: an untrained adapter has B = 0
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
    with _open_weights(path) as file:
        keys = tuple(file.entries)
    for key in keys:
        copy = _BASE_COPY.fullmatch(key)
        if copy is not None and copy["module"] in targets:
            continue
        try:
            _parse_key(key, targets)
        except AdapterError as error:
            reasons.append(str(error))
    return TensorMatch(len(keys) - len(reasons), tuple(reasons))


def read_adapter(
    path: Path,
    digest: str,
    sites: Sequence[Site],
    max_rank: int,
    base_weight: BaseWeight | None = None,
    buffer: ReadBuffer | None = None,
) -> Adapter:
    """Reads and checks an adapter; raises AdapterError. PEFT saves an adapted embedding (or head)
    with a copy of the base's own weight; `base_weight(module)` returns ours to compare, and without
    it such a file is refused. The weights are in `buffer` until its next use; None: in memory of
    their own."""
    config = read_peft_config(path)
    with _open_weights(path) as file:
        pairs = _check_header(file, targets_by_module(sites), config, max_rank, base_weight)
        modules = _read_modules(file, pairs, config, buffer or ReadBuffer())
    return Adapter(
        digest=digest,
        rank=max(weights.rank for weights in modules.values()),
        modules=modules,
        num_parameters=sum(w.lora_a.numel() + w.lora_b.numel() for w in modules.values()),
        is_noop=all(weights.is_noop for weights in modules.values()),
        invocation=config.invocation,
    )


@contextmanager
def _open_weights(path: Path) -> Iterator[TensorFile]:
    try:
        with open_regular(path / WEIGHTS_FILE) as file:
            yield read_header(file, WEIGHTS_FILE)
    except FileNotFoundError:
        raise AdapterError(_no_weights_reason(path)) from None
    except OSError as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error.strerror}") from None


def _check_header(
    file: TensorFile,
    targets: Mapping[str, Target],
    config: PeftConfig,
    max_rank: int,
    base_weight: BaseWeight | None,
) -> dict[str, dict[str, str]]:
    """Makes all checks that need only the header, and those of copies of the base's weights.
    Returns module -> {"A": key, "B": key}, in the order of the targets."""
    pairs: dict[str, dict[str, str]] = {}
    copies: dict[str, str] = {}  # module -> key
    for key in in_turns(file.entries):
        copy = _BASE_COPY.fullmatch(key)
        if copy is not None and copy["module"] in targets:
            copies[copy["module"]] = key
            continue
        module, half = _parse_key(key, targets)
        if half in pairs.setdefault(module, {}):
            raise AdapterError(f"lora_{half} of {module} is in the file twice")
        pairs[module][half] = key
    _check_complete(pairs, targets, config)
    for module, keys in in_turns(pairs.items()):
        a, b = file.entries[keys["A"]], file.entries[keys["B"]]
        _check_shapes(targets[module], a, b, config, max_rank)
    for module in pairs if config.invocation else ():
        # PEFT applies it to all tokens there, so that no KV block is the base's.
        if targets[module].site.kind == "embedding":
            raise AdapterError(
                f"the adapter has alora_invocation_tokens and {module}, an embedding, which is not "
                "supported"
            )
    for module, key in copies.items():
        _check_base_copy(module, file, key, base_weight)
    return {module: pairs[module] for module in targets if module in pairs}


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
        # Rounded up: the products are of float32.
        bound = largest * max(1.0, abs(scale)) * (1 + 1e-6)
        if bound > torch.finfo(torch.float32).max:
            _check_numbers(a, b, module, scale)
            bound = math.inf
        modules[module] = ModuleWeights(a, b.T, scale, bound)
    return modules


def _no_weights_reason(path: Path) -> str:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
    if pickles:
        return (
            f"the weights are a pickle ({shown(pickles[0])}), which is never read: save as "
            "safetensors"
        )
    return f"the folder has no {WEIGHTS_FILE}"


def _parse_key(key: str, targets: Mapping[str, Target]) -> tuple[str, str]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise AdapterError(f"tensor {shown(key)} {_reason_for_key(key)}")
    module = match["module"]
    if module not in targets:
        raise AdapterError(
            f"tensor {shown(key)} matches nothing: the base has no module {shown(module)} that can "
            "be adapted"
        )
    kind = "linear" if match["linear"] else "embedding"
    if targets[module].site.kind != kind:
        raise AdapterError(f"tensor {shown(key)} is of the {kind} form, {module} is not")
    return module, match["linear"] or match["embedding"]


def _reason_for_key(key: str) -> str:
    if "lora_magnitude_vector" in key:
        return "belongs to DoRA, which is not supported"
    if key.endswith("bias"):
        return "is a bias, which is not supported"
    if "trainable_tokens" in key or "token_adapter" in key:
        return "holds trained tokens, which are not supported"
    if ".lora_" not in key:
        return "is a whole trained weight (modules_to_save), which is not supported"
    return "has a name that is not PEFT's"


def _check_complete(
    pairs: Mapping[str, Mapping[str, str]], targets: Mapping[str, Target], config: PeftConfig
) -> None:
    if not pairs:
        raise AdapterError(f"{WEIGHTS_FILE} holds no LoRA tensors")
    for module, keys in in_turns(pairs.items()):
        for half in "AB":
            if half not in keys:
                raise AdapterError(f"lora_{half} of {module} is missing")
        if not config.targets(targets[module].site, module):
            raise AdapterError(
                f"the file has tensors for {module}, which target_modules does not name"
            )
    for module, target in in_turns(targets.items()):
        if module not in pairs and config.targets(target.site, module):
            raise AdapterError(f"target_modules names {module}, the file has no tensors for it")


def _check_shapes(
    target: Target, a: TensorEntry, b: TensorEntry, config: PeftConfig, max_rank: int
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
    if rank != config.rank_of(module):
        raise AdapterError(
            f"{module} has rank {rank}, adapter_config.json has "
            f"{shown_value(config.rank_of(module))}"
        )
    if in_features != target.site.in_features:
        raise AdapterError(
            f"lora_A of {module} has in_features {in_features}, the base has "
            f"{target.site.in_features}"
        )
    if out_features != target.out_features:
        raise AdapterError(
            f"lora_B of {module} has out_features {out_features}, the base has "
            f"{target.out_features}"
        )


def _check_base_copy(
    module: str, file: TensorFile, key: str, base_weight: BaseWeight | None
) -> None:
    base = base_weight(module) if base_weight is not None else None
    if base is None:
        raise AdapterError(
            f"the file holds a copy of the base's weight of {module} that cannot be compared; save "
            "with save_embedding_layers=False"
        )
    shape = file.entries[key].shape  # checked before it is read: it may claim any size
    if shape != base.shape:
        raise AdapterError(
            f"the file's copy of the base's {module} has shape {list(shape)}, the base has "
            f"{list(base.shape)}"
        )
    copy = file.read(key)
    coarser = max(copy.dtype, base.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    if not torch.equal(copy.to(coarser), base.to("cpu", coarser)):
        raise AdapterError(
            f"the file's copy of the base's {module} differs from the base: it was trained too, or "
            "the adapter belongs to another base"
        )


def _check_numbers(a: torch.Tensor, b: torch.Tensor, module: str, scale: float) -> None:
    for half, tensor in (("A", a), ("B", b)):
        if not _is_finite(tensor):
            raise AdapterError(f"lora_{half} of {module} holds NaN or infinity")
    if not _is_finite(b.float() * scale):
        raise AdapterError(f"lora_B of {module} times its scale {scale} overflows float32")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Checks both extremes: a NaN appears in both, an infinity in one. 24 ms for 42 M numbers,
    `isfinite` 240."""
    low, high = tensor.aminmax()
    return bool(low.isfinite() & high.isfinite())
