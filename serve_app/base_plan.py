"""Which base applications the wishes mean, given what the registry holds. Pure.

Wishes come from two places: the file's `models`, and the setting `serve` of a base's registered
model, which an admin call writes. Where both name a base the file wins. A wish that cannot be
followed is set aside with its reason and holds up no other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from registry.catalog import Catalog
from registry.errors import InvalidNameError, NotFoundError
from registry.names import parse_reference
from serve_app.config import FRONT_SETTINGS, ModelArgs, in_words
from serve_app.topology import BaseSource, BaseSpec

logger = logging.getLogger(__name__)

APP_PREFIX = "base--"
SERVE = "serve"  # the setting's key


@dataclass(frozen=True, slots=True)
class RefusedBase:
    """A base whose setting cannot be followed."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    specs: tuple[BaseSpec, ...]
    missing: tuple[str, ...]  # named by the file, not in the registry
    refused: tuple[RefusedBase, ...] = ()


def plan(models: Sequence[ModelArgs], catalog: Catalog, cluster_has_gpu: bool) -> Plan:
    specs: dict[str, BaseSpec] = {}
    missing: list[str] = []
    wishes: list[tuple[ModelArgs, BaseSource]] = [(model, "file") for model in models]
    added, refused = _settings(catalog, file_names(models))
    wishes += [(model, "registry") for model in added]
    for model, source in wishes:
        try:
            base = catalog.resolve_base(model.name)
        except (NotFoundError, InvalidNameError) as error:
            if source == "file":
                missing.append(model.name)
            else:
                refused.append(RefusedBase(model.name, str(error)))
            continue
        if base.digest in specs:
            logger.error("model %s is %s, which is already served", model.name, base.name)
            continue
        device = model.engine.device
        if device == "auto":
            device = "cuda" if cluster_has_gpu else "cpu"
        specs[base.digest] = BaseSpec(
            base, model, device, app_name(base.name, base.digest, model, device), source
        )
    return Plan(tuple(specs.values()), tuple(missing), tuple(refused))


def wished(models: Sequence[ModelArgs], catalog: Catalog) -> list[ModelArgs]:
    """The file's, and those that the registry adds."""
    return [*models, *_settings(catalog, file_names(models))[0]]


def parse_setting(name: str, text: str) -> ModelArgs:
    """The setting's JSON; ValueError says in words what is wrong with it."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    if "name" in fields:
        raise ValueError("name: is the registered model's and cannot be set")
    try:
        return ModelArgs.model_validate({**fields, "name": name})
    except ValidationError as error:
        raise ValueError(in_words(error)) from None


def file_names(models: Sequence[ModelArgs]) -> set[str]:
    """Of registered models, without alias or version."""
    names = set()
    for model in models:
        try:
            names.add(parse_reference(model.name).name)
        except InvalidNameError:
            continue
    return names


def app_name(name: str, digest: str, model: ModelArgs, device: str) -> str:
    """Says content and settings: another of either is another application."""
    text = model.model_dump_json(exclude=set(FRONT_SETTINGS)) + device
    settings = hashlib.sha256(text.encode()).hexdigest()
    return f"{APP_PREFIX}{_in_app_name(name)}--{digest[:12]}-{settings[:8]}"


def is_application_of(app: str, name: str, digest: str) -> bool:
    """With whatever settings."""
    return app.startswith(f"{APP_PREFIX}{_in_app_name(name)}--{digest[:12]}-")


def _settings(catalog: Catalog, in_file: set[str]) -> tuple[list[ModelArgs], list[RefusedBase]]:
    added: list[ModelArgs] = []
    refused: list[RefusedBase] = []
    for setting in catalog.settings:
        if setting.key != SERVE or setting.name in in_file:
            continue
        try:
            added.append(parse_setting(setting.name, setting.value))
        except ValueError as error:
            refused.append(RefusedBase(setting.name, f"its setting {SERVE!r} is wrong: {error}"))
    return added, refused


def _in_app_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)
