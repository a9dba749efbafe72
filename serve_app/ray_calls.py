"""Calls from an ingress to the manager, calls apart from their HTTP request, and the errors of
remote calls.

The manager returns refusals as values, and `ask_manager` raises them at the ingress: Serve would
log each exception of a replica as a failure with a traceback, and a wrong name in an operator's
order is no failure.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.context import _get_serve_request_context, _set_request_context
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from serve_app.errors import ServiceUnavailableError, to_api_error
from serve_app.tasks import share

RAY_ERRORS = (RayError, RayServeException)
Method = TypeVar("Method", bound=Callable[..., Awaitable[object]])
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


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


def call_apart(
    call: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Answer:
    """Makes a handle's call as if outside the HTTP request that is being handled; only its id and
    route, for the logs, go with it. When the client leaves, Ray and Serve cancel every call that
    was made inside the request, often before the request itself learns that its client left. Serve
    also confuses the calls of one request with each other."""
    request, context = _get_serve_request_context(), Context()
    context.run(_set_request_context, request.route, request.request_id)
    return context.run(call, *args, **kwargs)


async def results_of(calls: DeploymentBroadcastResponse, timeout_s: float) -> list[Any]:
    """Returns the result of each replica: its error if it failed, TimeoutError if it is late.
    Serve's `results_async` raises TimeoutError for all when one is late."""
    async with asyncio.timeout(timeout_s):
        replicas = await calls._fetch_replica_results_async()
    answers = (_result_of(replica, timeout_s) for replica in replicas)
    return await asyncio.gather(*answers, return_exceptions=True)


async def first_result_of(calls: DeploymentBroadcastResponse, timeout_s: float) -> Any:
    """Returns the first result of a replica without waiting for the others. Raises the last error
    if all failed or were late."""
    async with asyncio.timeout(timeout_s):
        replicas = await calls._fetch_replica_results_async()
    answers = [share(_result_of(replica, timeout_s), "first-result") for replica in replicas]
    last: Exception | None = None
    try:
        for answer in asyncio.as_completed(answers):
            try:
                return await answer
            except Exception as error:
                last = error
    finally:
        for one in answers:
            one.cancel()
    assert last is not None, "Serve returns one replica at least"
    raise last


async def _result_of(replica: ReplicaResult, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await replica.get_async()  # type: ignore[no-untyped-call]
    except (TimeoutError, asyncio.CancelledError):
        # Otherwise it stays there, waiting for room or for the engine, and is counted by Serve.
        replica.cancel()  # type: ignore[no-untyped-call]
        raise


def root_cause(error: BaseException) -> BaseException:
    """Returns the exception that the remote method raised, without Ray's wrapping."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error
