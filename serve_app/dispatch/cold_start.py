"""Requests for a base that sleeps: they wake it and wait, or get an error with a time to come back.

The wait ends with a handle to call, with the reason why the base does not start, at the time limit,
or at once when the client leaves. A waiting request counts as open, so that the base does not fall
asleep again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from math import ceil

from starlette.types import Receive

from serve_app.disconnects import RequestScope
from serve_app.dispatch.adapter_texts import TextSides
from serve_app.dispatch.base_handle import BaseAsleepError, Route
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import ClientGoneError, OverloadedError, ServiceUnavailableError
from serve_app.platform_view import ServedBase
from serve_app.ray_calls import RAY_ERRORS
from serve_app.tasks import share, spawn

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # the manager may have been away


class ColdStarts:
    """The requests of an ingress replica that wait for a base."""

    def __init__(self, gateway: Gateway) -> None:
        self.text_sides = TextSides()
        self._gateway = gateway
        self._num_waiting: Counter[str] = Counter()  # by base digest
        self._wakes: dict[str, asyncio.Task[None]] = {}  # by base digest

    async def admit(
        self, model: str, receive: Receive, key: str | None = None
    ) -> tuple[Route, Callable[[], None]]:
        """Returns the route of a request, with the text side of its adapter, and a function that
        ends its hold on its base, which does not fall asleep before.

        `key`: see `Gateway.route`. Raises the errors of `Gateway.route` and
        `TextSides.with_text`, and ClientGoneError. The body must have been read.
        """
        while True:
            try:
                route = self._gateway.route(model, key)
            except BaseAsleepError as error:
                await self._wait(error.base, error.retry_after_s, receive)
                continue
            if route.asleep is not None:
                self._wake(route.asleep.base.digest)
            leave = self._gateway.activity.enter(route.handle.base.digest)
            if not route.brings_text:
                return route, leave
            try:
                return await self.text_sides.with_text(route), leave
            except BaseException:
                leave()
                raise

    async def _wait(self, base: ServedBase, retry_after_s: int, receive: Receive) -> None:
        digest, name, model = base.base.digest, base.base.name, base.model
        self._wake(digest)
        # If it is running, this ingress is about to open its handle.
        if model.cold_start == "refuse" and not base.is_running:
            raise ServiceUnavailableError(
                f"The base model {name!r} is being started.", retry_after_s
            )
        if self._num_waiting[digest] >= model.max_queued_requests:
            raise OverloadedError("Too many requests wait for this model.", retry_after_s)
        timeout_s = model.cold_start_timeout_s
        with RequestScope() as scope:
            scope.callback(self._gateway.activity.enter(digest))
            self._num_waiting[digest] += 1
            scope.callback(self._num_waiting.subtract, (digest,))
            wait = share(self._wait_until_awake(digest, timeout_s), "wait-for-base")
            scope.callback(wait.cancel)
            scope.watch_client(receive, wait.cancel)
            try:
                await wait
            except asyncio.CancelledError:
                this = asyncio.current_task()
                if this is None or this.cancelling():
                    raise
                raise ClientGoneError from None  # not this task was cancelled, but its wait
            except TimeoutError:
                raise ServiceUnavailableError(
                    f"The base model {name!r} did not start within {ceil(timeout_s)} s.",
                    retry_after_s,
                ) from None

    async def _wait_until_awake(self, digest: str, timeout_s: float) -> None:
        """Returns when the gateway no longer answers that the base sleeps."""
        async with asyncio.timeout(timeout_s):
            while True:
                base = self._gateway.served(digest)
                if base is None or base.state == "failed" or self._gateway.is_settled(digest):
                    return
                if base.state == "asleep":
                    self._wake(digest)
                await self._gateway.change(_RETRY_S)

    def _wake(self, digest: str) -> None:
        if digest not in self._wakes:
            task = spawn(self._call_manager(digest), "wake-base")
            self._wakes[digest] = task
            task.add_done_callback(lambda _: self._wakes.pop(digest, None))

    async def _call_manager(self, digest: str) -> None:
        try:
            await self._gateway.manager.wake_base.remote(digest)
        except RAY_ERRORS as error:  # retried as long as a request waits
            logger.warning("could not ask the manager to wake a base: %s", error)
