"""Errors as the client sees them: OpenAI's error body, and the one table from exception to status.

ApiError                   a response: status, message, type, param, code
`- RateLimitError            a key has reached one of its limits: 429 with Retry-After
ClientGoneError            the client closed the connection and reads no response: 499
OverloadedError            too many requests wait: 429 with Retry-After
`- ServiceUnavailableError   the request cannot be served now: 503 with Retry-After
   `- UnservableError        it cannot be served until an operator changes something: 503
ConflictError              the state of the server forbids the operation: 409
EngineFailureError         the engine ended a choice early; its message is for the log: 500
`- NonFiniteError            because the model computed NaN or infinity
NoMemoryError              the engine has no memory for a step of this request: 503
AdapterUnsupportedError    the engine refuses the adapter's files, with the reason: 422
EngineGoneError            an EngineDeadError that names the engine replica: 503
RequestQuarantinedError    engines died twice under this request: 422, which SDKs do not retry

An exception that is not in the table is a bug: 500 with a constant message, and the details in the
log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil

import msgspec

from engine.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    UnknownAdapterError,
)
from registry.errors import (
    ArtifactError,
    CacheFailedError,
    CacheFullError,
    DigestMismatchError,
    InvalidNameError,
    NotFoundError,
    QuarantinedError,
    RefusedVersionError,
    RegistrationError,
    RegistryError,
    RegistryUnavailableError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
MAX_VALUE_CHARS = 64
# OpenAI's SDKs obey this header: it is true if the same request may succeed when sent again.
SHOULD_RETRY = "x-should-retry"
_RETRYABLE = frozenset({408, 429, 503})
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_CLOSING = frozenset({408, 431})  # the rest of the request may still arrive and is not read


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
    ) -> None:
        """`should_retry` None leaves the choice to the status, see `should_retry_of`."""
        super().__init__(status, message, type, param, code, retry_after_s, should_retry)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry_of(status) if should_retry is None else should_retry

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        names = ("message", "type", "param", "code")
        return msgspec.json.encode({"error": {name: getattr(self, name) for name in names}})

    def anthropic_body(self, request_id: str | None) -> bytes:
        """Returns the body in the shape of Anthropic's API. `request_id`: as in the header
        `request-id`."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "overloaded_error" if self.should_retry else "api_error"
        error = {"type": kind, "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def headers(self) -> dict[str, str]:
        headers = {SHOULD_RETRY: "true" if self.should_retry else "false"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status in _CLOSING:
            headers["Connection"] = "close"
        return headers


def should_retry_of(status: int) -> bool:
    """Returns True for the status of an error that may pass with time; refusals and failures of the
    model do not."""
    return status in _RETRYABLE


class RateLimitError(ApiError):
    """A key has reached one of its limits. `kind`: OpenAI's type of the error."""

    def __init__(self, message: str, kind: str, wait_s: float) -> None:
        is_quota = kind == "insufficient_quota"
        code = kind if is_quota else "rate_limit_exceeded"
        # A budget does not come back in the time that an SDK waits.
        super().__init__(
            429, message, kind, None, code, max(1, ceil(wait_s)), should_retry=not is_quota
        )
        self.args = message, kind, wait_s
        self.wait_s = wait_s

    def headers(self) -> dict[str, str]:
        return super().headers() | {"Retry-After-Ms": str(ceil(self.wait_s * 1000))}


class ClientGoneError(Exception):
    pass


class OverloadedError(Exception):
    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class ServiceUnavailableError(OverloadedError):
    pass


class UnservableError(ServiceUnavailableError):
    pass


class EngineFailureError(Exception):
    pass


class NonFiniteError(EngineFailureError):
    pass


class NoMemoryError(Exception):
    def __init__(self) -> None:
        super().__init__("The engine has no memory for this request at the moment; try again.")


class AdapterUnsupportedError(Exception):
    @classmethod
    def of(cls, name: str, version: int, why: object) -> AdapterUnsupportedError:
        return cls(f"The adapter {name!r} version {version} cannot be served: {why}")


class ConflictError(Exception):
    pass


class EngineGoneError(EngineDeadError):
    def __init__(self, message: str, engine_id: str, was_dead: bool = False) -> None:
        """`was_dead`: the engine died before the request arrived, which is thus not the cause."""
        super().__init__(message, engine_id, was_dead)
        self.message = message
        self.engine_id = engine_id
        self.was_dead = was_dead

    def __str__(self) -> str:
        return self.message


class RequestQuarantinedError(Exception):
    def __init__(self) -> None:
        super().__init__("The engine failed on this request more than once; it is not retried.")


@dataclass(frozen=True, slots=True)
class _ErrorRow:
    status: int
    code: str
    type: str = INVALID_REQUEST
    param: str | None = None
    retry_after_s: int | None = None
    message: str | None = None  # None: the exception's own message
    should_retry: bool | None = None  # None: decided by the status


_unavailable = partial(_ErrorRow, 503, type=SERVER_ERROR)
_bad_files = partial(_unavailable, param="model", should_retry=False)

# The first match in the exception's method resolution order counts, so a subclass may have a row.
_TABLE: Mapping[type[BaseException], _ErrorRow] = {
    InvalidRequestError: _ErrorRow(400, "invalid_value"),
    ContextLengthError: _ErrorRow(400, "context_length_exceeded"),
    InvalidNameError: _ErrorRow(400, "invalid_model_name", param="model"),
    RegistrationError: _ErrorRow(400, "registration_refused"),
    NotFoundError: _ErrorRow(404, "model_not_found", param="model"),
    RefusedVersionError: _ErrorRow(422, "adapter_unsupported", param="model"),
    ConflictError: _ErrorRow(409, "conflict"),
    RequestQuarantinedError: _ErrorRow(422, "request_quarantined"),
    AdapterUnsupportedError: _ErrorRow(422, "adapter_unsupported", param="model"),
    OverloadedError: _ErrorRow(429, "overloaded", "rate_limit_error"),
    ServiceUnavailableError: _unavailable("unavailable"),
    UnservableError: _unavailable("unavailable", should_retry=False),
    RegistryUnavailableError: _unavailable(
        "registry_unavailable", retry_after_s=5, message="The model registry is unreachable."
    ),
    # Such as credentials that have expired: an operator's fault, not this server's.
    RegistryError: _unavailable(
        "registry_unavailable",
        retry_after_s=30,
        message="The model registry refuses this server's request.",
    ),
    # Loaded when the request was routed, evicted when it arrived: a retry loads it again.
    UnknownAdapterError: _unavailable(
        "adapter_not_loaded", retry_after_s=1, message="The adapter is being reloaded."
    ),
    EngineDeadError: _unavailable(
        "engine_unavailable", retry_after_s=1, message="The engine of this model stopped."
    ),
    NoMemoryError: _unavailable("engine_out_of_memory", retry_after_s=1),
    CacheFullError: _unavailable(
        "cache_full",
        retry_after_s=30,
        message="The disk cache has no space for the model's files.",
    ),
    CacheFailedError: _unavailable(
        "cache_failed",
        retry_after_s=30,
        message="The disk cache of the model's files fails.",
    ),
    DigestMismatchError: _bad_files(
        "digest_mismatch", message="The model's files differ from their registered digest."
    ),
    ArtifactError: _bad_files(
        "bad_artifact", message="The model's files are invalid and cannot be loaded."
    ),
    QuarantinedError: _bad_files("quarantined"),
}


def to_api_error(error: BaseException) -> ApiError:
    """Returns the response to any exception. Messages of exceptions that are not in the table never
    reach the client."""
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        row = _TABLE.get(kind)
        if row is not None:
            break
    else:
        return ApiError(500, "The server failed on this request.", SERVER_ERROR, None, "internal")
    param = error.param if isinstance(error, InvalidRequestError) else row.param
    retry_after_s = row.retry_after_s
    if isinstance(error, (OverloadedError, QuarantinedError)):
        retry_after_s = error.retry_after_s
    message = row.message or str(error)
    return ApiError(row.status, message, row.type, param, row.code, retry_after_s, row.should_retry)


def shown(value: object) -> str:
    """Returns a client's value for an error message: always short, on one line, and printable."""
    if isinstance(value, list):
        return f"a list of {len(value)}"  # without its items, which may be nested or many
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    text = ascii(value[: MAX_VALUE_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
