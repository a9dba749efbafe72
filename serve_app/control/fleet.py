"""The applications of the bases on Serve: started, put to sleep, replaced and removed.

A round compares the plan with Serve's applications and reports the state of each base. A new
version or other settings start next to the old application, which stands in until the new
application answers and is then drained. Ignorant of the registry, and of ingresses except for their
reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview, ServeStatus

from registry.catalog import Catalog
from registry.entities import BaseVersion
from serve_app.config import ModelArgs
from serve_app.control.base_plan import (
    APP_PREFIX,
    MISSING_S,
    Plan,
    is_application_of,
    is_application_of_any,
    is_application_of_name,
)
from serve_app.control.base_sleep import ScaleToZero
from serve_app.control.base_status import (
    ReplicaCounts,
    StartLog,
    count_replicas,
    is_refused,
    read_status,
    runs,
    state_of,
    unplaced_replicas,
)
from serve_app.control.broadcaster import Broadcaster
from serve_app.control.deployments import base_application, scale
from serve_app.messages import REPORT_INTERVAL_S, Backlog
from serve_app.platform_view import BaseLine, BaseSpec, BaseState, ServedBase, Sources
from serve_app.ray_calls import root_cause

logger = logging.getLogger(__name__)

_RETRY_FAILED_S = 30.0
_MAX_REASON_CHARS = 400
# From a view without an application until it is drained: the minimum, and the maximum if an ingress
# does not report that it released it.
_HANDOVER_S, _HANDOVER_MAX_S = 0.5, 10.0
_FIRST_REPORT_S = 3.0  # a new manager waits this long for an ingress to report which bases sleep


class Fleet:
    """All methods belong to the event loop."""

    def __init__(self, sources: Sources) -> None:
        self.sleep = ScaleToZero()
        self.starts = StartLog()
        self.lines: tuple[BaseLine, ...] = ()  # as of the last round
        self.progress_s = 0.0  # when a call of Serve's controller last returned, the loop's clock
        self._sources = sources
        # The replicas report their backlog to the autoscaling policy, which has no other input.
        self._backlogs = Broadcaster("backlog", "set_backlog", backlog_is_due)
        self._failed_s: dict[str, float] = {}  # since when an application is DEPLOY_FAILED
        self._unwanted_s: dict[str, float] = {}  # since when an application is replaced
        self._seen: dict[str, BaseSpec] = {}  # every spec that this manager planned, by application
        # By application that Serve refused to deploy: why, and when.
        self._failed_starts: dict[str, tuple[str, float]] = {}
        self._replicas: dict[str, int] = {}  # as this manager has set them, by application
        self._refused: dict[str, str] = {}  # by base: why its setting is not followed
        # Applications that another file brought to a running server; None before the first round.
        self._late: set[str] | None = None

    async def restore_sleep(self) -> None:
        """Waits for a first report of an ingress, before the first round: a manager that restarted
        must not wake the bases that sleep."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _FIRST_REPORT_S
        while not self.sleep.has_reports and loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        self.sleep.restore(loop.time())

    async def round(self, wanted: Plan, catalog: Catalog, now_s: float) -> tuple[ServedBase, ...]:
        """Starts and removes applications as planned; returns the bases to publish to ingresses.
        Applications that the last view left out are removed now."""
        status = await asyncio.to_thread(read_status)
        self._note_progress()
        self._seen |= {spec.app_name: spec for spec in wanted.specs}
        self.sleep.retain({spec.base.digest for spec in wanted.specs})
        self._log_refused(wanted)
        self._note_late(wanted.specs, status)
        for name in self._failed_starts.keys() - {spec.app_name for spec in wanted.specs}:
            del self._failed_starts[name]
        for spec in wanted.specs:
            app = status.applications.get(spec.app_name)
            is_cold = self.sleep.phase(spec.base.digest) == "waking"
            self.sleep.step(spec.base.digest, runs(app), spec.model.idle_timeout_s, now_s)
            if runs(app):
                self.starts.end(spec.app_name, spec.base.name, now_s, is_cold=is_cold)
        await self._start(wanted.specs, status, now_s)
        bases = tuple(self._served(spec, status) for spec in wanted.specs)
        old = self._stand_ins(bases, catalog, status)
        replaced = {base.replaced_by for base in old}
        served = (
            *(replace(b, is_awaited=b.is_awaited and b.base.digest not in replaced) for b in bases),
            *old,
        )
        await self._remove_unwanted({base.app_name for base in served}, wanted, status, now_s)
        self._backlogs.publish(self._backlogs_of(bases, now_s))
        self.lines = self._lines_of(served, catalog, status, now_s)
        return served

    async def _start(self, specs: Sequence[BaseSpec], status: ServeStatus, now_s: float) -> None:
        """Starts the applications that are missing, then stops those of bases that sleep."""
        apps = status.applications.values()
        if apps and all(app.status == "DELETING" for app in apps):
            return  # Serve shuts down: the application of this manager is among them
        for spec in sorted(specs, key=lambda one: self.sleep.phase(one.base.digest) == "asleep"):
            app = status.applications.get(spec.app_name)
            if self.sleep.phase(spec.base.digest) == "asleep":
                if app is not None:
                    await self._delete(spec.app_name, app)
                continue
            if app is not None and app.status == "DEPLOY_FAILED":
                if now_s - self._failed_s.setdefault(spec.app_name, now_s) < _RETRY_FAILED_S:
                    self.starts.drop(spec.app_name)
                    continue
                del self._failed_s[spec.app_name]
            elif app is not None:
                await self._scale(spec, app)
                continue
            _, tried_s = self._failed_starts.get(spec.app_name, ("", -inf))
            if now_s - tried_s < _RETRY_FAILED_S:
                continue
            logger.info("starting %s", spec.app_name)
            try:
                await asyncio.to_thread(_deploy, spec, self._sources)
            except (RayError, RayServeException, TimeoutError) as error:
                if not isinstance(error, RayTaskError):  # the controller failed, not this base
                    raise
                self._note_failed_start(spec.app_name, str(root_cause(error)), now_s)
            except Exception as error:  # Serve refuses this application: the others still start
                reason = f"{type(error).__name__}: {error}"
                self._note_failed_start(spec.app_name, reason, now_s)
            else:
                self._failed_starts.pop(spec.app_name, None)
                self._replicas[spec.app_name] = spec.model.replicas
                self.starts.begin(spec.app_name, now_s)
            self._note_progress()

    async def _scale(self, spec: BaseSpec, app: ApplicationStatusOverview) -> None:
        """Sets the replicas of an application, of which its name is independent, where they have
        changed, or where an earlier manager set them."""
        name, wanted = spec.app_name, spec.model.replicas
        if spec.model.autoscaling is not None or app.status == "DELETING":
            return
        if self._replicas.get(name) == wanted:
            return
        try:
            await asyncio.to_thread(scale, name, wanted)
        except RayTaskError as error:  # such as an application of another release
            logger.error("%s cannot get %d replicas: %s", name, wanted, root_cause(error))
        self._replicas[name] = wanted
        self._note_progress()

    def _note_failed_start(self, app_name: str, reason: str, now_s: float) -> None:
        reason = reason[:_MAX_REASON_CHARS]
        known = self._failed_starts.get(app_name)
        if known is None or known[0] != reason:
            logger.error(
                "%s cannot be started: %s (it is tried again every %.0f s)",
                *(app_name, reason, _RETRY_FAILED_S),
            )
        self._failed_starts[app_name] = reason, now_s

    def _note_progress(self) -> None:
        self.progress_s = asyncio.get_running_loop().time()

    def _log_refused(self, wanted: Plan) -> None:
        """Logs each refused base once, until its reason changes."""
        refused = {base.name: base.reason for base in wanted.refused}
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                logger.error("base %s is refused: %s", name, reason)
        self._refused = refused

    def _note_late(self, specs: Sequence[BaseSpec], status: ServeStatus) -> None:
        """Notes at the first round which bases another file, which comes with another manager,
        added to bases that run or sleep. A file of other bases altogether adds none."""
        if self._late is not None:
            return
        running = [name for name, app in status.applications.items() if runs(app)]
        kept = {
            spec.app_name
            for spec in specs
            if self.sleep.phase(spec.base.digest) == "asleep"
            or any(is_application_of_name(name, spec.base.name) for name in running)
        }
        self._late = {spec.app_name for spec in specs} - kept if kept else set()

    async def _remove_unwanted(
        self, wanted_names: set[str], wanted: Plan, status: ServeStatus, now_s: float
    ) -> None:
        for name, app in status.applications.items():
            if not name.startswith(APP_PREFIX) or name in wanted_names:
                self._unwanted_s.pop(name, None)
                continue
            since_s = self._unwanted_s.setdefault(name, now_s)
            # An earlier manager's, which this manager could not keep by its own last good plan.
            is_kept = name not in self._seen and is_application_of_any(name, wanted)
            if is_kept and now_s - since_s <= MISSING_S:
                continue
            if now_s - since_s > _HANDOVER_MAX_S or self.sleep.is_released(
                name, since_s + _HANDOVER_S, now_s
            ):
                await self._delete(name, app)
        for name in self._unwanted_s.keys() - status.applications.keys():
            del self._unwanted_s[name]

    async def _delete(self, name: str, app: ApplicationStatusOverview) -> None:
        """Has Serve drain and remove an application, which may last minutes; does not wait."""
        if app.status != "DELETING":
            logger.info("draining and removing %s", name)
            await asyncio.to_thread(serve.delete, name, _blocking=False)
            self._note_progress()

    def _served(self, spec: BaseSpec, status: ServeStatus) -> ServedBase:
        app = status.applications.get(spec.app_name)
        phase = self.sleep.phase(spec.base.digest)
        is_asleep = phase in ("draining", "asleep")
        is_late = self._late is not None and spec.app_name in self._late
        state, message = state_of(app)
        if app is None and (failure := self._failed_starts.get(spec.app_name)) is not None:
            state, message = "failed", failure[0]
        if is_asleep:
            state, message = "asleep", ""
        return ServedBase(
            spec.base,
            spec.app_name,
            state,
            spec.model,
            message,
            is_waking=phase == "waking",
            sleep_epoch=self.sleep.sleep_epoch(spec.base.digest) if is_asleep else 0.0,
            # A running server stays ready while a base is added to it or sleeps.
            is_awaited=spec.source == "file" and phase == "awake" and not is_late,
            deployed_s=0.0 if app is None else app.last_deployed_time_s,
            start_s=self.starts.last_s(spec.base.name),
            is_refused=state == "failed" and is_refused(app),
        )

    def _stand_ins(
        self, bases: Sequence[ServedBase], catalog: Catalog, status: ServeStatus
    ) -> tuple[ServedBase, ...]:
        """Applications that run for a base whose wanted application does not run yet."""
        wanted = {base.app_name for base in bases}
        running = {
            name: found
            for name, app in status.applications.items()
            if name not in wanted and runs(app) and (found := self._base_of(name, catalog))
        }
        return tuple(
            replace(
                base,
                base=old,
                app_name=name,
                state="running",
                message="",
                is_waking=False,
                is_awaited=False,
                replaced_by=base.base.digest,
                deployed_s=status.applications[name].last_deployed_time_s,
            )
            for base in bases
            if not base.is_running and base.state != "asleep"
            for name, old in running.items()
            if old.name == base.base.name
        )

    def _base_of(self, app_name: str, catalog: Catalog) -> BaseVersion | None:
        """The base of an application, which an earlier manager may have started."""
        if app_name in self._seen:
            return self._seen[app_name].base
        return next(
            (base for base in catalog.bases if is_application_of(app_name, base.name, base.digest)),
            None,
        )

    def _backlogs_of(self, bases: Sequence[ServedBase], now_s: float) -> dict[str, Backlog]:
        """The backlogs of the applications that scale by them."""
        return {
            base.app_name: self.sleep.backlog(base.base.digest, now_s)
            for base in bases
            if base.is_running and base.model.autoscaling is not None
        }

    @property
    def is_settled(self) -> bool:
        """Returns True if the last round found no base that is about to change by itself."""
        return all(
            line.state in ("running", "asleep")
            and line.replicas == line.wanted_replicas
            and not line.draining_replicas
            for line in self.lines
        )

    def _lines_of(
        self, served: Sequence[ServedBase], catalog: Catalog, status: ServeStatus, now_s: float
    ) -> tuple[BaseLine, ...]:
        """The bases as operators see them: served, leaving, and refused."""
        lines = [
            self._line(base.base, base.app_name, base.state, base.message, status, now_s)
            for base in served
        ]
        wanted = {base.app_name for base in served}
        for name in status.applications:
            leaving = self._base_of(name, catalog)
            if name.startswith(APP_PREFIX) and name not in wanted and leaving is not None:
                words = "requests in flight finish"
                lines.append(self._line(leaving, name, "draining", words, status, now_s))
        lines += [
            BaseLine(name, None, "failed", reason, "registry")
            for name, reason in self._refused.items()
        ]
        return tuple(lines)

    def _line(
        self,
        base: BaseVersion,
        app_name: str,
        state: BaseState,
        message: str,
        status: ServeStatus,
        now_s: float,
    ) -> BaseLine:
        spec = self._seen.get(app_name)
        app = status.applications.get(app_name)
        counts = count_replicas(app)
        if state in ("asleep", "draining"):  # the remaining replicas receive no new requests
            counts = ReplicaCounts(draining=counts.wanted + counts.draining)
        # The settings of a base that leaves, or that an earlier manager started, are not shown.
        model = None if spec is None or state == "draining" else spec.model
        least, most = (0, 0) if model is None else _replica_range(model)
        engine = None if model is None else model.engine
        return BaseLine(
            name=base.name,
            version=base.version,
            state=state,
            message=message or unplaced_replicas(app),
            source="registry" if spec is None else spec.source,
            replicas=counts.running,
            idle_s=self.sleep.idle_s(base.digest, now_s) if state == "running" else None,
            start_s=self.starts.last_s(base.name),
            idle_timeout_s=None if model is None else model.idle_timeout_s,
            cold_start="" if model is None else model.cold_start,
            application=app_name,
            digest=base.digest,
            wanted_replicas=counts.wanted,
            draining_replicas=counts.draining,
            min_replicas=least,
            max_replicas=most,
            kv_cache_dtype="" if engine is None else engine.kv_cache_dtype,
            quantization="" if engine is None else engine.quantization,
            lora_dtype="" if engine is None else engine.lora_dtype,
            tensor_parallel_size=0 if engine is None else engine.tensor_parallel_size,
        )


def _deploy(spec: BaseSpec, sources: Sources) -> None:
    """Blocks: called in a thread, for each application by itself, so that a refusal concerns no
    other."""
    run = serve.RunTarget(
        target=base_application(spec, sources),
        name=spec.app_name,
        route_prefix=None,
        external_scaler_enabled=spec.model.autoscaling is None,  # for `scale`
    )
    serve.run_many([run], wait_for_applications_running=False)


def _replica_range(model: ModelArgs) -> tuple[int, int]:
    """The least and the most replicas of a base that is awake."""
    scaling = model.autoscaling
    if scaling is None:
        return model.replicas, model.replicas
    return scaling.min_replicas, scaling.max_replicas


def backlog_is_due(backlog: Backlog, last: Backlog | None, age_s: float) -> bool:
    """An empty backlog is sent once, after a backlog that was not empty."""
    is_news = not backlog.is_empty or (last is not None and not last.is_empty)
    return is_news and age_s >= REPORT_INTERVAL_S
