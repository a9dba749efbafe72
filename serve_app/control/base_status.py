"""How an application of a base stands, read out of what Serve tells of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ray.serve.schema import ApplicationStatusOverview

from serve_app.messages import DOOR
from serve_app.platform_view import BaseState

_ERROR_LINE = re.compile(r"^(?:\S+: )?\s*([\w.]+(?:Error|Exception|Exit|Interrupt)): (.+)$")
_MAX_WORDS = 400
_NO_ROOM = re.compile(r"has (\d+) replicas that have taken more than .* to be scheduled")
_REQUIRED = re.compile(r"Resources required for each replica: (.+?), total resources")
# A new controller asks the replicas of the one before how they are: meanwhile they serve on.
_ANSWERING = ("RUNNING", "RECOVERING", "UPDATING", "PENDING_MIGRATION")
_WANTED = ("STARTING", *_ANSWERING)


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    running: int = 0
    wanted: int = 0  # those that start or wait for room included
    draining: int = 0


def count_replicas(app: ApplicationStatusOverview | None) -> ReplicaCounts:
    if app is None:
        return ReplicaCounts()
    counts: Counter[str] = Counter()
    for of_deployment, deployment in app.deployments.items():
        if of_deployment != DOOR:
            counts.update(deployment.replica_states)
    if app.status == "DELETING":
        return ReplicaCounts(draining=counts.total())
    answering, wanted = (sum(counts[name] for name in names) for names in (_ANSWERING, _WANTED))
    return ReplicaCounts(answering, wanted, counts["STOPPING"])


def lack_in_words(app: ApplicationStatusOverview | None) -> str:
    """Of replicas that no node has room for; "" if Serve tells of none."""
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
        return "starting", "waits for the requests of the engines before"
    if runs(app):
        return "running", ""
    parts = [app.message, *(deployment.message for deployment in app.deployments.values())]
    return ("failed" if app.status == "DEPLOY_FAILED" else "starting"), failure_in_words(parts)


def failure_in_words(messages: Sequence[str]) -> str:
    """The error that ended a start, out of Serve's message with its traceback; "" if it tells
    of none."""
    for message in reversed(messages):
        for line in reversed(message.splitlines()):
            if (found := _ERROR_LINE.match(line)) is not None:
                return found[2].strip()[:_MAX_WORDS]
    return ""
