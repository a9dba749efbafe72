"""The legal names of models and aliases, and the syntax of a client's model string.

It is `base`, `base:adapter` or `adapter`; each part may have `@alias` or `@version` (digits).
Pure text: whether a name exists is not checked.
"""

from __future__ import annotations

import re
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
_FOREIGN = re.compile(r"[^\s\x00-\x20\x7f]+")  # a possible model name on another server
MAX_MODEL_LENGTH = 512


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
    for part in (first, second):
        name = part.partition("@")[0]
        if name and _FOREIGN.fullmatch(name) and not _NAME.fullmatch(name):
            raise NotFoundError(f"no base model or adapter is named {name[:100]!r}")
    return parse_reference(first), parse_reference(second) if colon else None
