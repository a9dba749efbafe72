"""A request for a base that sleeps: it wakes the base and waits, or is told when to come back.

The wait ends with a front to call, with the reason why the base does not start, at the time limit,
or at once when the client leaves. Counted as open, so that the base does not fall asleep again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from math import ceil

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.types import Receive

from serve_app.disconnects import call_when_gone
from serve_app.dispatch.activity import Visit
from serve_app.dispatch.base_handle import BaseAsleepError, Route
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import ClientGoneError, OverloadedError, ServiceUnavailableError
from serve_app.platform_view import ServedBase
from serve_app.tasks import share, spawn

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 1.0  # the manager may have been away


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that may go to its base; `visit` keeps that base awake until it is left."""

    route: Route
    visit: Visit


class ColdStarts:
    """Of one ingress replica."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._num_waiting: Counter[str] = Counter()  # by base digest
        self._wakes: dict[str, asyncio.Task[None]] = {}

    async def admit(self, model: str, receive: Receive, key: str | None = None) -> Admission:
        """`key`: see `Gateway.route`. Raises what that does, and ClientGoneError. The body must
        have been read."""
        while True:
            try:
                route = self._gateway.route(model, key)
            except BaseAsleepError as error:
                await self._wait(error.base, error.retry_after_s, receive)
                continue
            if route.asleep is not None:
                self._wake(route.asleep.base.digest)
            return Admission(route, self._gateway.activity.enter(route.front.base.digest))

    async def _wait(self, base: ServedBase, retry_after_s: int, receive: Receive) -> None:
        digest, model = base.base.digest, base.model
        self._wake(digest)
        # Running: our end of it opens this moment.
        if model.cold_start == "refuse" and not base.is_running:
            raise ServiceUnavailableError(
                f"The base model {base.base.name!r} is being started.", retry_after_s
            )
        if self._num_waiting[digest] >= model.max_queued_requests:
            raise OverloadedError("Too many requests wait for this model.", retry_after_s)
        visit = self._gateway.activity.enter(digest)
        self._num_waiting[digest] += 1
        request = asyncio.current_task()
        assert request is not None
        is_gone = False

        def leave() -> None:
            nonlocal is_gone
            is_gone = True
            wait.cancel()

        wait = share(self._until_awake(digest, model.cold_start_timeout_s), "wait-for-base")
        watch = spawn(call_when_gone(receive, leave), "watch-client")
        try:
            await wait
        except asyncio.CancelledError:
            if is_gone:
                raise ClientGoneError from None
            raise
        except TimeoutError:
            raise ServiceUnavailableError(
                f"The base model {base.base.name!r} did not start within "
                f"{ceil(model.cold_start_timeout_s)} s.",
                retry_after_s,
            ) from None
        finally:
            wait.cancel()
            watch.cancel()
            self._num_waiting[digest] -= 1
            visit.leave()

    async def _until_awake(self, digest: str, timeout_s: float) -> None:
        """Until asking the gateway again gives another answer than that it sleeps."""
        async with asyncio.timeout(timeout_s):
            while True:
                base = self._gateway.served(digest)
                if base is None or base.state == "failed" or self._gateway.is_settled(digest):
                    return
                if base.state == "asleep":
                    self._wake(digest)
                await self._gateway.change(_ASK_AGAIN_S)

    def _wake(self, digest: str) -> None:
        if digest not in self._wakes:
            task = spawn(self._ask(digest), "wake-base")
            self._wakes[digest] = task
            task.add_done_callback(lambda _: self._wakes.pop(digest, None))

    async def _ask(self, digest: str) -> None:
        try:
            await self._gateway.manager.wake_base.remote(digest)
        except (RayError, RayServeException) as error:  # asked again as long as somebody waits
            logger.warning("the manager does not answer: %s", error)
