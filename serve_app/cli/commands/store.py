"""Opens the registry and the cache for a command. In a file of its own: MLflow imports slowly."""

from __future__ import annotations

from registry.cache import Cache
from registry.client import Registry
from registry.errors import RegistryError
from serve_app import config
from serve_app.home import default_home, prepare


def open_registry(tracking_uri: str | None) -> Registry:
    return open_configured(config.RegistryArgs(tracking_uri=tracking_uri))


def open_configured(args: config.RegistryArgs) -> Registry:
    try:
        schemes = config.artifact_schemes(args)
    except ValueError as error:
        raise RegistryError(str(error)) from error
    uri = config.tracking_uri(args)
    if uri == config.embedded_uri():
        prepare(default_home())
    return Registry(
        uri,
        artifact_root=config.artifact_root(args),
        artifact_schemes=schemes,
        scratch=config.cache_folder() / "adoption",
    )


def open_cache() -> Cache:
    """Opens the cache of verified files in the home. Raises HomeError if the home is unusable."""
    prepare(default_home())
    return Cache(config.cache_folder())
