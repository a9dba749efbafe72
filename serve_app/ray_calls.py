"""Calls from an ingress to the manager, and the errors of remote calls.

The manager returns refusals as values, and `ask_manager` raises them at the ingress: Serve would
log each exception of a replica as a failure with a traceback, and a wrong name in an operator's
order is no failure.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.errors import ServiceUnavailableError, to_api_error

RAY_ERRORS = (RayError, RayServeException)
Method = TypeVar("Method", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that a method returns instead of raising it."""

    error: Exception


def refusing(method: Method) -> Method:
    """Decorates a method for `ask_manager`: it returns exceptions of HTTP status below 500."""

    @functools.wraps(method)
    async def call(*arguments: Any) -> object:
        try:
            return await method(*arguments)
        except Exception as error:
            if to_api_error(error).status >= 500:
                raise
            return Refusal(error.with_traceback(None))

    return call  # type: ignore[return-value]


async def ask_manager(method: DeploymentHandle[object], *arguments: object) -> object:
    """Calls a method of the manager. Raises its exception, or ServiceUnavailableError if no manager
    answers."""
    try:
        answer: object = await method.remote(*arguments)
    except RAY_ERRORS as error:
        cause = root_cause(error)
        if isinstance(cause, RAY_ERRORS):
            raise ServiceUnavailableError("The manager does not answer.", 2) from error
        raise cause from None
    if isinstance(answer, Refusal):
        raise answer.error
    return answer


def root_cause(error: BaseException) -> BaseException:
    """Returns the exception that the remote method raised, without Ray's wrapping."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error
