"""The admission queues of an ingress replica, one for each running base.

The tenant of a request is named by a header that a gateway in front sets; `admission.tenants` has
the rule for names that no trusted gateway proves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from serve_app.admission.queue import AdmissionQueue
from serve_app.admission.tenants import Tenants
from serve_app.config import FairnessArgs
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.errors import ApiError, shown
from serve_app.messages import Backlog
from serve_app.metrics.queue import QueueStats
from serve_app.routing.view import ReplicaViews

_MAX_TENANT_CHARS = 128

ViewsOf = Callable[[str], ReplicaViews | None]  # by application


class AdmissionQueues:
    def __init__(
        self,
        settings: FairnessArgs,
        stats: QueueStats,
        views_of: ViewsOf,
        *,
        is_proven: bool,
    ) -> None:
        """`views_of`: returns the replica views of an application; `is_proven`: a trusted gateway
        sets the tenant header."""
        self.stats = stats
        self.tenants = Tenants(settings, is_proven=is_proven)
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

    def tenant(self, header: str | None) -> str:
        """Returns the tenant that the header names; "" without the header. Raises ApiError."""
        name = (header or "").strip()
        if len(name) > _MAX_TENANT_CHARS or not name.isprintable():
            field = self._settings.tenant_header
            raise ApiError(
                400,
                f"{field}: at most {_MAX_TENANT_CHARS} printable characters, got {shown(name)}.",
                param=field,
                code="invalid_value",
            )
        return name

    @property
    def tenant_header(self) -> str:
        return self._settings.tenant_header

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
