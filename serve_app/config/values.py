"""The kinds of values in the configuration, each with its bounds: sizes, aliases, host names,
ranges of replicas.

`Args` is the base of every part of the configuration: an unknown key and a number without bounds
are errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from registry.errors import InvalidNameError
from registry.names import check_alias
from serve_app.field_problems import problem_of

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


# A bound on the digits keeps the product within a float's range.
_SIZE = re.compile(r"\s{0,8}([0-9]{1,18}(?:\.[0-9]{1,18})?)\s{0,8}([A-Za-z]{0,3})\s{0,8}", re.ASCII)
# YAML 1.1 reads 1e-3 as text.
_EXPONENT = re.compile(r"[-+]?[0-9]{1,18}(\.[0-9]{0,18})?[eE][-+]?[0-9]{1,3}", re.ASCII)
_QUOTED = re.compile(r"'([^']+)'")
_MAX_NUMBER = 2**31 - 1  # Serve sends these fields as 32 bits
_MAX_LONG = 2**63 - 1
_A_MAPPING = ("a mapping of keys to values", "add a key below it")
_A_LIST = ("a list", "add an item that begins with '- ' below it")
_EXPECTED = {
    "model_type": _A_MAPPING,
    "dict_type": _A_MAPPING,
    "list_type": _A_LIST,
    "tuple_type": _A_LIST,
    "string_type": ("text", "set it"),
    "path_type": ("a path", "set it"),
    "int_type": ("a whole number", "set it"),
    "float_type": ("a number", "set it"),
    "bool_type": ("true or false", "set it"),
}
_SHOWN_ERRORS = ("float_type", "literal_error")  # with the value


def parse_bytes(value: object) -> object:
    """Converts 256MiB, 1.5GB or "4096" to a number of bytes.

    Returns a value that is no string unchanged, for pydantic to check. Raises ValueError if the
    string is not a size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value[:80]!r} is not a size; write 1048576, 512MiB or 4GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _legal_alias(value: str) -> str:
    try:
        return check_alias(value)
    except InvalidNameError as error:
        raise ValueError(str(error)) from error


_READ_AS_SIZE = BeforeValidator(parse_bytes)


def _kinds(hint: object, metadata: tuple[object, ...] = ()) -> set[type]:
    """Returns the types of the values that a field takes as they are."""
    if get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        return _kinds(hint, (*metadata, *more))
    if get_origin(hint) in (Union, UnionType):
        return {kind for part in get_args(hint) for kind in _kinds(part, metadata)}
    kinds = {hint} if isinstance(hint, type) else set()
    return kinds | {str} if _READ_AS_SIZE in metadata else kinds


AliasName = Annotated[str, AfterValidator(_legal_alias)]
Bytes = Annotated[int, _READ_AS_SIZE, Field(ge=0)]
# Serve's controller makes an object for each replica; an unbounded number would exhaust it.
Replicas = Annotated[int, Field(ge=1, le=4096)]
HostName = Annotated[str, Field(pattern=r"^(\*|\[[0-9a-f:.]+\]|[a-z0-9_.-]*[a-z0-9_-])$")]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9_.\[\]:-]+)$")]


class _NoNumberError(ValueError):
    """Its message ends with the value."""


class Args(BaseModel):
    """The base of every part of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_other_value(cls, value: object, info: ValidationInfo) -> object:
        """Refuses true and "8", which pydantic would convert to a number."""
        field = cls.model_fields[info.field_name or ""]
        kinds = _kinds(field.annotation, tuple(field.metadata))
        if type(value) in kinds or not kinds & {int, float}:
            return value
        if isinstance(value, bool):
            raise _NoNumberError("must be a number")
        if isinstance(value, str) and not (float in kinds and _EXPONENT.fullmatch(value)):
            words = "a number" if float in kinds else "a whole number, in digits and"
            raise _NoNumberError(f"must be {words} without quotes")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _number_is_bounded(cls, value: object, info: ValidationInfo) -> object:
        name = info.field_name or ""
        limit = _MAX_LONG if name == "seed" or name.endswith("_bytes") else _MAX_NUMBER
        if isinstance(value, int) and abs(value) > limit:
            raise ValueError(f"must be {limit} at most")
        return value


class RangeArgs(Args):
    """A range of replica counts."""

    min_replicas: Replicas = 1
    """The fewest replicas."""
    max_replicas: Replicas
    """The most replicas."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} < min_replicas {self.min_replicas}")
        return self


