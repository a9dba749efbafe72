"""Registration as every caller does it: the engine room judges the files, then the registry keeps
them. What is refused leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from engine.refusals import REFUSALS
from engine.validation import check_adapter, check_base
from registry.cache import Cache
from registry.catalog import DEFAULT_ALIAS
from registry.client import Registry
from registry.entities import AdapterFacts, AdapterVersion, BaseFacts, BaseVersion
from registry.errors import NotFoundError, RegistrationError
from registry.manifest import Progress, no_progress
from registry.names import check_alias, check_name
from serve_app.text import BaseText

V = TypeVar("V", BaseVersion, AdapterVersion)


@dataclass(frozen=True, slots=True)
class Registered(Generic[V]):
    version: V
    warnings: tuple[str, ...]  # what a user should know, in words


def register_base(
    registry: Registry,
    folder: Path,
    name: str,
    *,
    alias: str | None = DEFAULT_ALIAS,
    link: bool = False,
    progress: Progress = no_progress,
) -> Registered[BaseVersion]:
    """`link`: a local store takes the files by hardlink; the folder must never change again."""
    _check_request(folder, "config.json", name, alias)
    with _refused(f"base model {name!r}"):
        BaseText.from_folder(folder)  # tokenizer and template, as a front will open them
        report = check_base(folder)
    facts = BaseFacts(report.architecture, report.num_parameters, report.max_model_len)
    version = registry.register_base(
        folder, name, facts=facts, alias=alias, link=link, progress=progress
    )
    return Registered(version, report.warnings)


def register_adapter(
    registry: Registry,
    folder: Path,
    name: str,
    base: str,
    *,
    cache: Cache,
    alias: str | None = DEFAULT_ALIAS,
    progress: Progress = no_progress,
) -> Registered[AdapterVersion]:
    """`base`: `name`, `name@alias` or `name@version`; its files come through the cache."""
    _check_request(folder, "adapter_config.json", name, alias)
    try:
        found = registry.snapshot().resolve_base(base)
    except NotFoundError as error:
        raise RegistrationError(
            f"adapter {name!r}: {error}; register the base first: loraplex register base"
        ) from error
    base_folder = registry.fetch(found, cache, progress=progress)
    with _refused(f"adapter {name!r} for base {found.name}@{found.version}"):
        report = check_adapter(folder, base_folder)
    facts = AdapterFacts(report.rank, report.targets, report.num_parameters, report.is_noop)
    # The version that was checked, whatever an alias says by now.
    pinned = f"{found.name}@{found.version}"
    version = registry.register_adapter(
        folder, name, base=pinned, facts=facts, alias=alias, progress=progress
    )
    return Registered(version, report.warnings)


def _check_request(folder: Path, required: str, name: str, alias: str | None) -> None:
    """What is cheap to refuse, before gigabytes are read."""
    check_name(name)
    if alias is not None:
        check_alias(alias)
    if not folder.is_dir():
        raise RegistrationError(f"{folder} is not a folder")
    if not (folder / required).is_file():
        raise RegistrationError(f"{folder} holds no {required}")


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except REFUSALS as error:
        raise RegistrationError(f"{what} is refused: {error}") from error
