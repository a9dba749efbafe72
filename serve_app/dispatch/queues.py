"""The admission queues of an ingress replica, one for each running base."""

from __future__ import annotations

from collections.abc import Callable, Collection

from serve_app.admission.queue import AdmissionQueue
from serve_app.admission.tenants import Tenants
from serve_app.config import FairnessArgs
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.messages import Backlog
from serve_app.metrics.ingress import QueueStats
from serve_app.routing.view import ReplicaViews

ViewsOf = Callable[[str], ReplicaViews | None]  # by application


class AdmissionQueues:
    def __init__(
        self,
        settings: FairnessArgs,
        stats: QueueStats,
        views_of: ViewsOf,
        *,
        is_proven: bool,
        has_keys: bool = False,
    ) -> None:
        """`views_of`: returns the replica views of an application; `is_proven`,
        `has_keys`: see `Tenants`."""
        self.stats = stats
        self.tenants = Tenants(settings, is_proven=is_proven, has_keys=has_keys)
        self._settings = settings
        self._views_of = views_of
        self._app_names: Collection[str] = ()  # applications that can be called now
        self._queues: dict[str, AdmissionQueue] = {}  # by application

    def of(self, base: BaseHandle) -> AdmissionQueue:
        """Returns the queue of a base, which the first request creates."""
        queue = self._queues.get(base.app_name)
        if queue is None:
            self._forget_removed()
            queue = self._queues[base.app_name] = self._create(base)
        return queue

    def set_applications(self, app_names: Collection[str]) -> None:
        self._app_names = app_names

    def backlog(self, app_name: str) -> Backlog:
        """Returns the requests that wait here for the engines of an application, or are refused."""
        queue = self._queues.get(app_name)
        return Backlog() if queue is None else queue.backlog

    def wake(self) -> None:
        """Checks the capacity of all bases soon: a frame arrived from some engine."""
        for queue in self._queues.values():
            queue.wake()

    def placed(self, app_name: str, call_id: str) -> None:
        """A replica's view counts this call from now on. From any thread."""
        if (queue := self._queues.get(app_name)) is not None:
            queue.placed(call_id)

    def _create(self, base: BaseHandle) -> AdmissionQueue:
        app_name = base.app_name  # the queue must not keep the base's text files in memory
        return AdmissionQueue(
            self._settings,
            base.max_waiting,
            lambda: self._views_of(app_name),
            self.stats,
            base.base.name,
        )

    def _forget_removed(self) -> None:
        """Forgets the idle queues of applications that can no longer be called."""
        running = self._app_names
        for name in [n for n, q in self._queues.items() if n not in running and q.is_idle]:
            del self._queues[name]
