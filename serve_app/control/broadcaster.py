"""Sends a value of the manager's to all engine replicas of an application, again and again.

It runs beside the manager's loop, never in it: a replica without an answer delays no other work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from typing import Generic, TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.messages import ENGINE
from serve_app.ray_calls import results_of
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT_S = 5.0

Send = Callable[[str, T], Awaitable[int]]  # (application, value) -> replicas that failed


class Broadcaster(Generic[T]):
    """The values of a kind by application, and when they were last sent. All methods belong to the
    event loop."""

    def __init__(
        self,
        name: str,
        method: str,
        is_due: Callable[[T, T | None, float], bool],
        send: Send[T] | None = None,
    ) -> None:
        """`name`: of the value, for logs. `method`: of `EngineReplica`. `is_due(value, last,
        age_s)`: whether to send `value` when `last` was sent `age_s` ago; None: never yet."""
        self._name = name
        self._method = method
        self._is_due = is_due
        self._send = send or self._send_to_replicas
        self._sent: dict[str, tuple[T, float]] = {}  # by application; when
        self._sending: set[str] = set()  # applications with a call in flight
        self._handles: dict[str, DeploymentHandle[object]] = {}

    def publish(self, values: Mapping[str, T]) -> None:
        """Sends the values that are due, with at most a call per application in flight, and forgets
        applications that are not in `values`. Returns at once; called in every round."""
        now_s = asyncio.get_running_loop().time()
        for known in (self._sent, self._handles):
            for app_name in known.keys() - values.keys():
                del known[app_name]
        for app_name, value in values.items():
            last, sent_s = self._sent.get(app_name, (None, -inf))
            if app_name not in self._sending and self._is_due(value, last, now_s - sent_s):
                self._sent[app_name] = value, now_s
                self._sending.add(app_name)
                spawn(self._try_send(app_name, value), f"send-{self._name}")

    async def _try_send(self, app_name: str, value: T) -> None:
        try:
            if num_failed := await self._send(app_name, value):
                logger.warning(
                    "%d engine replicas of %s did not receive the %s; a later one replaces it",
                    *(num_failed, app_name, self._name),
                )
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning(
                "the engine replicas of %s did not receive the %s; a later one replaces it: %s",
                *(app_name, self._name, str(error) or type(error).__name__),
            )
        except Exception:
            logger.exception("sending the %s to %s failed", self._name, app_name)
        finally:
            self._sending.discard(app_name)

    async def _send_to_replicas(self, app_name: str, value: T) -> int:
        """Returns the number of replicas that failed or did not answer within `_TIMEOUT_S`. Raises
        where there is no such application."""
        if app_name not in self._handles:
            self._handles[app_name] = await asyncio.to_thread(
                serve.get_deployment_handle, ENGINE, app_name
            )
        calls = self._handles[app_name].broadcast(self._method, value)
        results = await results_of(calls, _TIMEOUT_S)
        return sum(isinstance(result, BaseException) for result in results)
