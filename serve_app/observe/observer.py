"""The end of each request: counted, logged and traced. Constructed once per ingress process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from serve_app.config import LoggingArgs, MetricsArgs, TracesArgs
from serve_app.observe.record import RequestRecord
from serve_app.observe.request_log import RequestLog
from serve_app.observe.request_metrics import RequestMetrics
from serve_app.observe.traces import Tracer
from serve_app.tenancy.caller import Caller

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObserveArgs:
    """The configuration of metrics, logs and traces, as an ingress needs it."""

    metrics: MetricsArgs
    logging: LoggingArgs
    traces: TracesArgs


class RequestObserver:
    """All methods belong to the ingress's event loop. No method fails a request."""

    def __init__(
        self,
        metrics: RequestMetrics,
        log: RequestLog | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.metrics = metrics
        self.log = log
        self._tracer = tracer

    def begin(
        self, path: str, headers: Mapping[str, str], arrival_s: float, caller: Caller | None = None
    ) -> RequestRecord:
        """`caller`: of an authenticated request."""
        record = RequestRecord(path, arrival_s, headers.get("x-request-id", ""))
        if caller is not None:
            record.key_id, record.tenant = caller.key_id, caller.policy.tenant
        if self._tracer is not None:
            record.traceparent = headers.get("traceparent", "")
            record.tracestate = headers.get("tracestate", "")
        return record

    def end(self, record: RequestRecord, error: BaseException | None = None) -> None:
        """Ends the record, once: later calls have no effect. `error`: the error that the client
        gets instead of an answer."""
        if record.end_s:
            return
        record.end(error)
        sinks: list[Callable[[RequestRecord], None]] = [self.metrics.observe]
        if self.log is not None:
            sinks.append(self.log.write)
        if self._tracer is not None:
            sinks.append(self._tracer.trace)
        for sink in sinks:
            try:
                sink(record)
            except Exception:
                logger.exception("a finished request could not be recorded")

    def close(self) -> None:
        """Writes the rest of the log and of the traces."""
        if self.log is not None:
            self.log.close()
        if self._tracer is not None:
            self._tracer.close()


def open_observer(
    args: ObserveArgs, ingress_id: str, named_tenants: Collection[str]
) -> RequestObserver:
    """Opens the request log and the exporter of traces that the configuration asks for."""
    metrics = args.metrics
    counts = RequestMetrics(ingress_id, metrics.max_adapters, metrics.max_tenants, named_tenants)
    requests = args.logging.requests
    log = RequestLog.open(requests, ingress_id) if requests.enabled else None
    endpoint = args.traces.otlp_endpoint
    tracer = None if endpoint is None else Tracer.to_otlp(args.traces)
    return RequestObserver(counts, log, tracer)
