"""The environment variables of the server and its commands. Only this module and `home` read them.

LORAPLEX_HOME (default ~/.loraplex) holds the embedded registry and the cache. The registry is
`registry.tracking_uri`, otherwise MLFLOW_TRACKING_URI, otherwise SQLite in the home. A database
other than SQLite needs `registry.artifact_root` or LORAPLEX_ARTIFACT_ROOT.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from registry.sources import check_listed
from registry.sqlite_uri import sqlite_uri
from serve_app.config.platform import IngressArgs, RegistryArgs
from serve_app.config.tenancy import TenancyArgs
from serve_app.home import ADMIN_TOKEN, default_home

TRACKING_URI = "MLFLOW_TRACKING_URI"  # MLflow's own variable
ARTIFACT_ROOT = "LORAPLEX_ARTIFACT_ROOT"  # for commands that read no file
ARTIFACT_SCHEMES = "LORAPLEX_ARTIFACT_SCHEMES"  # for commands that read no file
WEBHOOK_SECRET = "LORAPLEX_WEBHOOK_SECRET"
FRONT_LIMITS = "LORAPLEX_FRONT_LIMITS"  # brings args.ingress to Serve's proxies
KEY_PEPPER = "LORAPLEX_KEY_PEPPER"
DATABASE_URL = "LORAPLEX_DATABASE_URL"
LOG_FORMAT = "LORAPLEX_LOG_FORMAT"


def tracking_uri(args: RegistryArgs) -> str:
    """Returns the registry's URI: the file's, MLflow's variable or the embedded SQLite."""
    configured = args.tracking_uri or os.environ.get(TRACKING_URI)
    return configured or embedded_uri()


def embedded_uri() -> str:
    """Returns the URI of the SQLite registry in the home."""
    return sqlite_uri(default_home() / "mlflow.db")


def artifact_root(args: RegistryArgs) -> Path | None:
    """Returns the folder of a database's files; SQLite and an MLflow server have their own."""
    configured = args.artifact_root or os.environ.get(ARTIFACT_ROOT)
    return Path(configured).expanduser() if configured else None


def artifact_schemes(args: RegistryArgs) -> tuple[str, ...]:
    """Returns the file's artifact schemes, otherwise those of LORAPLEX_ARTIFACT_SCHEMES.

    Raises ValueError, which names the variable, if an entry is not a scheme.
    """
    if args.artifact_schemes:
        return args.artifact_schemes
    entries = (entry.strip() for entry in os.environ.get(ARTIFACT_SCHEMES, "").split(","))
    try:
        return tuple(check_listed(entry) for entry in entries if entry)
    except ValueError as error:
        raise ValueError(f"{ARTIFACT_SCHEMES}: {error}") from error


def environment_with(uri: str, root: Path | None, schemes: Iterable[str]) -> dict[str, str]:
    """Returns this process's environment for a command that uses the same registry and stores.

    The URI travels in the environment because it may hold a password, and every user of the machine
    can read arguments. The server's own secrets are left out.
    """
    own = {ADMIN_TOKEN, WEBHOOK_SECRET, KEY_PEPPER, DATABASE_URL}
    given = {name: value for name, value in os.environ.items() if name not in own}
    if root is not None:
        given[ARTIFACT_ROOT] = str(root)
    return {**given, TRACKING_URI: uri, ARTIFACT_SCHEMES: ",".join(schemes)}


def secret(name: str) -> str | None:
    """Returns the value of a variable, None if it is unset or empty."""
    return os.environ.get(name) or None


def database_url(args: TenancyArgs) -> str:
    """Returns the URL of the keys' database: the file's, the variable or SQLite in the home."""
    configured = args.database_url or os.environ.get(DATABASE_URL)
    return configured or sqlite_uri(default_home() / "loraplex.db")


def front_limits() -> IngressArgs:
    """Returns the ingress settings that `loraplex serve` read from the file, or the defaults.

    For the proxy process, which Serve starts before the application and without its arguments.
    """
    given = os.environ.get(FRONT_LIMITS)
    return IngressArgs() if given is None else IngressArgs.model_validate_json(given)


def log_format() -> str:
    """Returns `text` or `json`, the form of the log; `loraplex serve --log-format` sets it."""
    value = os.environ.get(LOG_FORMAT) or "text"
    if value not in ("text", "json"):
        raise ValueError(f"{LOG_FORMAT} is {value!r}; set it to text or json")
    return value


def cache_folder() -> Path:
    return default_home() / "cache"
