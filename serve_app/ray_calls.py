"""An ingress calls the manager for an operator: its refusals come out as they were raised.

They travel as values. Serve logs whatever its replicas raise as a failure with a traceback, and a
wrong name in an order is none.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.errors import ServiceUnavailableError, to_api_error
from serve_app.messages import ENGINE

Method = TypeVar("Method", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that a method would have raised."""

    error: Exception


def refusing(method: Method) -> Method:
    """For a method that `ask_manager` calls: an exception whose answer is below 500 is returned."""

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
    """Raises what the method raised, or ServiceUnavailableError where no manager answers."""
    try:
        answer: object = await method.remote(*arguments)
    except (RayError, RayServeException) as error:
        cause = root_cause(error)
        if isinstance(cause, RayError | RayServeException):
            raise ServiceUnavailableError("The manager does not answer.", 2) from error
        raise cause from None
    if isinstance(answer, Refusal):
        raise answer.error
    return answer


def root_cause(error: BaseException) -> BaseException:
    """The exception that was raised at the far end, without Ray's wrapping and its tracebacks."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


_TIMEOUT_S = 5.0


class Broadcasts:
    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle[object]] = {}  # by application

    async def call(self, app_name: str, method: str, argument: object) -> int:
        """How many failed. Raises where there is no such application, or no answer in time."""
        if app_name not in self._handles:
            self._handles[app_name] = await asyncio.to_thread(
                serve.get_deployment_handle, ENGINE, app_name
            )
        results = (
            await self._handles[app_name]
            .broadcast(method, argument)
            .results_async(timeout_s=_TIMEOUT_S, return_exceptions=True)
        )
        return sum(isinstance(result, BaseException) for result in results)
