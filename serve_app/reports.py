"""What each ingress replica tells the manager about once a second: the manager decides on sleep and
roll-back, the ingresses see the requests. Frozen values, ignorant of HTTP and of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.arms import ArmKey, Tally
from serve_app.request_quarantine import Held

REPORT_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests that wait in an ingress until an engine may have them."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts
    sent_per_s: float = 0.0  # requests that went to engines, of late
    refused_per_s: float = 0.0  # and those that found no place

    @property
    def is_nothing(self) -> bool:
        """Whoever is told nothing of it knows the same."""
        return not self.num_requests and not self.refused_per_s


def total(backlogs: Sequence[Backlog]) -> Backlog:
    return Backlog(
        sum(one.num_requests for one in backlogs),
        sum(one.num_tokens for one in backlogs),
        sum(one.sent_per_s for one in backlogs),
        sum(one.refused_per_s for one in backlogs),
    )


@dataclass(frozen=True, slots=True)
class BaseActivity:
    """Of one base at one ingress."""

    digest: str
    num_open: int  # HTTP requests for it that have not ended, those that wait for it included
    idle_s: float  # since the last one ended; 0 while one is open
    backlog: Backlog = Backlog()


@dataclass(frozen=True, slots=True)
class IngressCounts:
    """The counts of an ingress since it started, in Prometheus' text format."""

    serial: int  # a later one is higher
    text: bytes
    was_taken: bool  # a manager has had some of this ingress's counts before


class CountsTeller:
    """Makes the counts of one ingress."""

    def __init__(self, ingress_id: str) -> None:
        self.ingress_id = ingress_id
        self.render: Callable[[], bytes] = bytes  # in Prometheus' text format
        self.was_taken = False
        self._serial = 0

    def next(self) -> IngressCounts:
        self._serial += 1
        return IngressCounts(self._serial, self.render(), self.was_taken)


@dataclass(frozen=True, slots=True)
class IngressReport:
    ingress_id: str
    bases: tuple[BaseActivity, ...] = ()
    fronts: tuple[str, ...] = ()  # applications that it sends requests to
    # (digest, rest_id) of the bases that it sends nothing to any more
    asleep: tuple[tuple[str, float], ...] = ()
    arms: tuple[tuple[ArmKey, Tally], ...] = ()  # since this ingress started
    quarantined: tuple[Held, ...] = ()
    is_draining: bool = False  # it takes no new requests
    counts: IngressCounts | None = None


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """What an ingress learns of the others."""

    num_ingresses: int  # itself included: what they share, each of them sees a part of
    quarantined: tuple[Held, ...] = ()
