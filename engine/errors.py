"""Errors of the engine, all safe to pickle (args go to `super().__init__`).

EngineError
|- InvalidRequestError      the request can never be served: HTTP 400, `param` names the field
|  `- ContextLengthError    prompt longer than the model's context or than all KV
|- UnknownAdapterError      the request names a digest that is not loaded
|- AdapterInUseError        an adapter cannot be taken out of memory now, with the reason
|- UnsupportedModelError    a base folder that we refuse, with the reason
|- ParityError              an adapter cannot be compared with PEFT here, with the reason
|- EngineMemoryError        the device is too small for the configuration, with the sum by line
`- EngineDeadError          the step loop ended; no more output will come
"""

from __future__ import annotations

from lora.errors import AdapterError, HostMemoryError

# The beginnings of a TokenOutput's errors for which the request's grammar is the cause; the reason
# follows.
REFUSED_GRAMMAR = "the grammar cannot be compiled: "
EXCEEDED_GRAMMAR = "the answer so far takes the grammar beyond a limit: "
ENDLESS_GRAMMAR = "the answer so far begins no text of the grammar: "
GRAMMAR_ERRORS = (REFUSED_GRAMMAR, EXCEEDED_GRAMMAR, ENDLESS_GRAMMAR)


class EngineError(Exception):
    pass


class InvalidRequestError(EngineError):
    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class ContextLengthError(InvalidRequestError):
    pass


class UnknownAdapterError(EngineError):
    pass


class AdapterInUseError(EngineError):
    pass


class UnsupportedModelError(EngineError):
    pass


class ParityError(EngineError):
    pass


class EngineMemoryError(EngineError):
    pass


class EngineDeadError(EngineError):
    pass


# The errors that refuse an adapter: bad files, or too little room for good files.
REFUSALS: tuple[type[Exception], ...] = (UnsupportedModelError, AdapterError)
NO_ROOM: tuple[type[Exception], ...] = (HostMemoryError,)  # now; room returns as requests end
