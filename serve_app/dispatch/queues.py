"""The admission queues of an ingress replica, one for each running base.

The tenant of a request is named by a header that a gateway in front sets; `admission.tenants` has
the rule for names that no trusted gateway proves.
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
_DEFAULT_MAX_WAITING = 256  # of a base that the platform view does not list

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
        """`views_of`: returns the replica views of an application; `is_proven`: a trusted gateway
        sets the tenant header."""
        self.stats = stats
        self.tenants = Tenants(settings, is_proven=is_proven)
        self._gateway = gateway
        self._settings = settings
        self._views_of = views_of
        self._queues: dict[str, AdmissionQueue] = {}  # by application

    def of(self, base: BaseHandle) -> AdmissionQueue:
        """Returns the queue of a base, which the first request creates."""
        queue = self._queues.get(base.app_name)
        if queue is None:
            self._forget_removed()
            queue = self._queues[base.app_name] = self._create(base)
        return queue

    def backlog(self, digest: str) -> Backlog:
        """Returns the requests that wait here for the engines of a base, and their rates. `digest`:
        of the base."""
        bases = [base for base in self._gateway.fronts if base.base.digest == digest]
        queues = [self._queues[b.app_name] for b in bases if b.app_name in self._queues]
        return total([queue.backlog for queue in queues])

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

    def cache_salt(self, tenant: str, client_salt: str | None) -> str:
        """Returns the prefix-cache salt of a request. Its model has been resolved, so that the
        platform view is known."""
        view = self._gateway.view
        assert view is not None
        return self.tenants.cache_salt(view.cache_salt_key, tenant, client_salt or "")

    @property
    def tenant_header(self) -> str:
        return self._settings.tenant_header

    def _create(self, base: BaseHandle) -> AdmissionQueue:
        served = self._gateway.served(base.base.digest)
        limit = _DEFAULT_MAX_WAITING if served is None else served.cold_start.max_waiting
        app_name = base.app_name
        return AdmissionQueue(
            self._settings, limit, lambda: self._views_of(app_name), self.stats, base.base.name
        )

    def _forget_removed(self) -> None:
        """Forgets the idle queues of applications that no longer exist."""
        running = {base.app_name for base in self._gateway.fronts}
        for name in [n for n, q in self._queues.items() if n not in running and q.is_idle]:
            del self._queues[name]
