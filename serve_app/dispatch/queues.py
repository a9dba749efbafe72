"""The queues of one ingress replica, one a running base, and who is asking.

A tenant is what the gateway in front says in a header; `routing.tenants` has the rule for names
that no trusted gateway proves.
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
        """`is_proven`: a trusted gateway sets the tenant header."""
        self.stats = stats
        self.tenants = Tenants(settings, is_proven=is_proven)
        self._settings = settings
        self._views_of = views_of
        self._app_names: Collection[str] = ()  # applications that can be called now
        self._queues: dict[str, AdmissionQueue] = {}  # by application

    def of(self, front: BaseHandle) -> AdmissionQueue:
        queue = self._queues.get(front.app_name)
        if queue is None:
            self._forget()
            queue = self._queues[front.app_name] = self._open(front)
        return queue

    def set_applications(self, app_names: Collection[str]) -> None:
        self._app_names = app_names

    def backlog(self, app_name: str) -> Backlog:
        """Returns the requests that wait here for the engines of an application, or are refused."""
        queue = self._queues.get(app_name)
        return Backlog() if queue is None else queue.backlog

    def wake(self) -> None:
        """A frame came from some engine."""
        for queue in self._queues.values():
            queue.wake()

    def placed(self, app_name: str, call_id: str) -> None:
        """A replica's view counts this call from now on. From any thread."""
        if (queue := self._queues.get(app_name)) is not None:
            queue.placed(call_id)

    def tenant(self, header: str | None) -> str:
        """As the request's header names it; "" without one."""
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

    def _open(self, front: BaseHandle) -> AdmissionQueue:
        return AdmissionQueue(
            self._settings,
            front.max_waiting,
            lambda: self._views_of(front.app_name),
            self.stats,
            front.base.name,
        )

    def _forget(self) -> None:
        """Drops the idle queues of applications that cannot be called any more."""
        there = self._app_names
        for name in [n for n, q in self._queues.items() if n not in there and q.is_idle]:
            del self._queues[name]
