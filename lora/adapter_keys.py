"""The keys of the tensors in an adapter's file: their modules, as in a model of text.

Strings only; keys of vectors and of trained tokens are with their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from lora.errors import AdapterError
from lora.module_names import Spelling, canonical, is_of_other_part, spelling_of
from lora.sites import Target
from lora.untrusted import shown

_MODEL = "base_model.model."
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?:lora_(?P<linear>[AB])(?:\.default)?\.weight|lora_embedding_(?P<embedding>[AB])(?:\.default)?)"
)
_BASE_COPY = re.compile(
    r"base_model\.model\.(?P<module>.+?)"
    r"(?P<kept>(?:\.token_adapter)?\.base_layer|\.original_module)?\.weight"
)


def is_unread(key: str) -> bool:
    """Returns True for tensors of a part that only images reach."""
    return is_of_other_part(key.removeprefix(_MODEL))


def copied_module(key: str, targets: Mapping[str, Target]) -> str | None:
    """Returns the module of whose weight the tensor is a copy, if its name tells the truth: PEFT's
    save_embedding_layers writes the head and the embedding under their own names, too."""
    copy = _BASE_COPY.fullmatch(key)
    if copy is None or (module := canonical(copy["module"])) not in targets:
        return None
    return module if copy["kept"] or targets[module].site.is_optional else None


def is_whole(key: str) -> bool:
    """Returns True if a copied module has its own name, as one that was trained whole."""
    copy = _BASE_COPY.fullmatch(key)
    return copy is not None and not copy["kept"]


def extended_remedy(found: Sequence[int], wanted: Sequence[int]) -> str:
    """Returns what to do about a tensor whose first length, that of a vocabulary, is more than the
    base's. Arguments are shapes."""
    if len(found) != len(wanted) or found[0] <= wanted[0]:
        return ""
    return (
        ": for a vocabulary that was extended, register the base as it was saved after "
        "resize_token_embeddings"
    )


def module_of(key: str, name: str, targets: Mapping[str, Target]) -> str:
    """Returns the module that a key calls `name`. Raises AdapterError if the base has none."""
    module = canonical(name)
    if module not in targets:
        remedy = ""
        if f"model.{module}" in targets:
            remedy = (
                ", and the adapter was trained on a model without a head (AutoModel), which "
                "generates no text: train it on AutoModelForCausalLM"
            )
        raise AdapterError(
            f"tensor {shown(key)} matches nothing: the base has no module {shown(module)} that can "
            f"be adapted{remedy}"
        )
    return module


def spelling_in(keys: Iterable[str]) -> Spelling:
    """Returns the form of the file's modules, which is that of the names in its configuration."""
    return spelling_of(key.removeprefix(_MODEL) for key in keys)


def parse_key(key: str, targets: Mapping[str, Target]) -> tuple[str, str]:
    """Returns the module and "A" or "B". Raises AdapterError for keys of other tensors."""
    match = _KEY.fullmatch(key)
    if match is None:
        reason = "has a name that is not PEFT's"
        if ".lora_" not in key:
            reason = (
                "is a whole weight of a module that modules_to_save in adapter_config.json does "
                "not name: name it there if it was trained, and loraplex register adapter converts "
                "lm_head and embed_tokens"
            )
        raise AdapterError(f"tensor {shown(key)} {reason}")
    module = module_of(key, match["module"], targets)
    kind = "linear" if match["linear"] else "embedding"
    if targets[module].site.kind != kind:
        raise AdapterError(f"tensor {shown(key)} is of the {kind} form, {module} is not")
    return module, match["linear"] or match["embedding"]
