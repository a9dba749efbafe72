"""A request that waits for an engine or runs in it, as its queue sees it."""

from __future__ import annotations

from typing import Protocol

from serve_app.messages import RoutingRequest


class RequestOwner(Protocol):
    """The queue that the holder of a `QueuedRequest` reports to."""

    def set_generated(self, queued: QueuedRequest, num_tokens: int) -> None: ...

    def close(self, queued: QueuedRequest) -> None: ...


class QueuedRequest:
    """A request from `add_request` to `close`. Its fields are for reading; `FairQueue` and
    `AdmissionController` alone write them."""

    __slots__ = (
        "_owner",
        "cost",
        "enqueued_s",
        "is_closed",
        "is_waiting",
        "num_charged",
        "num_generated",
        "request",
        "waited_s",
    )

    def __init__(
        self,
        request: RoutingRequest,
        cost: float,
        now_s: float,
        num_charged: int = 0,
        owner: RequestOwner | None = None,
    ) -> None:
        """`cost`: expected, of its prompts and of `num_charged` output tokens; `owner`: None in
        simulators, which call the `AdmissionController` themselves with their own time."""
        self.request = request
        self.cost = cost
        self.enqueued_s = now_s
        self.num_charged = num_charged  # output tokens that its tenant was charged so far
        self.num_generated = 0  # output tokens of all its choices
        self.waited_s = 0.0  # final once an engine may have it
        self.is_waiting = True
        self.is_closed = False
        self._owner = owner

    def set_generated(self, num_tokens: int) -> None:
        """Charges the tenant as the response grows. `num_tokens`: so far, of all choices."""
        if num_tokens > self.num_generated and not self.is_closed:
            assert self._owner is not None
            self._owner.set_generated(self, num_tokens)

    def close(self) -> None:
        """Ends the request: its response is complete, or its client is gone. Idempotent."""
        if not self.is_closed:
            assert self._owner is not None
            self._owner.close(self)
