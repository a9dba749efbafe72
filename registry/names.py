"""The legal names of models and aliases, and the syntax of a client's model string.

It is `base`, `base:adapter` or `adapter`; each part may have `@alias` or `@version` (digits). A
request may name several adapters, each with a weight: `base:a+0.5*b`. No registered name has a plus
or an asterisk. Pure text: whether a name exists is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from registry.errors import InvalidNameError, NotFoundError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
# MLflow reserves `latest` and `v1`; digits alone would be parsed as a version.
_ALIAS = re.compile(r"(?![0-9]+$)(?![vV][0-9]+$)(?!latest$)[A-Za-z0-9_-]{1,64}", re.ASCII)
# As Hugging Face names repositories. MLflow refuses a slash in a model's name, so such a name can
# only be a second name of a registered base.
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_CACHED_MODEL = re.compile(r"models--(?:.+--)?([^/]+)/snapshots/[^/]+$")  # Hugging Face's cache
_VERSION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_WEIGHT = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,20})?", re.ASCII)
_FOREIGN = re.compile(r"[^\s\x00-\x20\x7f]+")  # a possible model name on another server
MAX_MODEL_LENGTH = 512
MAX_ADAPTERS = 4  # of a request
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 100.0  # of an adapter of a request, without the sign


@dataclass(frozen=True, slots=True)
class Reference:
    """A registered name with at most one of alias and version."""

    name: str
    alias: str | None = None
    version: int | None = None

    def __str__(self) -> str:
        if self.alias is not None:
            return f"{self.name}@{self.alias}"
        return self.name if self.version is None else f"{self.name}@{self.version}"


def is_legal_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    if not is_legal_name(name):
        raise InvalidNameError(
            f"{name[:100]!r} is not a legal name: 1 to 96 letters, digits, '.', '_' or '-', "
            "a letter or digit first"
        )
    return name


def check_model_id(model_id: str) -> str:
    if not _MODEL_ID.fullmatch(model_id):
        raise InvalidNameError(
            f"{model_id[:200]!r} is not a legal model id: ORGANISATION/NAME, each 1 to 96 letters, "
            "digits, '.', '_' or '-', a letter or digit first"
        )
    return model_id


def model_key(path_or_id: str) -> str:
    """Returns the last part of a path, of an id or of a folder in Hugging Face's cache, in lower
    case: two spellings of a model have the same key. Empty for an empty path."""
    path = path_or_id.replace("\\", "/").rstrip("/")
    cached = _CACHED_MODEL.search(path)
    return (cached[1] if cached else path.rpartition("/")[2]).lower()


def check_alias(alias: str) -> str:
    if not _ALIAS.fullmatch(alias):
        raise InvalidNameError(
            f"{alias[:70]!r} is not a legal alias: 1 to 64 letters, digits, '_' or '-'; "
            "not 'latest', not a version"
        )
    return alias


def parse_reference(text: str) -> Reference:
    name, at, suffix = text.partition("@")
    check_name(name)
    if not at:
        return Reference(name)
    if _VERSION.fullmatch(suffix):
        return Reference(name, version=int(suffix))
    return Reference(name, alias=check_alias(suffix))


def parse_model(model: str) -> tuple[Reference, Reference | None]:
    """Parses a client's model string into a single reference, or base and adapter.

    A name that is legal on other servers ("org/name", a file's path) but not here raises
    NotFoundError: such a model may exist elsewhere. A name that is illegal on every server, and an
    alias or version that cannot exist, raise InvalidNameError.
    """
    if len(model) > MAX_MODEL_LENGTH:
        raise InvalidNameError(f"model names have at most {MAX_MODEL_LENGTH} characters")
    first, colon, second = model.partition(":")
    if not first or (colon and not second):
        raise InvalidNameError(f"a name is missing in {model!r}")
    for part in (first, second):
        name = part.partition("@")[0]
        if name and _FOREIGN.fullmatch(name) and not _NAME.fullmatch(name):
            raise NotFoundError(f"no base model or adapter is named {name[:100]!r}")
    return parse_reference(first), parse_reference(second) if colon else None


def split_adapters(model: str) -> tuple[tuple[str, float], ...]:
    """Splits a client's model string into a model and a weight for each of its adapters, the first
    as it is written and the others with the same base, if the string has a base. A model without
    weights or further adapters is its only part.

    Raises InvalidNameError for too many adapters, a repeated adapter, or a weight out of bounds.
    """
    if "+" not in model and "*" not in model:
        return ((model, 1.0),)
    base, colon, names = model.rpartition(":")
    found: list[tuple[str, float]] = []
    for part in names.split("+"):
        weight, times, name = part.rpartition("*")
        if times and not _WEIGHT.fullmatch(weight):
            raise InvalidNameError(
                f"the weight {weight[:40]!r} in {model[:100]!r} is not a number such as 0.5"
            )
        if not name:
            raise InvalidNameError(f"a name is missing in {model[:200]!r}")
        one = f"{base}{colon}{name}"
        if any(earlier == one for earlier, _ in found):
            raise InvalidNameError(f"{name[:100]!r} is twice in {model[:200]!r}")
        found.append((one, check_weight(float(weight)) if times else 1.0))
    if len(found) > MAX_ADAPTERS:
        raise InvalidNameError(
            f"{model[:100]!r} names {len(found)} adapters; at most {MAX_ADAPTERS} are allowed"
        )
    return tuple(found)


def join_weighted(names: Iterable[tuple[str, float]]) -> str:
    """Returns names with their weights as clients write them and `split_adapters` reads them:
    `a+0.5*b`."""
    return "+".join(
        name if weight == 1 else f"{weight_text(weight)}*{name}" for name, weight in names
    )


def weight_text(weight: float) -> str:
    """Returns a weight as clients write it: without an exponent."""
    return f"{weight:.12f}".rstrip("0").rstrip(".")


def check_weight(weight: float) -> float:
    if not MIN_WEIGHT <= abs(weight) <= MAX_WEIGHT:  # NaN is in no bounds
        raise InvalidNameError(
            f"the weight of an adapter must be between {weight_text(MIN_WEIGHT)} and "
            f"{MAX_WEIGHT:g}, or the negative of that, got {weight!r}"
        )
    return weight