class ScaledArgs(Args):
    """A deployment with a number of replicas, fixed or scaled automatically."""

    replicas: Replicas = 1
    """The number of replicas. With `autoscaling`: the number at the start, by default
    `autoscaling.min_replicas`."""

    @model_validator(mode="before")
    @classmethod
    def _starts_with_the_least(cls, fields: object) -> object:
        if not isinstance(fields, dict) or "replicas" in fields:
            return fields
        scaling = fields.get("autoscaling")
        least = scaling.get("min_replicas") if isinstance(scaling, dict) else None
        least = getattr(scaling, "min_replicas", least)
        return fields if least is None else {**fields, "replicas": least}

    @model_validator(mode="after")
    def _starts_within_its_range(self) -> Self:
        scaling: RangeArgs | None = getattr(self, "autoscaling", None)
        if scaling is None or scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            return self
        raise ValueError(
            f"replicas is {self.replicas}, but autoscaling keeps it between "
            f"min_replicas {scaling.min_replicas} and max_replicas {scaling.max_replicas}"
        )


def close_match(word: str, known: Collection[str]) -> str:
    """Returns the end of an error: the known word that `word` probably means; empty if none is
    like it. `fp8_e4m3` means `fp8`."""
    found = get_close_matches(word, known, n=1)
    found += [name for name in known if len(name) > 2 and word.startswith(name)]
    return f"; did you mean {found[0]}?" if found else ""


def schemas_of(annotation: object) -> list[type[BaseModel]]:
    """Returns the schemas within a type such as `list[Schema] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [schema for part in get_args(annotation) for schema in schemas_of(part)]


def in_words(
    error: ValidationError, prefix: str = "", schema: type[BaseModel] | None = None
) -> str:
    """Returns one sentence that names each wrong field by its path, and its value where that is a
    number or one of a few words; other values may hold a secret. `schema`: that was validated, for
    the names that unknown fields probably mean."""
    found = []
    for one in error.errors():
        where = prefix + ".".join(str(part) for part in one["loc"])
        words, value = _problem(one), one["input"]
        if isinstance(value, bool):
            words += f", got {str(value).lower()}"  # as YAML and JSON write it
        elif isinstance(value, int | float) or (value is not None and _is_shown(one)):
            words += f", got {ascii(value)[:80]}"
        if one["type"] == "literal_error" and isinstance(value, str):
            words += close_match(value[:80], _QUOTED.findall(one["ctx"]["expected"]))
        if one["type"] == "extra_forbidden" and schema is not None:
            words += close_match(str(one["loc"][-1])[:80], _known_fields(schema, one["loc"][:-1]))
        found.append(f"{where.rstrip('.')}: {words}")
    return "; ".join(found)


def _known_fields(schema: type[BaseModel], place: tuple[int | str, ...]) -> Collection[str]:
    """Returns the names of the fields at a place within a schema."""
    schemas = [schema]
    for part in place:
        within = [one.model_fields[part] for one in schemas if part in one.model_fields]
        if within:  # otherwise an index, or a key of a mapping, such as a model's name
            schemas = [inner for field in within for inner in schemas_of(field.annotation)]
    return [name for one in schemas for name in one.model_fields]


def _is_shown(error: Mapping[str, Any]) -> bool:
    """Returns True if the value is a number in other clothes or a word, and no secret."""
    cause = error.get("ctx", {}).get("error")
    return error["type"] in _SHOWN_ERRORS or isinstance(cause, _NoNumberError)


def _problem(error: Mapping[str, Any]) -> str:
    """Returns the problem of one value, in the words of a file and not in Python's words."""
    if error["type"] == "missing":
        return "is missing"
    expected = _EXPECTED.get(error["type"])
    if expected is None:
        return problem_of(error)
    kind, remedy = expected
    if error["input"] is None:
        return f"is empty and must be {kind}: {remedy} or remove the key"
    return f"must be {kind}"
