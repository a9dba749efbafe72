"""What each ingress replica tells the manager about once a second: the manager decides on sleep and
roll-back, the ingresses see the requests. Frozen values, ignorant of HTTP and of the registry.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.arms import ArmKey, Tally

REPORT_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests that wait in an ingress until an engine may have them."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts


@dataclass(frozen=True, slots=True)
class BaseActivity:
    """Of one base at one ingress."""

    digest: str
    num_open: int  # HTTP requests for it that have not ended, those that wait for it included
    idle_s: float  # since the last one ended; 0 while one is open
    backlog: Backlog = Backlog()


@dataclass(frozen=True, slots=True)
class IngressReport:
    ingress_id: str
    bases: tuple[BaseActivity, ...] = ()
    fronts: tuple[str, ...] = ()  # applications that it sends requests to
    # (digest, rest_id) of the bases that it sends nothing to any more
    asleep: tuple[tuple[str, float], ...] = ()
    arms: tuple[tuple[ArmKey, Tally], ...] = ()  # since this ingress started
