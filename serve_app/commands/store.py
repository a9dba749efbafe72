"""How a command opens the registry, and the option for it. Apart: MLflow loads slowly."""

from __future__ import annotations

from typing import Annotated

import typer

from registry.client import Registry
from registry.errors import RegistryError
from serve_app import config

Uri = Annotated[str | None, typer.Option("--tracking-uri", help="MLflow, instead of the default")]


def open_registry(tracking_uri: str | None) -> Registry:
    return open_configured(config.RegistryArgs(tracking_uri=tracking_uri))


def open_configured(args: config.RegistryArgs) -> Registry:
    try:
        schemes = config.artifact_schemes(args)
    except ValueError as error:
        raise RegistryError(str(error)) from error
    return Registry(
        config.tracking_uri(args),
        artifact_root=config.artifact_root(args),
        artifact_schemes=schemes,
        scratch=config.cache_folder() / "adoption",
    )
