"""The applications of the bases on Serve: started, put to sleep, replaced and removed.

One round compares what is planned with what Serve has, and says how each base stands. A new version
or other settings come up beside the old application, which stands in until the new one answers and
is then drained. Ignorant of the registry and of ingresses but for their reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview, ServeStatus

from registry.catalog import Catalog
from registry.entities import BaseVersion
from serve_app.config import ModelArgs
from serve_app.control.backlogs import BacklogTeller
from serve_app.control.base_plan import (
    APP_PREFIX,
    MISSING_S,
    Plan,
    is_application_of,
    is_application_of_any,
)
from serve_app.control.base_sleep import ScaleToZero
from serve_app.control.base_starts import StartLog
from serve_app.control.base_status import (
    ReplicaCounts,
    count_replicas,
    lack_in_words,
    runs,
    state_of,
)
from serve_app.control.deployments import base_application
from serve_app.messages import Backlog
from serve_app.platform_view import BaseLine, BaseSpec, ColdStart, ServedBase, Sources
from serve_app.ray_calls import root_cause

logger = logging.getLogger(__name__)

_RETRY_FAILED_S = 30.0
_MAX_REASON_CHARS = 400
# After a view without an application, before it is drained: the least, and the most when an ingress
# does not say that it let go.
_HANDOVER_S, _HANDOVER_MAX_S = 0.5, 10.0
_ADOPT_S = 3.0  # a new manager waits so long for an ingress to say what slept


@dataclass(frozen=True, slots=True)
class _Unstartable:
    """An application that Serve did not take."""

    words: str
    at_s: float


class Fleet:
    """All methods belong to one event loop."""

    def __init__(self, sources: Sources) -> None:
        self.sleep = ScaleToZero()
        self.starts = StartLog()
        self.lines: tuple[BaseLine, ...] = ()  # as of the last round
        self.progress_s = 0.0  # when a call of Serve's controller last came back, the loop's clock
        self._sources = sources
        self._backlogs = BacklogTeller()
        self._failed_s: dict[str, float] = {}  # when an application was last seen failed
        self._unwanted_s: dict[str, float] = {}  # since when an application is replaced
        self._seen: dict[str, BaseSpec] = {}  # every spec that this manager made, by application
        self._unstartable: dict[str, _Unstartable] = {}  # by application
        self._refused: dict[str, str] = {}  # by base: why its setting is not followed

    async def meet_ingresses(self) -> None:
        """Before the first round: a manager that was restarted must not wake what sleeps."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _ADOPT_S
        while not self.sleep.has_heard and loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        self.sleep.adopt(loop.time())

    async def round(self, wanted: Plan, catalog: Catalog, now_s: float) -> tuple[ServedBase, ...]:
        """What the ingresses are to be told. Removes what an earlier view left out."""
        status: ServeStatus = await asyncio.to_thread(serve.status)
        self._note_progress()
        self._seen |= {spec.app_name: spec for spec in wanted.specs}
        self.sleep.forget({spec.base.digest for spec in wanted.specs})
        self._tell_refused(wanted)
        for name in self._unstartable.keys() - {spec.app_name for spec in wanted.specs}:
            del self._unstartable[name]
        for spec in wanted.specs:
            app = status.applications.get(spec.app_name)
            is_cold = self.sleep.phase(spec.base.digest) == "waking"
            self.sleep.step(spec.base.digest, runs(app), spec.model.idle_timeout_s, now_s)
            if runs(app):
                self.starts.end(spec.app_name, spec.base.name, now_s, is_cold=is_cold)
        await self._start(wanted.specs, status, now_s)
        await self._stop_sleepers(wanted.specs, status)
        bases = tuple(self._served(spec, status) for spec in wanted.specs)
        old = self._stand_ins(bases, catalog, status)
        served = tuple(
            replace(base, is_awaited=False)
            if any(one.replaced_by == base.base.digest for one in old)
            else base
            for base in bases
        )
        standing = {base.app_name for base in (*served, *old)}
        await self._remove_unwanted(standing, wanted, status, now_s)
        self._backlogs.tell(self._backlogs_of(bases, now_s))
        self.lines = (
            *(self._line(base, status, now_s) for base in (*served, *old)),
            *self._leaving(standing, catalog, status),
            *_refused_lines(wanted),
        )
        return (*served, *old)

    async def _start(self, specs: Sequence[BaseSpec], status: ServeStatus, now_s: float) -> None:
        for spec in specs:
            if self.sleep.phase(spec.base.digest) == "asleep":
                continue
            app = status.applications.get(spec.app_name)
            if app is not None and app.status == "DEPLOY_FAILED":
                if now_s - self._failed_s.setdefault(spec.app_name, now_s) < _RETRY_FAILED_S:
                    self.starts.drop(spec.app_name)
                    continue
                del self._failed_s[spec.app_name]
            elif app is not None:
                continue
            known = self._unstartable.get(spec.app_name)
            if known is not None and now_s - known.at_s < _RETRY_FAILED_S:
                continue
            logger.info("starting %s", spec.app_name)
            try:
                await asyncio.to_thread(_deploy, spec, self._sources)
            except (RayError, RayServeException, TimeoutError) as error:
                if not isinstance(error, RayTaskError):  # the controller's trouble, no base's
                    raise
                self._note_unstartable(spec.app_name, str(root_cause(error)), now_s)
            except Exception as error:  # what Serve takes no application of: this base's alone
                words = f"{type(error).__name__}: {error}"
                self._note_unstartable(spec.app_name, words, now_s)
            else:
                self._unstartable.pop(spec.app_name, None)
                self.starts.begin(spec.app_name, now_s)
            self._note_progress()

    def _note_unstartable(self, app_name: str, words: str, now_s: float) -> None:
        words = words[:_MAX_REASON_CHARS]
        known = self._unstartable.get(app_name)
        if known is None or known.words != words:
            logger.error("%s cannot be started: %s", app_name, words)
        self._unstartable[app_name] = _Unstartable(words, now_s)

    def _note_progress(self) -> None:
        self.progress_s = asyncio.get_running_loop().time()

    def _tell_refused(self, wanted: Plan) -> None:
        """Each once, as long as its reason lasts."""
        refused = {one.name: one.reason for one in wanted.refused}
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                logger.error("base %s: %s", name, reason)
        self._refused = refused

    async def _stop_sleepers(self, specs: Sequence[BaseSpec], status: ServeStatus) -> None:
        for spec in specs:
            app = status.applications.get(spec.app_name)
            if self.sleep.phase(spec.base.digest) == "asleep" and app is not None:
                await self._delete(spec.app_name, app)

    async def _remove_unwanted(
        self, standing: set[str], wanted: Plan, status: ServeStatus, now_s: float
    ) -> None:
        for name, app in status.applications.items():
            if not name.startswith(APP_PREFIX) or name in standing:
                self._unwanted_s.pop(name, None)
                continue
            since_s = self._unwanted_s.setdefault(name, now_s)
            # Another manager's, which this one could not keep by its last good plan.
            is_kept = name not in self._seen and is_application_of_any(name, wanted)
            if is_kept and now_s - since_s <= MISSING_S:
                continue
            if now_s - since_s > _HANDOVER_MAX_S or self.sleep.has_let_go(
                name, since_s + _HANDOVER_S, now_s
            ):
                await self._delete(name, app)
        for name in self._unwanted_s.keys() - status.applications.keys():
            del self._unwanted_s[name]

    async def _delete(self, name: str, app: ApplicationStatusOverview) -> None:
        """Serve drains first: minutes, and nobody waits for it here."""
        if app.status != "DELETING":
            logger.info("draining and removing %s", name)
            await asyncio.to_thread(serve.delete, name, _blocking=False)
            self._note_progress()

    def _served(self, spec: BaseSpec, status: ServeStatus) -> ServedBase:
        app = status.applications.get(spec.app_name)
        phase = self.sleep.phase(spec.base.digest)
        is_asleep = phase in ("drowsy", "asleep")
        state, message = state_of(app)
        if app is None and (refusal := self._unstartable.get(spec.app_name)) is not None:
            state, message = "failed", refusal.words
        if is_asleep:
            state, message = "asleep", ""
        return ServedBase(
            spec.base,
            spec.app_name,
            state == "running",
            message,
            state,
            is_waking=phase == "waking",
            rest_id=self.sleep.rest_id(spec.base.digest) if is_asleep else 0.0,
            # A server that runs is not held up by what is added to it, nor by what sleeps.
            is_awaited=spec.source == "file" and phase == "awake",
            deployed_s=0.0 if app is None else app.last_deployed_time_s,
            start_s=self.starts.last_s(spec.base.name),
            cold_start=_cold_start(spec.model),
            migration=spec.model.migration,
        )

    def _stand_ins(
        self, bases: Sequence[ServedBase], catalog: Catalog, status: ServeStatus
    ) -> tuple[ServedBase, ...]:
        """Applications that run for a base whose wanted one does not run yet."""
        wanted = {base.app_name for base in bases}
        found = []
        for base in bases:
            if base.is_running or base.state == "asleep":
                continue
            for name, app in status.applications.items():
                if name in wanted or not runs(app):
                    continue
                old = self._base_of(name, catalog)
                if old is not None and old.name == base.base.name:
                    found.append(
                        ServedBase(
                            old,
                            name,
                            True,
                            state="running",
                            is_awaited=False,
                            replaced_by=base.base.digest,
                            deployed_s=app.last_deployed_time_s,
                            cold_start=base.cold_start,
                            migration=base.migration,
                        )
                    )
        return tuple(found)

    def _base_of(self, app_name: str, catalog: Catalog) -> BaseVersion | None:
        """Of an application that another manager may have started."""
        if app_name in self._seen:
            return self._seen[app_name].base
        return next(
            (base for base in catalog.bases if is_application_of(app_name, base.name, base.digest)),
            None,
        )

    def _backlogs_of(self, bases: Sequence[ServedBase], now_s: float) -> dict[str, Backlog]:
        """By application, of those that scale by it."""
        return {
            base.app_name: self.sleep.backlog(base.base.digest, now_s)
            for base in bases
            if base.is_running and self._seen[base.app_name].model.autoscaling is not None
        }

    def _line(self, base: ServedBase, status: ServeStatus, now_s: float) -> BaseLine:
        spec = self._seen.get(base.app_name)
        app = status.applications.get(base.app_name)
        counts = count_replicas(app)
        if base.state == "asleep":  # what still stands gets nothing more
            counts = ReplicaCounts(draining=counts.wanted + counts.draining)
        least, most = _range(spec)
        return BaseLine(
            name=base.base.name,
            version=base.base.version,
            state=base.state,
            message=base.message or lack_in_words(app),
            source="file" if spec is None else spec.source,
            replicas=counts.running,
            idle_s=self.sleep.idle_s(base.base.digest, now_s) if base.is_running else None,
            start_s=base.start_s,
            idle_timeout_s=None if spec is None else spec.model.idle_timeout_s,
            cold_start="wait" if spec is None else spec.model.cold_start,
            application=base.app_name,
            digest=base.base.digest,
            wanted_replicas=counts.wanted,
            draining_replicas=counts.draining,
            min_replicas=least,
            max_replicas=most,
        )

    def _leaving(
        self, standing: set[str], catalog: Catalog, status: ServeStatus
    ) -> tuple[BaseLine, ...]:
        lines = []
        for name in status.applications:
            base = self._base_of(name, catalog)
            if not name.startswith(APP_PREFIX) or name in standing or base is None:
                continue
            spec = self._seen.get(name)
            lines.append(
                BaseLine(
                    name=base.name,
                    version=base.version,
                    state="draining",
                    message="requests in flight finish",
                    source="registry" if spec is None else spec.source,
                    replicas=0,
                    idle_s=None,
                    start_s=self.starts.last_s(base.name),
                    idle_timeout_s=None,
                    cold_start="",
                    application=name,
                    digest=base.digest,
                    draining_replicas=count_replicas(status.applications[name]).draining,
                )
            )
        return tuple(lines)


def _deploy(spec: BaseSpec, sources: Sources) -> None:
    """In a thread. One application a call: what Serve refuses of it holds up no other."""
    target = base_application(spec, sources)
    one = serve.RunTarget(target=target, name=spec.app_name, route_prefix=None)
    serve.run_many([one], wait_for_applications_running=False)


def _refused_lines(wanted: Plan) -> tuple[BaseLine, ...]:
    return tuple(
        BaseLine(one.name, None, "failed", one.reason, "registry", 0, None, None, None, "", "", "")
        for one in wanted.refused
    )


def _range(spec: BaseSpec | None) -> tuple[int, int]:
    """Of replicas, while it is awake; (0, 0): another manager's application, not known here."""
    if spec is None:
        return 0, 0
    scaling = spec.model.autoscaling
    if scaling is None:
        return spec.model.replicas, spec.model.replicas
    return scaling.min_replicas, scaling.max_replicas


def _cold_start(model: ModelArgs) -> ColdStart:
    return ColdStart(
        model.cold_start == "refuse", model.cold_start_timeout_s, model.max_queued_requests
    )
