"""Kinds of values in the configuration, each with its bounds: sizes, aliases, names of hosts.

`Args` is the base of every part of the configuration: an unknown key and a number without bounds
are errors.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from registry.errors import InvalidNameError
from registry.names import check_alias

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


# A bound on the digits keeps the product within a float's range.
_SIZE = re.compile(r"\s{0,8}([0-9]{1,18}(?:\.[0-9]{1,18})?)\s{0,8}([A-Za-z]{0,3})\s{0,8}", re.ASCII)
_MAX_NUMBER = 2**31 - 1  # Serve sends these fields as 32 bits
_MAX_LONG = 2**63 - 1


def parse_bytes(value: object) -> object:
    """256MiB, 1.5GB, 4096 -> a number of bytes; anything else is left for pydantic to refuse."""
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


AliasName = Annotated[str, AfterValidator(_legal_alias)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
# Serve's controller makes an object of each; a number without a bound would end it.
Replicas = Annotated[int, Field(ge=1, le=4096)]


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _number_is_bounded(cls, value: object, info: ValidationInfo) -> object:
        name = info.field_name or ""
        limit = _MAX_LONG if name == "seed" or name.endswith("_bytes") else _MAX_NUMBER
        if isinstance(value, int) and abs(value) > limit:
            raise ValueError(f"must be {limit} at most")
        return value


HostName = Annotated[str, Field(pattern=r"^(\*|\[[0-9a-f:.]+\]|[a-z0-9_.-]*[a-z0-9_-])$")]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9_.\[\]:-]+)$")]
