"""The calls into MLflow: maps its exceptions to registry errors, sets its timeouts, retries locks.

MLflow's HTTP settings are environment variables of the process, so the last `configure` wins.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import requests
from mlflow.environment_variables import (
    MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR,
    MLFLOW_HTTP_REQUEST_BACKOFF_JITTER,
    MLFLOW_HTTP_REQUEST_MAX_RETRIES,
    MLFLOW_HTTP_REQUEST_TIMEOUT,
    MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER,
)
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils as mlflow_databases
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from registry.errors import (
    CacheFullError,
    NoAnswerError,
    NotFoundError,
    RegistryError,
    RegistryUnavailableError,
)
from registry.files import NO_SPACE

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Error codes of a bad request. Everything else (timeouts, refused connections, 5xx, broken JSON)
# means that the registry is unavailable.
_BAD_REQUEST = frozenset(
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
_PASSWORD = re.compile(r"(?<=://)([^\s/:@]*):[^\s/@]*@")  # of a URI in a text, with its user
# The drivers that pass a URI's parameters to libpq.
_LIBPQ_SCHEMES = frozenset({"postgresql", "postgresql+psycopg2", "postgresql+psycopg"})
_STATEMENT_TIMEOUTS = 3  # a listing of many thousand versions lasts seconds
_OPEN_TRIES = 4  # attempts to open a database, 1.1 s in all; MLflow's 10 would sleep for 100 s
# MLflow has SQLite wait 20 s for a lock; a lost upgrade fails at once and is tried again.
_WRITE_TRIES = 6
_TRIES_END_S = 10.0  # no try begins later
# The messages of a write that lost against the same write of another process: MLflow sets an alias
# or a tag by looking for it and then inserting it.
_LOST_WRITES = (
    "database is locked",
    "UNIQUE constraint failed",
    "duplicate key value violates unique constraint",
)
_logged: set[tuple[type[Exception], str, int]] = set()


def configure(timeout_s: int, max_retries: int) -> None:
    """Sets MLflow's HTTP limits: its default of 7 tries of 120 s would hang a poller for minutes,
    and a response's `Retry-After` for up to six hours."""
    settings = {
        MLFLOW_HTTP_REQUEST_TIMEOUT.name: timeout_s,
        MLFLOW_HTTP_REQUEST_MAX_RETRIES.name: max_retries,
        MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR.name: 1,
        MLFLOW_HTTP_REQUEST_BACKOFF_JITTER.name: 0.5,
        MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER.name: "false",
    }
    os.environ.update({name: str(value) for name, value in settings.items()})
    mlflow_databases.MAX_RETRY_COUNT = _OPEN_TRIES
    # Creating a database would log each of its migrations.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)


def with_time_limits(tracking_uri: str, timeout_s: int) -> str:
    """Returns a PostgreSQL URI with limits that end a hanging call: neither libpq nor the server
    has a limit of its own. Other URIs, and parameters that the user has set, stay as they are.

    Connecting ends after `timeout_s`, a connection whose far end is gone after twice `timeout_s`,
    and a statement after `_STATEMENT_TIMEOUTS` times `timeout_s`.
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
    """Runs an MLflow call; retries it a few times if the write of another process came first."""
    began_s = time.monotonic()
    handled = sys.exception()  # by the caller, such as the failure that an undo follows
    for attempt in range(_WRITE_TRIES):
        try:
            return function()
        except MlflowException as error:
            has_lost = error.error_code != "RESOURCE_ALREADY_EXISTS" and any(
                words in str(error) for words in _LOST_WRITES
            )
            is_over = time.monotonic() - began_s > _TRIES_END_S or attempt == _WRITE_TRIES - 1
            if not has_lost or is_over:
                raise _translated(action, error, handled) from error
        except SQLAlchemyError as error:  # MLflow does not wrap them when it opens a store
            raise RegistryUnavailableError(f"{action}: {_first_line(error)}") from error
        except OSError as error:  # requests' exceptions are OSErrors too
            if (why := _no_answer(error, handled)) is not None:
                raise NoAnswerError(f"{action}: no answer ({why})") from error
            is_full = error.errno in NO_SPACE
            kind = CacheFullError if is_full else RegistryUnavailableError
            raise kind(f"{action}: {error}") from error
        except ImportError as error:  # SQLAlchemy's default driver of a database is not installed
            raise RegistryError(
                f"{action}: {error}; install it, or name an installed driver in the URI, "
                "as in postgresql+psycopg2://"
            ) from error
        except RegistryError:
            raise
        # MLflow wraps few errors: a body that is not JSON, JSON of another shape (protobuf's
        # ParseError), a database of a newer release (alembic's CommandError).
        except Exception as error:
            _log_once(action, error)
            words = f"{type(error).__name__}: {_without_password(str(error))}"
            raise RegistryUnavailableError(f"{action}: {words}") from error
        time.sleep(0.05 * 2**attempt * (1 + random.random()))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _translated(
    action: str, error: MlflowException, handled: BaseException | None
) -> RegistryError:
    if (why := _no_answer(error, handled)) is not None:
        return NoAnswerError(f"{action}: no answer ({why})")
    text = f"{action}: {_first_line(error)}"
    if error.error_code == "RESOURCE_DOES_NOT_EXIST":
        return NotFoundError(text)
    if error.error_code in _BAD_REQUEST:
        return RegistryError(text)
    return RegistryUnavailableError(text)


def _first_line(error: Exception) -> str:
    """Returns the first line of an error of MLflow's, which names the URI, without a password."""
    return _without_password(str(error).splitlines()[0])


def _without_password(text: str) -> str:
    return _PASSWORD.sub(r"\1@", text)[:500]


def _log_once(action: str, error: Exception) -> None:
    """Logs an error that may be a bug with its traceback, once for each place that raises it."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    place = type(error), frame.f_code.co_filename, line
    if place not in _logged:
        _logged.add(place)
        logger.info("%s: an error that MLflow does not name", action, exc_info=error)


def _no_answer(error: BaseException | None, handled: BaseException | None) -> str | None:
    """Returns why a request got no answer, without urllib3's retries and objects around it; None
    if it got one. `handled`: an earlier error, which Python names as the context of every error in
    its handlers."""
    is_unanswered, reason = False, "the connection was closed"
    while error is not None and error is not handled:
        is_unanswered |= isinstance(error, requests.ConnectionError | requests.Timeout)
        if isinstance(error, requests.Timeout | TimeoutError):
            reason = "timed out"
        reason = getattr(error, "strerror", None) or reason
        inner = getattr(error.args[0], "reason", None) if error.args else None
        error = inner if isinstance(inner, Exception) else error.__cause__ or error.__context__
    return reason if is_unanswered else None
