"""The states of bases: each as read from Serve's status of its application, and the metrics of all,
which include how long starts last."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus

from serve_app.messages import DOOR
from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import SECONDS, Histogram
from serve_app.platform_view import BaseLine, BaseState

_ERROR_LINE = re.compile(r"^(?:\S+: )?\s*([\w.]+(?:Error|Exception|Exit|Interrupt)): (.+)$")
_MAX_CHARS = 400
_STATES: tuple[str, ...] = get_args(BaseState)
_REFUSAL = "UnsupportedModelError"  # of the base's files with its settings: the next start has it
_NO_ROOM = re.compile(r"has (\d+) replicas that have taken more than .* to be scheduled")
_REQUIRED = re.compile(r"Resources required for each replica: (.+?), total resources")
# After a restart of Serve's controller replicas are RECOVERING while they keep serving.
_ANSWERING = ("RUNNING", "RECOVERING", "UPDATING", "PENDING_MIGRATION")
_WANTED = ("STARTING", *_ANSWERING)


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    running: int = 0
    wanted: int = 0  # includes replicas that start or wait for a node
    draining: int = 0


def read_status() -> ServeStatus:
    """Returns the status of all applications, as `serve.status()` does. That call makes models of
    the controller's answer, for which it pickles the router class of each deployment by value:
    nine tenths of its time, and the largest part of a manager's while a base starts. Raises
    RayServeException where no controller runs."""
    client = _get_global_client()
    assert client is not None  # else it has raised
    details = client.get_serve_details()
    return ServeStatus(
        applications={
            name: ApplicationStatusOverview(
                status=app["status"],
                message=app["message"],
                last_deployed_time_s=app["last_deployed_time_s"],
                deployments={
                    deployment["name"]: DeploymentStatusOverview(
                        status=deployment["status"],
                        status_trigger=deployment["status_trigger"],
                        replica_states=Counter(one["state"] for one in deployment["replicas"]),
                        message=deployment["message"],
                    )
                    for deployment in app["deployments"].values()
                },
            )
            for name, app in details["applications"].items()
        }
    )


def count_replicas(app: ApplicationStatusOverview | None) -> ReplicaCounts:
    if app is None:
        return ReplicaCounts()
    counts: Counter[str] = Counter()
    for name, deployment in app.deployments.items():
        if name != DOOR:
            counts.update(deployment.replica_states)
    if app.status == "DELETING":
        return ReplicaCounts(draining=counts.total())
    answering, wanted = (sum(counts[state] for state in states) for states in (_ANSWERING, _WANTED))
    return ReplicaCounts(answering, wanted, counts["STOPPING"])


def unplaced_replicas(app: ApplicationStatusOverview | None) -> str:
    """A sentence about replicas for which no node has the resources; "" if there are none."""
    if app is None:
        return ""
    counts = count_replicas(app)
    for deployment in app.deployments.values():
        if counts.wanted > counts.running and (found := _NO_ROOM.search(deployment.message)):
            required = _REQUIRED.search(deployment.message)
            needs = f" with {required[1]} free" if required else ""
            return f"{found[1]} of {counts.wanted} replicas wait for a node{needs}"
    return ""


def runs(app: ApplicationStatusOverview | None) -> bool:
    return count_replicas(app).running > 0


def state_of(app: ApplicationStatusOverview | None) -> tuple[BaseState, str]:
    if app is None:
        return "starting", ""
    if app.status == "DELETING":
        return "starting", "waits until the requests of the previous engines end"
    if runs(app):
        return "running", ""
    state: BaseState = "failed" if app.status == "DEPLOY_FAILED" else "starting"
    return state, start_error(_messages(app))[1]


def is_refused(app: ApplicationStatusOverview | None) -> bool:
    """Returns True if the start failed because the engine refuses the base with its settings."""
    if app is None or app.status != "DEPLOY_FAILED" or runs(app):
        return False
    return start_error(_messages(app))[0].endswith(_REFUSAL)


def _messages(app: ApplicationStatusOverview) -> list[str]:
    return [app.message, *(deployment.message for deployment in app.deployments.values())]


def start_error(messages: Sequence[str]) -> tuple[str, str]:
    """Returns the class and the words of the error that ended a start, from Serve's messages with
    their traceback; empty if they contain none."""
    for message in reversed(messages):
        for line in reversed(message.splitlines()):
            if (found := _ERROR_LINE.match(line)) is not None:
                return found[1], found[2].strip()[:_MAX_CHARS]
    return "", ""


@dataclass(slots=True)
class StartLog:
    """The starts of bases since this manager began."""

    histograms: dict[str, Histogram] = field(default_factory=dict)  # by base name
    cold_starts: Counter[str] = field(default_factory=Counter)
    _began_s: dict[str, float] = field(default_factory=dict)  # by application
    _last_s: dict[str, float] = field(default_factory=dict)  # by base name

    def begin(self, application: str, now_s: float) -> None:
        self._began_s[application] = now_s

    def end(self, application: str, base: str, now_s: float, *, is_cold: bool) -> None:
        """Called each time the application is seen running: only the first call counts."""
        began_s = self._began_s.pop(application, None)
        if began_s is None:
            return
        self._last_s[base] = start_s = now_s - began_s
        self.histograms.setdefault(base, Histogram(SECONDS)).observe(start_s)
        if is_cold:
            self.cold_starts[base] += 1

    def drop(self, application: str) -> None:
        self._began_s.pop(application, None)

    def last_s(self, base: str) -> float | None:
        return self._last_s.get(base)

    def text(self, lines: Sequence[BaseLine]) -> bytes:
        # Two versions of a base may exist at a time, the new one starting, the old one draining.
        found = {(line.name, line.state) for line in lines}
        states = {
            (name, state): float((name, state) in found)
            for name in sorted({line.name for line in lines})
            for state in _STATES
        }
        replicas: Counter[tuple[str, str]] = Counter()
        for line in lines:
            replicas[line.name, "running"] += line.replicas
            replicas[line.name, "wanted"] += line.wanted_replicas
            replicas[line.name, "draining"] += line.draining_replicas
        cold_starts = {base: self.cold_starts[base] for base in self.histograms}
        return as_text(
            gauge("loraplex_base_state", states, {}, "base", "state"),
            gauge("loraplex_replicas", replicas, {}, "model_name", "state"),
            counter("loraplex_base_cold_starts", cold_starts, {}, "base"),
            histogram("loraplex_base_start_seconds", self.histograms, {}, "base"),
        )
