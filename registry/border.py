"""The border to MLflow: its exceptions become ours, its global settings are set, locks are retried.

MLflow's HTTP settings are environment variables of the process, so the last `configure` wins.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mlflow.environment_variables import (
    MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR,
    MLFLOW_HTTP_REQUEST_BACKOFF_JITTER,
    MLFLOW_HTTP_REQUEST_MAX_RETRIES,
    MLFLOW_HTTP_REQUEST_TIMEOUT,
)
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils as mlflow_databases
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from registry.errors import CacheFullError, NotFoundError, RegistryError, RegistryUnavailableError
from registry.files import NO_SPACE

T = TypeVar("T")

# Anything else (timeouts, refused connections, 5xx, broken JSON) is the registry's trouble.
_OUR_FAULT = frozenset(
    {
        "BAD_REQUEST",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "PERMISSION_DENIED",
        "RESOURCE_ALREADY_EXISTS",
        "UNAUTHENTICATED",
        "CUSTOMER_UNAUTHORIZED",
    }
)
# The drivers that hand a URI's parameters to libpq.
_LIBPQ_SCHEMES = frozenset({"postgresql", "postgresql+psycopg2", "postgresql+psycopg"})
_STATEMENT_TIMEOUTS = 3  # a listing of many thousand versions takes seconds
_OPEN_TRIES = 4  # of a database, 1.1 s together; MLflow's 10 would sleep for 100 s
_LOCKED_TRIES = (
    6  # SQLite itself waits 5 s for a lock; a lost upgrade fails at once and is tried again
)


def configure(timeout_s: int, max_retries: int) -> None:
    """MLflow's own 120 s times 7 tries would hang a poller for minutes."""
    settings = {
        MLFLOW_HTTP_REQUEST_TIMEOUT.name: timeout_s,
        MLFLOW_HTTP_REQUEST_MAX_RETRIES.name: max_retries,
        MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR.name: 1,
        MLFLOW_HTTP_REQUEST_BACKOFF_JITTER.name: 0.5,
    }
    os.environ.update({name: str(value) for name, value in settings.items()})
    mlflow_databases.MAX_RETRY_COUNT = _OPEN_TRIES
    # Creating a database would tell of each of its migrations.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)


def with_time_limits(tracking_uri: str, timeout_s: int) -> str:
    """A PostgreSQL URI with what libpq and the server need to end a call that hangs: neither has
    a limit of its own. Other URIs stay as they are, and so does what the user has set.

    Connecting ends after `timeout_s`, a connection whose far end is gone after twice that, and a
    statement after `_STATEMENT_TIMEOUTS` times that.
    """
    if tracking_uri.partition(":")[0] not in _LIBPQ_SCHEMES:
        return tracking_uri
    limits = {
        "connect_timeout": str(timeout_s),
        "keepalives_idle": str(timeout_s),
        "keepalives_interval": str(max(1, timeout_s // 3)),
        "keepalives_count": "3",
        "tcp_user_timeout": str(2000 * timeout_s),  # ms
    }
    if "PGOPTIONS" not in os.environ:
        limits["options"] = f"-c statement_timeout={1000 * _STATEMENT_TIMEOUTS * timeout_s}"
    url = make_url(tracking_uri)
    missing = {key: value for key, value in limits.items() if key not in url.query}
    return url.update_query_dict(missing).render_as_string(hide_password=False)


def call(action: str, function: Callable[[], T]) -> T:
    """Runs one MLflow call; tries again, not for ever, while another process locks SQLite."""
    for attempt in range(_LOCKED_TRIES):
        try:
            return function()
        except MlflowException as error:
            if "database is locked" not in str(error) or attempt == _LOCKED_TRIES - 1:
                raise _translated(action, error) from error
        except SQLAlchemyError as error:  # from where MLflow does not wrap them: opening a store
            text = str(error).splitlines()[0][:500]
            raise RegistryUnavailableError(f"{action}: {text}") from error
        except OSError as error:  # requests' exceptions are OSErrors too
            raise _translated_os(action, error) from error
        except ImportError as error:  # SQLAlchemy's default driver of a database is not installed
            raise RegistryError(
                f"{action}: {error}; install it, or name the driver that you have in the URI, "
                "as postgresql+psycopg2:// does"
            ) from error
        except ValueError as error:  # a body that is no JSON, or JSON of another shape
            raise RegistryUnavailableError(f"{action}: unreadable answer: {error}") from error
        time.sleep(0.05 * 2**attempt * (1 + random.random()))
    raise AssertionError("unreachable: the last attempt returns or raises")


@contextmanager
def suppressed(action: str, logger: logging.Logger) -> Iterator[None]:
    """For undoing: a second failure must not hide the first."""
    try:
        yield
    except RegistryError as error:
        logger.warning("%s failed: %s", action, error)


def _translated(action: str, error: MlflowException) -> RegistryError:
    text = f"{action}: {str(error).splitlines()[0][:500]}"
    if error.error_code == "RESOURCE_DOES_NOT_EXIST":
        return NotFoundError(text)
    if error.error_code in _OUR_FAULT:
        return RegistryError(text)
    return RegistryUnavailableError(text)


def _translated_os(action: str, error: OSError) -> RegistryError:
    if error.errno in NO_SPACE:
        return CacheFullError(f"{action}: {error}")
    return RegistryUnavailableError(f"{action}: {error}")
