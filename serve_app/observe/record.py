"""The record of one request from its arrival to its end: names, times and counts, never its text.

Filled in by the stages of the request as they go, a few assignments each, and read once at the end.
Times are `time.time()`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from registry.catalog import Resolution
from serve_app.canary.arm_stats import outcome_of
from serve_app.errors import to_api_error
from serve_app.routing.decisions import Decision
from serve_app.routing.state import routing_state

_MAX_MODEL_CHARS = 128


@dataclass(frozen=True, slots=True)
class Move:
    """A migration: the request left its engine."""

    at_s: float
    reason: str


@dataclass(slots=True)
class RequestRecord:
    path: str  # the route's
    arrival_s: float
    request_id: str = ""  # as in the header x-request-id
    traceparent: str = ""
    tracestate: str = ""
    tenant: str = ""
    key_id: str = ""  # of the key that authenticated it; public
    model: str = ""  # the client's, cut
    is_stream: bool = False
    resolution: Resolution | None = None
    arm: str = ""
    response_id: str = ""
    call: tuple[str, str] | None = None  # application and call id of the first attempt
    decision: Decision | None = None  # of the first attempt; set with the first token
    queue_s: float = 0.0  # in the fair queue
    first_token_s: float = 0.0  # 0: none
    end_s: float = 0.0
    num_choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    has_text: bool = True
    is_complete: bool = False  # every choice has ended
    finish_reasons: tuple[str, ...] = ()  # of the choices, in the order of their ends
    moves: tuple[Move, ...] = ()
    # Kept until the end, which sets the three fields below from it: its traceback holds the body of
    # the request.
    error: BaseException | None = field(default=None, repr=False)
    outcome: str = ""  # one of `tally.OUTCOMES`
    status: int = 0  # the HTTP status; of a stream that failed later, that of its error event
    error_code: str = ""

    def set_body(self, model: str, *, is_stream: bool) -> None:
        self.model, self.is_stream = model[:_MAX_MODEL_CHARS], is_stream

    def note_first_token(self, now_s: float) -> None:
        self.first_token_s = now_s
        if self.call is not None:
            application, call_id = self.call
            self.decision = routing_state(application).decisions.get(call_id)

    def end(self, error: BaseException | None = None) -> None:
        self.end_s = time.time()
        error, self.error = self.error or error, None
        if error is not None:
            self.outcome = outcome_of(error)
        elif self.is_complete:
            self.outcome = "ok" if self.has_text else "empty"
        else:
            self.outcome = "left"
        self.status = 499 if self.outcome == "left" else 200
        if error is not None and self.outcome != "left":
            api_error = to_api_error(error)
            self.status, self.error_code = api_error.status, api_error.code or ""
