"""The base applications that the configuration asks for, given the registry's catalog. Pure.

Models are configured in two places: the file's `models`, and the setting `serve` of a base's
registered model, which an admin call writes. If both name a base, the file takes precedence. A
model that cannot be served is refused with its reason and does not affect the others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pydantic import ValidationError

from registry.catalog import Catalog, DefaultAliases
from registry.errors import InvalidNameError, NotFoundError
from registry.names import parse_reference
from serve_app.config import FRONT_SETTINGS, ModelArgs, base_name, in_words
from serve_app.platform_view import BaseSource, BaseSpec
from serve_app.routing.policies import POLICIES

logger = logging.getLogger(__name__)

APP_PREFIX = "base--"
SERVE = "serve"  # the setting's key
# For a base that a setting adds: on CPUs this is the only bound on the processes that it starts.
_MAX_ADDED_REPLICAS = 64
_MAX_REASON_CHARS = 1000
# A base that vanished from the registry stays served this long: a listing that changes between two
# pages, or an alias that is deleted and set again, may hide a base from a single read.
MISSING_S = 60.0


@dataclass(frozen=True, slots=True)
class RefusedBase:
    """A base whose setting cannot be applied."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    specs: tuple[BaseSpec, ...]
    missing: tuple[str, ...]  # named by the file, not in the registry
    refused: tuple[RefusedBase, ...] = ()


def plan(models: Sequence[ModelArgs], catalog: Catalog, cluster_has_gpu: bool) -> Plan:
    """Plans an application per base version. `models`: the file's."""
    models = resolved(models, catalog)
    specs: dict[str, BaseSpec] = {}
    missing: list[str] = []
    sources: list[tuple[ModelArgs, BaseSource]] = [(model, "file") for model in models]
    added, refused = _settings(catalog, file_names(models))
    sources += [(model, "registry") for model in added]
    for model, source in sources:
        try:
            base = catalog.resolve_base(model.name)
        except (NotFoundError, InvalidNameError) as error:
            if source == "file":
                missing.append(model.name)
            else:
                refused.append(RefusedBase(model.name, str(error)))
            continue
        if (other := specs.get(base.digest)) is not None:
            if source == "registry":
                why = f"its files are the same as those of {other.base.name!r}, which is served"
                refused.append(RefusedBase(model.name, why))
            else:
                logger.error(
                    "models: %s is ignored: its files are those of %s, which is served",
                    *(model.name, base.name),
                )
            continue
        device = model.engine.device
        if device == "auto":
            device = "cuda" if cluster_has_gpu else "cpu"
        specs[base.digest] = BaseSpec(
            base, model, device, app_name(base.name, base.digest, model, device), source
        )
    return Plan(tuple(specs.values()), tuple(missing), tuple(refused))


def with_aliases(catalog: Catalog, everywhere: str, models: Sequence[ModelArgs]) -> Catalog:
    """Returns the catalog with the aliases of bare names on a server with these models of its file.

    `everywhere`: the alias of the bases without one of their own. If a base has several, its first
    alias counts.
    """
    models = resolved(models, catalog)
    own: dict[str, str] = {}
    for model in (*models, *_settings(catalog, file_names(models))[0]):
        if model.alias is not None:
            own.setdefault(base_name(model), model.alias)
    aliases = DefaultAliases(everywhere, tuple(sorted(own.items())))
    return replace(catalog, default_aliases=aliases)


def resolved(models: Sequence[ModelArgs], catalog: Catalog) -> list[ModelArgs]:
    """The models with ORGANISATION/NAME replaced by the registered name, so that both denote the
    same base. An id that no base has is left as it is."""
    found = []
    for model in models:
        try:
            name = catalog.registered(model.name)
        except NotFoundError:
            name = model.name
        found.append(model if name == model.name else model.model_copy(update={"name": name}))
    return found


