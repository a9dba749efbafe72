"""The trace of each sampled request, made at its end from the times in its record.

    request
      queue         in the fair queue
      adapter_load  until the adapter was in the engine's memory
      engine_queue  in the engine, until its first step
      prefill       to the first token
      decode        to the last token, with an event for each migration

No span is made while a request runs, and spans are sent by a thread of the SDK, whose bounded
queue drops spans while the collector is away: no request waits for it. Attributes are named by
OpenTelemetry's GenAI conventions and, where these have no name, as in vLLM. Prompts and answers are
not in the record and thus not in a trace.
"""

from __future__ import annotations

import pkgutil
from importlib.metadata import version
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.config import OTLP_EXPORTER, TracesArgs
from serve_app.observe.record import RequestRecord

Attributes: TypeAlias = dict[str, str | int | float | bool | tuple[str, ...]]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
_FLUSH_MS = 2000


class Tracer:
    def __init__(self, processor: SpanProcessor, sample_ratio: float) -> None:
        """`processor` receives the spans of sampled requests."""
        resource = Resource.create(
            {"service.name": "loraplex", "service.version": version("loraplex")}
        )
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("loraplex")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_otlp(cls, args: TracesArgs) -> Tracer:
        """Sends spans to `args.otlp_endpoint`. The configuration has checked that the exporter is
        installed; it is no part of the default installation."""
        exporter = pkgutil.resolve_name(OTLP_EXPORTER)(endpoint=args.otlp_endpoint)
        return cls(BatchSpanProcessor(exporter), args.sample_ratio)

    def trace(self, record: RequestRecord) -> None:
        operation = _OPERATIONS.get(record.path, "generate")
        name = f"{operation} {_model(record)}".rstrip()
        span = self._tracer.start_span(
            name, self._parent(record), SpanKind.SERVER, start_time=_ns(record.arrival_s)
        )
        if span.is_recording():
            span.set_attributes(_attributes(record, operation))
            if record.status >= 400 and record.outcome not in ("left", "refused"):
                span.set_status(Status(StatusCode.ERROR, record.error_code))
            self._stages(record, set_span_in_context(span), span)
        span.end(_ns(record.end_s))

    def close(self) -> None:
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _parent(self, record: RequestRecord) -> Context:
        carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        return self._propagator.extract({k: v for k, v in carrier.items() if v}, Context())

    def _stages(self, record: RequestRecord, parent: Context, span: Span) -> None:
        if (decision := record.decision) is None:  # it has no token
            self._add_moves(record, span)
            return
        chosen_s, first_s = decision.chosen_s, record.first_token_s
        loaded_s = chosen_s + decision.adapter_wait_s
        began_s = loaded_s + decision.engine_queue_s
        stages = [("queue", decision.asked_s - record.queue_s, decision.asked_s)]
        if decision.adapter is not None:
            stages.append(("adapter_load", chosen_s, loaded_s))
        stages.append(("engine_queue", loaded_s, began_s))
        stages.append(("prefill", began_s, max(began_s, first_s)))
        stages.append(("decode", first_s, record.end_s))
        for name, start_s, end_s in stages:
            child = self._tracer.start_span(name, parent, start_time=_ns(start_s))
            if name == "adapter_load":
                child.set_attribute("loraplex.adapter.found_in", decision.adapter_tier)
            if name == "decode":
                self._add_moves(record, child)
            child.end(_ns(end_s))

    def _add_moves(self, record: RequestRecord, span: Span) -> None:
        for move in record.moves:
            span.add_event("migration", {"loraplex.migration.reason": move.reason}, _ns(move.at_s))


def _attributes(record: RequestRecord, operation: str) -> Attributes:
    found: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "loraplex",
        "http.request.method": "POST",
        "http.route": record.path,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "gen_ai.request.choice.count": record.num_choices,
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.latency.e2e": record.end_s - record.arrival_s,
        "loraplex.tenant": record.tenant,
        "loraplex.arm": record.arm,
        "loraplex.request_id": record.request_id,
    }
    if record.first_token_s:
        found["gen_ai.latency.time_to_first_token"] = record.first_token_s - record.arrival_s
    if (decision := record.decision) is not None:
        found["gen_ai.latency.time_in_queue"] = record.queue_s + decision.engine_queue_s
        found["loraplex.replica"] = decision.replica_id
    if (resolution := record.resolution) is not None:
        found["gen_ai.response.model"] = _model(record)
        found["loraplex.base.digest"] = resolution.base.digest
        if resolution.adapters:
            digests = [one.version.digest for one in resolution.adapters]
            found["loraplex.adapter.digest"] = "+".join(digests)
    if record.error_code:
        found["error.type"] = record.error_code
    return {name: value for name, value in found.items() if value not in ("", ())}


def _model(record: RequestRecord) -> str:
    """Returns the registered names with their versions; "" if none was resolved."""
    return "" if record.resolution is None else record.resolution.versions


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
