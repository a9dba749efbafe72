"""Names of modules of a text model that may be a part of a model of text and images.

The same layer is `model.layers.3` in a model of text, `model.language_model.layers.3` in a larger
one, and `language_model.model.layers.3` in a larger one saved by older versions of transformers.
Bases and adapters are found in all three spellings, whichever the other one has. Strings only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lora.errors import AdapterError

# The prefixes of the decoder's and of the head's names: canonical, then spelled.
_PLAIN = (("model.", "model."), ("lm_head", "lm_head"))
_PART = (("model.", "model.language_model."), ("lm_head", "lm_head"))
_OLD_PART = (("model.", "language_model.model."), ("lm_head", "language_model.lm_head"))
_OTHER_PARTS = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector)\..+")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The prefixes of one of the three forms."""

    prefixes: tuple[tuple[str, str], ...] = _PLAIN

    def spell(self, name: str) -> str:
        """Returns the name in this form of a canonical one."""
        for canonical, spelled in self.prefixes:
            if name.startswith(canonical):
                return spelled + name.removeprefix(canonical)
        return name


def canonical(name: str) -> str:
    """Returns the name in a model of text."""
    for prefixes in (_PART, _OLD_PART):
        for plain, spelled in prefixes:
            if spelled != plain and name.startswith(spelled):
                return plain + name.removeprefix(spelled)
    return name


def spellings(name: str) -> tuple[str, ...]:
    """Returns a canonical name in all three forms."""
    return tuple(Spelling(prefixes).spell(name) for prefixes in (_PLAIN, _PART, _OLD_PART))


def is_of_other_part(name: str) -> bool:
    """Returns True for modules that only images reach: they have no effect on a text."""
    return _OTHER_PARTS.fullmatch(name) is not None


def spelling_of(names: Iterable[str]) -> Spelling:
    """Returns the form of an adapter's modules. Raises AdapterError if it has several."""
    found: dict[tuple[tuple[str, str], ...], str] = {}
    for name in names:
        if name.startswith("language_model."):
            found.setdefault(_OLD_PART, name)
        elif name.startswith("model."):
            is_part = name.startswith("model.language_model.") or is_of_other_part(name)
            found.setdefault(_PART if is_part else _PLAIN, name)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise AdapterError(f"the file names modules in two forms: {first} and {second}")
    return Spelling(next(iter(found), _PLAIN))