def parse_setting(name: str, text: str) -> ModelArgs:
    """Parses the JSON of the setting `serve`. Any client that may tag a model can write it: for
    every invalid text it raises ValueError with the reason, and it never imports anything."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    if "name" in fields:
        raise ValueError("name: cannot be set, it is the registered model's")
    try:
        model = ModelArgs.model_validate({**fields, "name": name})
    except ValidationError as error:
        raise ValueError(in_words(error, schema=ModelArgs)[:_MAX_REASON_CHARS]) from None
    except UnicodeEncodeError:
        raise ValueError("a string contains half of a surrogate pair") from None
    except Exception as error:  # a bug here must not affect other models
        logger.exception("checking the setting %r of %s failed", SERVE, name)
        raise ValueError(f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]) from None
    check_added(model)
    return model


def check_added(model: ModelArgs) -> None:
    """Raises ValueError for values that only the configuration file may set."""
    if model.router.policy not in POLICIES:
        raise ValueError(
            f"router.policy: {model.router.policy[:100]!r} is none of {', '.join(POLICIES)}; "
            "only the configuration file may name another class"
        )
    scaling = model.autoscaling
    most = model.replicas if scaling is None else scaling.max_replicas
    if most > _MAX_ADDED_REPLICAS:
        raise ValueError(
            f"replicas: {most} are more than {_MAX_ADDED_REPLICAS}, the limit for a base that the "
            "configuration file does not name"
        )


class LastGood:
    """Completes plans by bases that were served before and were not removed on purpose.

    A setting that becomes wrong leaves its base as it was. A base that vanished from the registry
    stays served for `MISSING_S`. A base that is removed from the file or whose setting is removed
    leaves at once, as does a base that is replaced.
    """

    def __init__(self) -> None:
        self._specs: dict[str, BaseSpec] = {}  # by the model's name, including its suffix
        self._missing_since_s: dict[str, float] = {}
        self._by_id: dict[str, ModelArgs] = {}  # by the file's ORGANISATION/NAME, as last resolved

    def complete(
        self, wanted: Plan, models: Sequence[ModelArgs], catalog: Catalog, now_s: float
    ) -> Plan:
        for spec in wanted.specs:
            self._specs[spec.model.name] = spec
            self._missing_since_s.pop(spec.model.name, None)
        served = {spec.base.digest for spec in wanted.specs}
        refused = {base.name for base in wanted.refused}
        registered = {base.name for base in catalog.bases}
        models = self._resolved(models, catalog)
        in_file = file_names(models)
        wanted_names = {model.name for model in models} | {
            one.name for one in catalog.settings if one.key == SERVE and one.name not in in_file
        }
        kept = []
        for name, spec in tuple(self._specs.items()):
            if spec in wanted.specs:
                continue
            is_registered = spec.base.name in registered
            is_replaced = spec.base.digest in served or (
                spec.base.name in in_file and name not in wanted_names
            )
            since_s = self._missing_since_s.setdefault(name, now_s)
            is_refused = is_registered and name in refused
            is_over = now_s - since_s > MISSING_S and not is_refused
            if is_replaced or is_over or (is_registered and name not in wanted_names):
                del self._specs[name], self._missing_since_s[name]
                continue
            kept.append(spec)
        names = {spec.model.name for spec in kept}
        return replace(
            wanted,
            specs=(*wanted.specs, *kept),
            missing=tuple(name for name in wanted.missing if self._name_of(name) not in names),
        )

    def _resolved(self, models: Sequence[ModelArgs], catalog: Catalog) -> list[ModelArgs]:
        """The models by registered names; an id that vanished keeps the name that it had."""
        found = []
        for model, current in zip(models, resolved(models, catalog), strict=True):
            if current.name != model.name:
                self._by_id[model.name] = current
            found.append(self._by_id.get(model.name, current))
        return found

    def _name_of(self, name: str) -> str:
        known = self._by_id.get(name)
        return name if known is None else known.name


def file_names(models: Sequence[ModelArgs]) -> set[str]:
    """The registered names, without alias or version. `models`: as `resolved` returns them."""
    names = set()
    for model in models:
        try:
            names.add(parse_reference(model.name).name)
        except InvalidNameError:
            continue
    return names


def app_name(name: str, digest: str, model: ModelArgs, device: str) -> str:
    """The application's name; it differs if the content or the settings differ."""
    text = model.model_dump_json(exclude=set(FRONT_SETTINGS)) + device
    settings = hashlib.sha256(text.encode()).hexdigest()
    return f"{APP_PREFIX}{_in_app_name(name)}--{digest[:12]}-{settings[:8]}"


def is_application_of(app: str, name: str, digest: str) -> bool:
    """True for applications of this base version with any settings."""
    return app.startswith(f"{APP_PREFIX}{_in_app_name(name)}--{digest[:12]}-")


def is_application_of_name(app: str, name: str) -> bool:
    """True for applications of any version of this base with any settings."""
    return app.startswith(f"{APP_PREFIX}{_in_app_name(name)}--")


def is_application_of_any(app: str, plan: Plan) -> bool:
    """True for applications of a configured base of which the plan contains no version."""
    names = [name.partition("@")[0] for name in plan.missing]
    names += [base.name for base in plan.refused]
    return any(is_application_of_name(app, name) for name in names)


def _settings(catalog: Catalog, in_file: set[str]) -> tuple[list[ModelArgs], list[RefusedBase]]:
    added: list[ModelArgs] = []
    refused: list[RefusedBase] = []
    for setting in catalog.settings:
        if setting.key != SERVE or setting.name in in_file:
            continue
        found = _parsed(setting.name, setting.value)
        if isinstance(found, RefusedBase):
            refused.append(found)
        else:
            added.append(found)
    return added, refused


@lru_cache(maxsize=4096)
def _parsed(name: str, text: str) -> ModelArgs | RefusedBase:
    """Cached: each round of the manager parses all settings."""
    try:
        return parse_setting(name, text)
    except ValueError as error:
        reason = "".join(char if char.isprintable() else "?" for char in str(error))
        return RefusedBase(name, f"its setting {SERVE!r} is wrong: {reason}")


def _in_app_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)
