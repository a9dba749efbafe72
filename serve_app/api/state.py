"""The state that the routes of an ingress replica share, set once on the FastAPI application."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import Request

from registry.webhooks import SeenDeliveries
from serve_app.admission.queue import AdmissionQueues
from serve_app.api.model_list import ModelList
from serve_app.api.scrape import Scrape
from serve_app.config import IngressArgs
from serve_app.dispatch.activity import CountsReporter
from serve_app.dispatch.cold_start import ColdStarts
from serve_app.dispatch.gateway import Gateway
from serve_app.dispatch.grammar_checks import GrammarChecks
from serve_app.dispatch.shadow import Shadows
from serve_app.errors import ServiceUnavailableError
from serve_app.metrics.ingress import IngressMetrics
from serve_app.observe.observer import RequestObserver
from serve_app.platform_view import PlatformView
from serve_app.tenancy.accounts import Accounts
from serve_app.tenancy.authentication import Authenticator
from serve_app.text_workers.pool import TextPool


@dataclass(frozen=True, slots=True)
class IngressState:
    args: IngressArgs
    gateway: Gateway
    metrics: IngressMetrics
    cold_starts: ColdStarts
    shadows: Shadows
    queues: AdmissionQueues
    texts: TextPool  # parses and tokenizes long bodies
    counts: CountsReporter
    scrape: Scrape
    observer: RequestObserver
    authenticator: Authenticator | None = None  # None: requests need no key
    accounts: Accounts | None = None  # None: requests need no key
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    deliveries: SeenDeliveries = field(default_factory=SeenDeliveries)
    model_list: ModelList = field(default_factory=ModelList)


def state_of(request: Request) -> IngressState:
    state: IngressState = request.app.state.ingress
    return state


def view_of(gateway: Gateway) -> PlatformView:
    """Returns the view of the platform. Raises ServiceUnavailableError until the first arrives."""
    if gateway.view is None:
        raise ServiceUnavailableError("The server is starting.", 2)
    return gateway.view
