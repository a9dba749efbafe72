"""The state that the routes of an ingress replica share, set once on the FastAPI application."""

from __future__ import annotations

import time
from functools import partial

from fastapi import Request

from registry.webhooks import SeenDeliveries
from serve_app.api.model_list import ModelList
from serve_app.api.scrape import Scrape, collect, figures_of
from serve_app.config import IngressArgs
from serve_app.dispatch.activity import CountsReporter
from serve_app.dispatch.cold_start import ColdStarts
from serve_app.dispatch.gateway import Gateway
from serve_app.dispatch.grammar_checks import GrammarChecks
from serve_app.dispatch.shadow import Shadows
from serve_app.errors import ServiceUnavailableError
from serve_app.metrics.exposition import join_texts
from serve_app.metrics.ingress import IngressMetrics
from serve_app.observe.observer import RequestObserver
from serve_app.platform_view import PlatformView
from serve_app.routing.decisions import decisions_text
from serve_app.tasks import failures_text
from serve_app.tenancy.authentication import Authenticator
from serve_app.tenancy.limits import Accounts
from serve_app.text_workers.pool import TextPool


class IngressState:
    def __init__(
        self,
        args: IngressArgs,
        gateway: Gateway,
        texts: TextPool,
        observer: RequestObserver,
        authenticator: Authenticator | None = None,
    ) -> None:
        """`texts` parses and tokenizes long bodies. `authenticator`: None if requests need no
        key."""
        self.args = args
        self.gateway = gateway
        self.queues = gateway.queues
        self.texts = texts
        self.observer = observer
        self.authenticator = authenticator
        self.accounts = None if authenticator is None else make_accounts(gateway)
        self.metrics = IngressMetrics(gateway.ingress_id)
        self.cold_starts = ColdStarts(gateway)
        self.shadows = Shadows(gateway.migrations, gateway.arms, args.max_shadow_requests)
        figures = partial(figures_of, gateway, observer.metrics)
        self.counts = CountsReporter(gateway.ingress_id, self.own_metrics, figures)
        self.scrape = Scrape(partial(collect, gateway, self.counts))
        self.grammars = GrammarChecks()
        self.deliveries = SeenDeliveries()
        self.model_list = ModelList()

    def own_metrics(self) -> bytes:
        """Returns the metrics of this ingress replica."""
        gateway, ingress = self.gateway, self.gateway.ingress_id
        num_rollbacks = () if gateway.view is None else gateway.view.canary.num_rollbacks
        log, keys, accounts = self.observer.log, self.authenticator, self.accounts
        bases = gateway.connections.bases.values()
        return join_texts(
            (
                self.metrics.text(gateway.stream.num_open),
                decisions_text(((one.name, one.state.decisions) for one in bases), ingress),
                gateway.migrations.metrics.text(),
                gateway.arms.text(
                    ingress, num_rollbacks, self.shadows.num_open, self.shadows.num_dropped
                ),
                self.queues.stats.text(),
                self.observer.metrics.text(time.monotonic()),
                b"" if log is None else log.text(),
                failures_text({"process": "ingress", "ingress": ingress}),
                b"" if keys is None else keys.text(ingress),
                b"" if accounts is None else accounts.limits.text(),
            )
        )


def make_accounts(gateway: Gateway) -> Accounts:
    lease, record = gateway.manager.lease.remote, gateway.manager.record_usage.remote
    return Accounts(gateway.ingress_id, lease, record, lambda: gateway.num_ingresses)


def state_of(request: Request) -> IngressState:
    state: IngressState = request.app.state.ingress
    return state


def view_of(gateway: Gateway) -> PlatformView:
    """Returns the view of the platform. Raises ServiceUnavailableError until the first arrives."""
    if gateway.view is None:
        raise ServiceUnavailableError("The server is starting.", 2)
    return gateway.view
