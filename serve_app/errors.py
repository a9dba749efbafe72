"""Errors as the client sees them: OpenAI's error body, and the one table from domain to status.

ApiError               an answer: status, message, type, param, code
ClientGoneError        the client closed the connection, and nobody reads an answer: 499
OverloadedError        too many requests wait: 429 with Retry-After
ConflictError          the server's state forbids what was asked: 409
ServiceUnavailableError  nothing can answer now: 503 with Retry-After
`- UnservableError      nothing will answer until an operator changes something: 503
EngineFailureError     the engine gave a choice up; its words are for the log: 500
`- NonFiniteError      because the model gave NaN or infinity
NoMemoryError          the engine has no memory for a step of this request: 503
AdapterUnsupportedError  the engine refuses the adapter's files, with the reason: 422
EngineGoneError        an EngineDeadError that says which engine replica it was: 503
RequestQuarantinedError  the engine died under this request, twice: 422, which SDKs do not retry

What is not in the table is our own fault: 500 with a constant message; the log has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from engine.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    UnknownAdapterError,
)
from registry.errors import (
    ArtifactError,
    CacheFullError,
    DigestMismatchError,
    InvalidNameError,
    NotFoundError,
    QuarantinedError,
    RegistrationError,
    RegistryUnavailableError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
MAX_VALUE_CHARS = 64
# OpenAI's clients obey this header: whether the same request may succeed if it is sent again.
SHOULD_RETRY = "x-should-retry"
_RETRYABLE = frozenset({408, 429, 503})
_CLOSING = frozenset({408, 431})  # the rest of the request may still come, and is not wanted


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
        """`should_retry`: None leaves it to the status (see `should_retry`)."""
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
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def headers(self) -> dict[str, str]:
        headers = {SHOULD_RETRY: "true" if self.should_retry else "false"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status in _CLOSING:
            headers["Connection"] = "close"
        return headers


def should_retry_of(status: int) -> bool:
    """Whether an error of this status passes by waiting; a refusal or a failure of the model does
    not."""
    return status in _RETRYABLE


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
        super().__init__("The engine has no memory for this request at the moment.")


class AdapterUnsupportedError(Exception):
    pass


class ConflictError(Exception):
    pass


class EngineGoneError(EngineDeadError):
    def __init__(self, message: str, engine_id: str, was_dead: bool = False) -> None:
        """`was_dead`: before the request came, so that it cannot have been the cause."""
        super().__init__(message, engine_id, was_dead)
        self.message = message
        self.engine_id = engine_id
        self.was_dead = was_dead

    def __str__(self) -> str:
        return self.message


class RequestQuarantinedError(Exception):
    def __init__(self) -> None:
        super().__init__("The engine failed on this request more than once; it is not tried again.")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    code: str
    type: str = INVALID_REQUEST
    param: str | None = None
    retry_after_s: int | None = None
    message: str | None = None  # None: the exception's own words
    should_retry: bool | None = None  # None: by the status


# The nearest class in the exception's own order counts, so a subclass may have its own line.
_TABLE: Mapping[type[BaseException], _Answer] = {
    InvalidRequestError: _Answer(400, "invalid_value"),
    ContextLengthError: _Answer(400, "context_length_exceeded"),
    InvalidNameError: _Answer(400, "invalid_model_name", param="model"),
    RegistrationError: _Answer(400, "registration_refused"),
    NotFoundError: _Answer(404, "model_not_found", param="model"),
    ConflictError: _Answer(409, "conflict"),
    RequestQuarantinedError: _Answer(422, "request_quarantined"),
    AdapterUnsupportedError: _Answer(422, "adapter_unsupported", param="model"),
    OverloadedError: _Answer(429, "overloaded", "rate_limit_error"),
    ServiceUnavailableError: _Answer(503, "unavailable", SERVER_ERROR),
    UnservableError: _Answer(503, "unavailable", SERVER_ERROR, should_retry=False),
    RegistryUnavailableError: _Answer(
        503, "registry_unavailable", SERVER_ERROR, None, 5, "The model registry cannot be reached."
    ),
    # Loaded when the request was routed, gone when it arrived: the next try loads it again.
    UnknownAdapterError: _Answer(
        503, "adapter_not_loaded", SERVER_ERROR, None, 1, "The adapter is being reloaded."
    ),
    EngineDeadError: _Answer(
        503, "engine_unavailable", SERVER_ERROR, None, 1, "The engine of this model stopped."
    ),
    NoMemoryError: _Answer(503, "engine_out_of_memory", SERVER_ERROR, None, 1),
    CacheFullError: _Answer(
        503, "cache_full", SERVER_ERROR, None, 30, "No space is left for the model's files."
    ),
    DigestMismatchError: _Answer(
        503,
        "digest_mismatch",
        SERVER_ERROR,
        "model",
        None,
        "The model's files were altered.",
        False,
    ),
    ArtifactError: _Answer(
        503,
        "bad_artifact",
        SERVER_ERROR,
        "model",
        None,
        "The model's files cannot be taken.",
        False,
    ),
    QuarantinedError: _Answer(503, "quarantined", SERVER_ERROR, "model", should_retry=False),
}


def to_api_error(error: BaseException) -> ApiError:
    """The answer to any exception. Words of unknown exceptions never reach the client."""
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        answer = _TABLE.get(kind)
        if answer is not None:
            break
    else:
        return ApiError(500, "The server failed on this request.", SERVER_ERROR, None, "internal")
    param = error.param if isinstance(error, InvalidRequestError) else answer.param
    retry_after_s = answer.retry_after_s
    if isinstance(error, (OverloadedError, QuarantinedError)):
        retry_after_s = error.retry_after_s
    message = answer.message or str(error)
    return ApiError(
        answer.status,
        message,
        answer.type,
        param,
        answer.code,
        retry_after_s,
        answer.should_retry,
    )


def shown(value: object) -> str:
    """A client's value for a message: short whatever it is, one line, printable."""
    if isinstance(value, list):
        return f"a list of {len(value)}"  # not its items: they may be deep, or many
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    text = ascii(value[: MAX_VALUE_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
