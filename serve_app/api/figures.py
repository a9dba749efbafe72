"""The figures of each base that an ingress adds to its report, for the console's charts."""

from __future__ import annotations

from serve_app.dispatch.gateway import Gateway
from serve_app.messages import BaseFigures, EngineFigures
from serve_app.observe.request_metrics import RequestCounts, RequestMetrics
from serve_app.routing.state import routing_state

_ERRORS = ("error", "non_finite")
_NONE = RequestCounts()


def figures_of(gateway: Gateway, metrics: RequestMetrics) -> tuple[BaseFigures, ...]:
    """Returns the figures of every base that runs or that had a request. Two versions of a base
    that run side by side count as one base."""
    names = dict.fromkeys((*metrics.bases, *(one.base.name for one in gateway.handles)))
    return tuple(_figures(name, gateway, metrics.bases.get(name, _NONE)) for name in names)


def _figures(name: str, gateway: Gateway, counts: RequestCounts) -> BaseFigures:
    apps = [handle.app_name for handle in gateway.handles if handle.base.name == name]
    outcomes = counts.outcomes
    return BaseFigures(
        name,
        outcomes.total(),
        sum(outcomes[outcome] for outcome in _ERRORS),
        outcomes["refused"],
        counts.prompt_tokens,
        counts.output_tokens,
        tuple(counts.first_token.counts),
        sum(gateway.queues.backlog(app).num_requests for app in apps),
        tuple(
            EngineFigures(
                view.replica_id, view.load.num_running, view.load.num_waiting, view.load.kv_usage
            )
            for app in apps
            for view in routing_state(app).views.replicas
            if view.is_connected
        ),
    )
