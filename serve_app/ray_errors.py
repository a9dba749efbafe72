"""What an exception was before Ray wrapped it. Apart: whoever imports it imports Ray."""

from __future__ import annotations

from ray.exceptions import RayTaskError


def root_cause(error: BaseException) -> BaseException:
    """The exception that was raised at the far end, without Ray's wrapping and its tracebacks."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error
