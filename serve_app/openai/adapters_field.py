"""The field `adapters` of a body: several adapters of the base that `model` names, with weights."""

from __future__ import annotations

from typing import Annotated

from registry.errors import InvalidNameError
from registry.names import MAX_ADAPTERS, check_weight, parse_reference
from serve_app.errors import shown
from serve_app.openai.json_body import FieldError, nullable, refuse

_SHAPE = '[{"name": "sql", "weight": 0.5}, ...]'


def check_base_alone(model: str, adapters: object) -> None:
    """Raises FieldError if the model names adapters beside those of the field."""
    if adapters and (found := next((c for c in ":+*" if c in model), None)):
        raise FieldError(
            f"adapters: model must name a base alone then, got {shown(model)} with {found!r}.",
            "adapters",
        )


def _check_adapters(value: object) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        refuse("adapters", f"must be a list such as {_SHAPE}", value)
    if len(value) > MAX_ADAPTERS:
        refuse("adapters", f"at most {MAX_ADAPTERS} are allowed", len(value))
    found = [_check_adapter(one, f"adapters.{number}") for number, one in enumerate(value)]
    for number, (name, _) in enumerate(found):
        if name in [earlier for earlier, _ in found[:number]]:
            raise FieldError(f"adapters.{number}.name: {shown(name)} is there twice.")
    return tuple(found)


def _check_adapter(value: dict[str, object], where: str) -> tuple[str, float]:
    for field in value:
        if field not in ("name", "weight"):
            refuse(where, "must have name and weight only", field)
    name, weight = value.get("name"), value.get("weight")
    if not isinstance(name, str):
        refuse(f"{where}.name", "must be a string", name)
    if weight is None:
        weight = 1.0
    if type(weight) not in (int, float):
        refuse(f"{where}.weight", "must be a number", weight)
    try:
        parse_reference(name)
    except InvalidNameError as error:
        raise FieldError(f"{where}.name: {error}.") from None
    try:
        return name, check_weight(float(weight))  # type: ignore[arg-type]
    except (InvalidNameError, OverflowError) as error:
        raise FieldError(f"{where}.weight: {error}.") from None


Adapters = Annotated[
    tuple[tuple[str, float], ...], nullable(_check_adapters, list[dict[str, str | float]])
]
