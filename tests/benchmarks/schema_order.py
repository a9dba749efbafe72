"""JSON data with its properties in the order in which a schema lists them: grammars have one order,
and JSON has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MAX_DEPTH = 64
_BRANCHES = ("allOf", "anyOf", "oneOf")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def in_order_of_schema(data: Any, root: dict[str, Any]) -> Any:
    """Returns a copy in the order of the properties of all schemas that may describe a value;
    properties that none of them lists follow in their own order."""
    return _ordered(data, [root], root, 0)


def _ordered(data: Any, schemas: list[Any], root: dict[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH or not isinstance(data, dict | list):
        return data
    found = [part for schema in schemas for part in _parts(schema, root, 0)]
    if isinstance(data, list):
        return [
            _ordered(one, _item_schemas(found, index), root, depth + 1)
            for index, one in enumerate(data)
        ]
    listed = dict.fromkeys(name for part in found for name in _names(part))
    names = [name for name in listed if name in data]
    names += [name for name in data if name not in listed]
    return {
        name: _ordered(data[name], _property_schemas(found, name), root, depth + 1)
        for name in names
    }


def _parts(schema: Any, root: dict[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Yields a schema and those that its references and branches lead to."""
    if not isinstance(schema, dict) or depth > 16:
        return
    yield schema
    for key in _REFERENCES:
        if isinstance(schema.get(key), str):
            yield from _parts(_resolve(schema[key], root), root, depth + 1)
    for key in _BRANCHES:
        for one in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _parts(one, root, depth + 1)


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    place: Any = root
    if not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(key)
        elif isinstance(place, list) and key.isdigit() and int(key) < len(place):
            place = place[int(key)]
        else:
            return None
    return place


def _names(schema: dict[str, Any]) -> list[str]:
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    return names + [
        name for name in (required if isinstance(required, list) else []) if name not in names
    ]


def _property_schemas(schemas: list[dict[str, Any]], name: str) -> list[Any]:
    found = []
    for schema in schemas:
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(properties[name])
        else:
            patterns = schema.get("patternProperties")
            found += list(patterns.values()) if isinstance(patterns, dict) else []
            found.append(schema.get("additionalProperties"))
    return found


def _item_schemas(schemas: list[dict[str, Any]], index: int) -> list[Any]:
    found = []
    for schema in schemas:
        for key in ("prefixItems", "items", "additionalItems"):
            items = schema.get(key)
            if isinstance(items, list):
                found += items[index : index + 1]
            elif items is not None:
                found.append(items)
    return found
