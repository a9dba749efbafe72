"""Opens the registry and the cache for a command. In a file of its own: MLflow imports slowly."""

from __future__ import annotations

from registry.cache import Cache
from registry.catalog import Catalog
from registry.client import Registry
from registry.errors import NotFoundError, RegistryError
from registry.sqlite_database import missing_file
from serve_app import config
from serve_app.home import default_home, prepare


def open_registry(tracking_uri: str | None) -> Registry:
    """Opens the registry for a command that registers, which creates a missing SQLite file."""
    return open_configured(config.RegistryArgs(tracking_uri=tracking_uri))


def open_existing(args: config.RegistryArgs) -> Registry:
    """Opens the registry for a command that reads what is registered. Raises NotFoundError if the
    file of a SQLite registry is missing, which it does not create."""
    uri = _prepared_uri(args)
    if (file := missing_file(uri)) is not None:
        raise NotFoundError(
            f"the registry {uri} does not exist: there is no file {file}. `loraplex register base` "
            "creates it"
        )
    return _open(uri, args)


def read_catalog(args: config.RegistryArgs) -> Catalog:
    """Returns what is registered; the registry of a new home is empty. Raises NotFoundError as
    `open_existing` does."""
    try:
        registry = open_existing(args)
    except NotFoundError:
        if config.tracking_uri(args) != config.embedded_uri():
            raise
        return Catalog()
    return registry.snapshot()


def open_configured(args: config.RegistryArgs) -> Registry:
    return _open(_prepared_uri(args), args)


def _open(uri: str, args: config.RegistryArgs) -> Registry:
    try:
        schemes = config.artifact_schemes(args)
    except ValueError as error:
        raise RegistryError(str(error)) from error
    return Registry(
        uri,
        artifact_root=config.artifact_root(args),
        artifact_schemes=schemes,
        scratch=config.cache_folder() / "adoption",
    )


def _prepared_uri(args: config.RegistryArgs) -> str:
    """Raises HomeError if the registry is that of the home, and the home is unusable."""
    uri = config.tracking_uri(args)
    if uri == config.embedded_uri():
        prepare(default_home())
    return uri


def open_cache() -> Cache:
    """Opens the cache of verified files in the home. Raises HomeError if the home is unusable."""
    prepare(default_home())
    return Cache(config.cache_folder())
