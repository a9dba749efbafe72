"""Trained tokens of an adapter's file: whole rows of the embedding in place of the base's.

As LoRA of one rank row for each token: the row of the embedding becomes base + (own - base), so A
has a one in the token's column and B is the difference. A tied head has the same rows: there A is
the difference and B has the one. So they need the rows of the vocabulary's width, twice its length
in bytes for each token in a half type, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from lora.errors import AdapterError
from lora.header import TensorFile
from lora.module_names import canonical
from lora.sites import Target
from lora.untrusted import shown
from lora.vectors import BaseParameter

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?"
)
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"

Halves = dict[str, tuple[torch.Tensor, torch.Tensor]]  # module -> A [r, in], B^T [r, out]


def parse_token_key(key: str, targets: Mapping[str, Target]) -> str | None:
    """Returns the module of a key of trained tokens, None if the key is none."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    module = canonical(match["module"])
    if module not in targets or not targets[module].site.is_optional:
        raise AdapterError(
            f"tensor {shown(key)} matches nothing: {shown(module)} is no embedding or head of the "
            "base"
        )
    return module


def own_tokens(
    file: TensorFile,
    keys: Mapping[str, str],
    indices: Mapping[str, tuple[int, ...]],
    base: BaseParameter,
) -> dict[str, str]:
    """Returns the keys without that of a tied head which repeats the embedding's rows: PEFT's
    save_embedding_layers writes them a second time. Arguments are those of `read_tokens`."""
    own = dict(keys)
    if own.keys() == {_EMBEDDING, _HEAD} and _HEAD not in indices:
        head, embedding = own[_HEAD], own[_EMBEDDING]
        is_alike = file.entries[head].shape == file.entries[embedding].shape
        is_tied = base(f"{_HEAD}.weight") is base(f"{_EMBEDDING}.weight")
        if is_alike and is_tied and torch.equal(file.read(head), file.read(embedding)):
            del own[_HEAD]
    return own


def read_tokens(
    file: TensorFile,
    keys: Mapping[str, str],  # module -> key
    indices: Mapping[str, tuple[int, ...]],  # by the end of a module's name
    pairs: Mapping[str, object],
    targets: Mapping[str, Target],
    max_rank: int,
    base: BaseParameter,
) -> Halves:
    """Reads and checks the rows of all modules. `pairs`: the modules with A and B of their own."""
    of_module = {module: own for module in keys if (own := indices.get(module.rpartition(".")[2]))}
    if len(of_module) != len(keys) or len(keys) != len(indices):
        raise AdapterError(
            "trainable_token_indices names other modules than the file has trained tokens of"
        )
    halves: Halves = {}
    for module, key in keys.items():
        weight = base(f"{module}.weight")
        if weight is None:
            raise AdapterError(f"trained tokens of {module} need the base's weight of it")
        assert isinstance(weight, torch.Tensor)  # only matrices of layers are quantised
        change = _change(file, module, key, of_module[module], weight, max_rank)
        ones = torch.zeros(len(change), len(weight), dtype=torch.float16)
        ones[torch.arange(len(change)), torch.tensor(of_module[module])] = 1
        if module == _EMBEDDING:
            halves[module] = ones, change
            if _HEAD in targets and base(f"{_HEAD}.weight") is weight:  # tied
                halves[_HEAD] = change, ones
        elif module in halves:
            raise AdapterError(f"the base ties {module} to the embedding: train the tokens of one")
        else:
            halves[module] = change, ones
    for module in halves:
        if module in pairs:
            raise AdapterError(f"{module} has trained tokens and LoRA, which PEFT refuses together")
    return halves


def _change(
    file: TensorFile,
    module: str,
    key: str,
    indices: tuple[int, ...],
    weight: torch.Tensor,  # [V, H]
    max_rank: int,
) -> torch.Tensor:
    """Returns the rows of the file less those of the base, [tokens, H] float32."""
    shape = file.entries[key].shape
    if shape != (len(indices), weight.shape[1]):
        raise AdapterError(
            f"trained tokens of {module} have shape {list(shape)}, expected are "
            f"{[len(indices), weight.shape[1]]}"
        )
    if len(indices) > max_rank:
        raise AdapterError(
            f"{len(indices)} tokens of {module} are trained, which are as many ranks; allowed are "
            f"{max_rank}"
        )
    if len(set(indices)) < len(indices) or max(indices) >= len(weight):
        raise AdapterError(
            f"trainable_token_indices of {module} are not different tokens below {len(weight)}"
        )
    rows = file.read(key).float()
    if not bool(rows.isfinite().all()):
        raise AdapterError(f"trained tokens of {module} hold NaN or infinity")
    return rows - weight[torch.tensor(indices, device=weight.device)].float().cpu()
