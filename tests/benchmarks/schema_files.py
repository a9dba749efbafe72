"""JSON schemas in the files of a folder, a wheel, a zip or a tar: plain ones, and test suites whose
schemas come with valid and invalid instances."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 4 * 1024 * 1024
# Folders of JSON-Schema-Test-Suite name the draft, which schemas of its older drafts do not.
_DRAFTS: Mapping[str, str] = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_OTHER_DRAFT = re.compile(r"/draft(3|-next|next)/")
_SCHEMA_KEYS = frozenset(
    (
        *("$schema", "$ref", "$defs", "definitions", "properties", "items", "enum", "const"),
        *("anyOf", "allOf", "oneOf", "additionalProperties", "patternProperties"),
    )
)


@dataclass(frozen=True, slots=True)
class Instance:
    data: Any
    is_valid: bool


@dataclass(frozen=True, slots=True)
class SchemaFile:
    name: str
    source: str  # the folder or the suite that it counts for
    schema: dict[str, Any]
    instances: tuple[Instance, ...] = ()


def read_schemas(path: Path) -> Iterator[SchemaFile]:
    """Yields the schemas of all JSON files, in the order of their names."""
    for name, text in _json_files(path):
        if _OTHER_DRAFT.search(f"/{name}"):
            continue
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue
        yield from _schemas_of(name, content)


def _json_files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            if file.is_file() and file.stat().st_size <= MAX_FILE_BYTES:
                yield str(file.relative_to(path)), file.read_bytes()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in sorted(archive.infolist(), key=lambda one: one.filename):
                if entry.filename.endswith(".json") and entry.file_size <= MAX_FILE_BYTES:
                    yield entry.filename, archive.read(entry)
    else:
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda one: one.name):
                if member.name.endswith(".json") and 0 < member.size <= MAX_FILE_BYTES:
                    file = archive.extractfile(member)
                    if file is not None:
                        yield member.name, file.read()


def _schemas_of(name: str, content: Any) -> Iterator[SchemaFile]:
    if isinstance(content, list):  # a file of JSON-Schema-Test-Suite
        for number, group in enumerate(content):
            if _is_group(group):
                yield _suite_schema(f"{name}#{number}", name, group)
    elif isinstance(content, dict) and _is_group(content):  # a file of MaskBench
        yield SchemaFile(name, _source(name), content["schema"], _instances(content["tests"]))
    elif isinstance(content, dict) and not content.keys().isdisjoint(_SCHEMA_KEYS):
        yield SchemaFile(name, _source(name), content)


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("schema"), dict)
        and isinstance(value.get("tests"), list)
        and all(isinstance(one, dict) and {"data", "valid"} <= one.keys() for one in value["tests"])
    )


def _instances(tests: list[Any]) -> tuple[Instance, ...]:
    return tuple(Instance(one["data"], bool(one["valid"])) for one in tests)


def _suite_schema(title: str, name: str, group: dict[str, Any]) -> SchemaFile:
    schema = group["schema"]
    draft = next((part for part in name.split("/") if part in _DRAFTS), None)
    if draft is not None and "$schema" not in schema:
        # An older draft ignores what stands beside a `$ref`.
        schema = {"$schema": _DRAFTS[draft], **schema}
    return SchemaFile(title, draft or _source(name), schema, _instances(group["tests"]))


def _source(name: str) -> str:
    folder, _, file = name.rpartition("/")
    prefix, found, _ = file.partition("---")  # MaskBench: the data set and the file
    return prefix if found else folder.rpartition("/")[2] or "files"
