"""The queues of one ingress replica, one a running base, and who is asking.

A tenant is what the gateway in front says in a header; `routing.tenants` has the rule for names
that no trusted gateway proves.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_app.admission.queue import AdmissionQueue
from serve_app.admission.tenants import Tenants
from serve_app.config import FairnessArgs
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import ApiError, shown
from serve_app.messages import Backlog, total
from serve_app.metrics.queue import QueueStats
from serve_app.routing.view import ReplicaViews

_MAX_TENANT_CHARS = 128
_USUAL_MAX_WAITING = 256

ViewsOf = Callable[[str], ReplicaViews | None]  # by application


class AdmissionQueues:
    def __init__(
        self,
        gateway: Gateway,
        settings: FairnessArgs,
        stats: QueueStats,
        views_of: ViewsOf,
        *,
        is_proven: bool,
    ) -> None:
        """`is_proven`: a trusted gateway sets the tenant header."""
        self.stats = stats
        self.tenants = Tenants(settings, is_proven=is_proven)
        self._gateway = gateway
        self._settings = settings
        self._views_of = views_of
        self._queues: dict[str, AdmissionQueue] = {}  # by application

    def of(self, front: BaseHandle) -> AdmissionQueue:
        queue = self._queues.get(front.app_name)
        if queue is None:
            self._forget()
            queue = self._queues[front.app_name] = self._open(front)
        return queue

    def backlog(self, digest: str) -> Backlog:
        """Of a base, by digest: what waits for its engines here, or finds no place."""
        fronts = [front for front in self._gateway.fronts if front.base.digest == digest]
        queues = [self._queues[f.app_name] for f in fronts if f.app_name in self._queues]
        return total([queue.backlog for queue in queues])

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

    def cache_salt(self, tenant: str, client_salt: str | None) -> str:
        """Of a request whose model was resolved: then there is a view."""
        view = self._gateway.view
        assert view is not None
        return self.tenants.cache_salt(view.cache_salt_key, tenant, client_salt or "")

    @property
    def tenant_header(self) -> str:
        return self._settings.tenant_header

    def _open(self, front: BaseHandle) -> AdmissionQueue:
        served = self._gateway.served(front.base.digest)
        limit = _USUAL_MAX_WAITING if served is None else served.model.max_queued_requests
        app_name = front.app_name
        return AdmissionQueue(
            self._settings, limit, lambda: self._views_of(app_name), self.stats, front.base.name
        )

    def _forget(self) -> None:
        """Those of applications that are gone."""
        there = {front.app_name for front in self._gateway.fronts}
        for name in [n for n, q in self._queues.items() if n not in there and q.is_idle]:
            del self._queues[name]
