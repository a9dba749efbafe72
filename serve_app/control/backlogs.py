"""Tells the engine replicas of a base what waits for it in the ingresses: their numbers are all
that the autoscaling policy sees. Beside the manager's loop, never in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_app.messages import REPORT_INTERVAL_S, Backlog
from serve_app.ray_calls import Broadcasts
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

Send = Callable[[str, Backlog], Awaitable[int]]


class BacklogTeller:
    """One event loop."""

    def __init__(self, send: Send | None = None) -> None:
        broadcasts = Broadcasts()
        self._send = send or (lambda app, backlog: broadcasts.call(app, "hear_backlog", backlog))
        self._told: dict[str, tuple[Backlog, float]] = {}  # by application; when
        self._telling: dict[str, asyncio.Task[None]] = {}

    def tell(self, backlogs: Mapping[str, Backlog]) -> None:
        """By application. Returns at once; called all the time. An empty queue is told once."""
        now_s = asyncio.get_running_loop().time()
        for app_name in self._told.keys() - backlogs.keys():
            del self._told[app_name]
        for app_name, backlog in backlogs.items():
            told, told_s = self._told.get(app_name, (Backlog(), 0.0))
            is_news = not backlog.is_nothing or not told.is_nothing
            is_due = now_s - told_s >= REPORT_INTERVAL_S
            if is_news and is_due and app_name not in self._telling:
                self._told[app_name] = (backlog, now_s)
                self._telling[app_name] = spawn(self._tell(app_name, backlog), "send-backlog")

    async def _tell(self, app_name: str, backlog: Backlog) -> None:
        try:
            await self._send(app_name, backlog)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the engines of %s heard of no backlog: %s", app_name, error)
        except Exception:
            logger.exception("the engines of %s received no backlog", app_name)
        finally:
            del self._telling[app_name]
