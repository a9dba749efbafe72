"""The record of a request, its line in the log and its trace: complete, without any text of it."""

from __future__ import annotations

import gzip
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from pydantic import ValidationError

from engine.errors import EngineDeadError
from registry.catalog import Resolution
from registry.entities import AdapterVersion, BaseVersion, WeightedVersion
from serve_app.config import RequestLogArgs, TracesArgs
from serve_app.errors import ClientGoneError, OverloadedError
from serve_app.observe.observer import RequestObserver
from serve_app.observe.record import Move, RequestRecord
from serve_app.observe.request_log import MAX_WAITING, RequestLog, _Handler, as_line
from serve_app.observe.request_metrics import RequestMetrics
from serve_app.observe.traces import Tracer
from serve_app.routing.decisions import Decision
from tests.ingress_app import make_observer
from tests.waiting import eventually

BASE = BaseVersion("base", 1, "b" * 64, "")
ADAPTER = AdapterVersion("pirate", 3, "a" * 64, "base", BASE.digest, 16, (), "")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED_PARENT = f"{PARENT[:-1]}0"


def finished(error: BaseException | None = None, **fields: Any) -> RequestRecord:
    """A request that arrived at 100 s, had its first token at 101 s and ended at 103 s."""
    decision = Decision("c", "r0", "p", "adapter", None, 7, ADAPTER.digest, 100.3, 100.4)
    decision.adapter_wait_s, decision.engine_queue_s = 0.1, 0.2
    record = RequestRecord(
        "/v1/chat/completions",
        100.0,
        request_id="id-1",
        tenant="gold",
        model="base:pirate",
        resolution=Resolution(BASE, (WeightedVersion(ADAPTER),)),
        arm="canary",
        response_id="chatcmpl-1",
        decision=decision,
        queue_s=0.25,
        first_token_s=101.0,
        num_choices=1,
        prompt_tokens=7,
        cached_tokens=4,
        output_tokens=9,
        is_complete=error is None,
        finish_reasons=() if error else ("stop",),
        moves=(Move(102.0, "death"),),
        error=error,
    )
    for name, value in fields.items():
        setattr(record, name, value)
    record.end()
    record.end_s = 103.0
    return record


# The line


def test_a_line_has_the_names_the_counts_and_the_times_of_a_request() -> None:
    assert json.loads(as_line(finished(is_stream=True))) == {
        "time": "1970-01-01T00:01:43.000+00:00",
        "request_id": "id-1",
        "response_id": "chatcmpl-1",
        "path": "/v1/chat/completions",
        "status": 200,
        "outcome": "ok",
        "tenant": "gold",
        "model": "base:pirate",
        "base": "base@1",
        "base_digest": BASE.digest,
        "adapter": "pirate@3",
        "adapter_digest": ADAPTER.digest,
        "arm": "canary",
        "stream": True,
        "finish_reasons": ["stop"],
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "output_tokens": 9,
        "queue_s": 0.25,
        "ttft_s": 1.0,
        "total_s": 3.0,
        "migrations": ["death"],
        "replica": "r0",
        "adapter_wait_s": 0.1,
        "engine_queue_s": 0.2,
    }


@pytest.mark.parametrize(
    ("error", "status", "outcome", "code"),
    [
        (OverloadedError("full"), 429, "refused", "overloaded"),
        (EngineDeadError("gone"), 503, "error", "engine_unavailable"),
        (RuntimeError("a secret"), 500, "error", "internal"),
        (ClientGoneError(), 499, "left", None),
    ],
)
def test_a_line_has_the_status_of_a_failure_and_not_its_words(
    error: Exception, status: int, outcome: str, code: str | None
) -> None:
    line = as_line(finished(error))
    fields = json.loads(line)
    assert (fields["status"], fields["outcome"], fields.get("error")) == (status, outcome, code)
    assert "secret" not in line


def test_a_stream_that_is_closed_early_counts_as_left() -> None:
    assert json.loads(as_line(finished(is_complete=False)))["outcome"] == "left"


def test_a_clients_model_cannot_break_the_line_or_fill_the_log() -> None:
    record = finished()
    record.set_body('x\n{"y":1}\u2028' + "z" * 10_000, is_stream=False)
    line = as_line(record)
    assert len(line.splitlines()[0]) < 2_000
    assert "\n" not in line
    assert len(json.loads(line)["model"]) == 128


# The file


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def open_log(path: Path, **fields: Any) -> RequestLog:
    log = RequestLog.open(RequestLogArgs(path=path, **fields), "i0")
    assert log is not None
    return log


def test_a_finished_request_is_a_line_of_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "requests.jsonl"
    log = open_log(path)
    log.write(finished())
    eventually(lambda: len(lines_of(path)) == 1)
    assert path.stat().st_mode & 0o777 == 0o600
    log.write(finished())
    log.close()
    assert [json.loads(line)["request_id"] for line in lines_of(path)] == ["id-1", "id-1"]


def test_the_file_is_rotated_by_size_and_old_parts_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = open_log(path, max_bytes=2_000, num_files=3)
    for number in range(40):
        log.write(finished(request_id=f"id-{number}"))
    log.close()
    parts = sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("."))
    assert parts == ["requests.jsonl", "requests.jsonl.1", "requests.jsonl.2"]
    assert all((tmp_path / name).stat().st_size <= 2_000 for name in parts)
    newest = json.loads(lines_of(path)[-1])
    assert newest["request_id"] == "id-39"


def test_two_ingresses_write_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    first, second = open_log(path), open_log(path)
    first.write(finished(request_id="first"))
    second.write(finished(request_id="second"))
    first.close()
    second.close()
    assert '"first"' in path.read_text()
    assert '"second"' in (tmp_path / "requests-1.jsonl").read_text()
    third = open_log(path)  # the first has ended
    third.write(finished(request_id="third"))
    third.close()
    assert '"third"' in path.read_text()


def test_a_log_that_cannot_be_opened_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    args = RequestLogArgs(path=tmp_path / "file" / "requests.jsonl")
    with caplog.at_level(logging.ERROR):
        assert RequestLog.open(args, "i0") is None
    assert str(args.path) in caplog.text


@pytest.fixture(autouse=True)
def _logs_close_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the lines take that wait."""
    monkeypatch.setattr("serve_app.observe.request_log._CLOSE_S", 120.0)


class Stuck(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.may_go.wait(120)
        self.count += 1


def test_lines_that_a_slow_disk_cannot_take_are_dropped_and_counted() -> None:
    handler = Stuck()
    log = RequestLog(handler, "i0")
    record = finished()
    for _ in range(MAX_WAITING + 10):
        log.write(record)
    dropped = float(log.text().decode().split()[-1])
    assert 9 <= dropped <= 10  # the thread may hold one
    handler.may_go.set()
    log.close()
    assert handler.count == MAX_WAITING + 10 - dropped


# The trace


class Traces:
    def __init__(self, sample_ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = Tracer(SimpleSpanProcessor(self.exporter), sample_ratio)

    def of(self, record: RequestRecord) -> dict[str, ReadableSpan]:
        self.exporter.clear()
        self.tracer.trace(record)
        return {span.name: span for span in self.exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return round(span.start_time / 1e9, 3), round(span.end_time / 1e9, 3)


def test_a_trace_has_a_span_for_each_stage_of_the_request() -> None:
    spans = Traces().of(finished())
    assert {name: seconds(span) for name, span in spans.items()} == {
        "chat pirate@3": (100.0, 103.0),
        "queue": (100.05, 100.3),
        "adapter_load": (100.4, 100.5),
        "engine_queue": (100.5, 100.7),
        "prefill": (100.7, 101.0),
        "decode": (101.0, 103.0),
    }
    root = spans["chat pirate@3"]
    assert root.context is not None
    for name, span in spans.items():
        if name != "chat pirate@3":
            assert span.parent is not None
            assert span.parent.span_id == root.context.span_id
    (event,) = spans["decode"].events
    assert (event.name, event.timestamp / 1e9) == ("migration", 102.0)


def test_a_trace_has_the_names_of_the_genai_conventions_and_no_text() -> None:
    root = Traces().of(finished())["chat pirate@3"]
    found = dict(root.attributes or {})
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "base:pirate"
    assert found["gen_ai.response.model"] == "pirate@3"
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["gen_ai.usage.input_tokens"] == 7
    assert found["gen_ai.usage.output_tokens"] == 9
    assert found["gen_ai.latency.time_in_queue"] == pytest.approx(0.45)
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(1.0)
    assert found["gen_ai.latency.e2e"] == pytest.approx(3.0)
    assert not [name for name in found if "prompt" in name or "message" in name]


def test_a_failure_has_its_code_and_a_refusal_is_no_error() -> None:
    root = Traces().of(finished(EngineDeadError("a secret")))["chat pirate@3"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "engine_unavailable"
    refused = Traces().of(finished(OverloadedError("full"), resolution=None, decision=None))
    assert set(refused) == {"chat"}
    assert refused["chat"].status.status_code is StatusCode.UNSET


def test_the_trace_of_the_caller_goes_on() -> None:
    root = Traces(sample_ratio=0.0).of(finished(traceparent=PARENT))["chat pirate@3"]
    assert root.context is not None
    assert root.parent is not None
    assert f"{root.context.trace_id:032x}" == PARENT[3:35]
    assert f"{root.parent.span_id:016x}" == PARENT[36:52]
    assert not Traces(sample_ratio=1.0).of(finished(traceparent=UNSAMPLED_PARENT))
    for broken in ("x", "00-0-0-01", PARENT[:-4], "é" * 600):
        assert len(Traces().of(finished(traceparent=broken))) == 6


def test_the_share_of_traced_requests_is_the_sample_ratio() -> None:
    traces = Traces(sample_ratio=0.1)
    traced = sum(bool(traces.of(finished())) for _ in range(2_000))
    assert 120 < traced < 280  # six standard deviations


# The observer


class Failing(Tracer):
    def __init__(self) -> None:
        self.count = 0

    def trace(self, record: RequestRecord) -> None:
        self.count += 1
        raise OSError("the collector is away")


def test_a_sink_that_fails_neither_raises_nor_stops_the_others(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log, tracer = open_log(path), Failing()
    observer = RequestObserver(RequestMetrics("i0", 1, 1, ()), log, tracer)
    record = observer.begin("/v1/completions", {"x-request-id": "id-7"}, time.time())
    observer.end(record, OverloadedError("full"))
    observer.end(record, RuntimeError("a later failure"))
    log.close()
    (line,) = lines_of(path)
    assert json.loads(line)["status"] == 429
    assert tracer.count == 1


def test_a_request_that_ends_with_an_exception_has_it_in_its_record() -> None:
    observer = make_observer()
    record = observer.begin("/v1/completions", {}, time.time())
    observer.end(record, OverloadedError("full"))
    assert (record.outcome, record.status) == ("refused", 429)
    assert record.end_s > 0
    assert record.error is None  # its traceback would hold the body


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT TESTED: no /dev/full here")
def test_lines_that_a_full_disk_cannot_take_are_counted_and_the_log_closes() -> None:
    log = RequestLog(_Handler(Path("/dev/full"), 0, 1), "i0")
    for _ in range(5):
        log.write(finished())
    log.close()
    assert not log._thread.is_alive()
    assert float(log.text().decode().split()[-1]) == 5


# An OTLP receiver


@contextmanager
def receiver(*, status: int = 200) -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        server.server_close()


def test_spans_arrive_by_otlp() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with receiver() as (url, received):
        tracer = Tracer.to_otlp(TracesArgs(otlp_endpoint=url, sample_ratio=1.0))
        tracer.trace(finished())
        tracer.close()
    resources = [one for request in received for one in request.resource_spans]
    resource = resources[0]  # a batch of each request that was sent
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    assert {span.name for span in spans} >= {"chat pirate@3", "queue", "decode"}
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "loraplex"


def test_a_receiver_that_refuses_delays_no_request() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with receiver(status=400) as (url, received):
        tracer = Tracer.to_otlp(TracesArgs(otlp_endpoint=url, sample_ratio=1.0))
        observer = RequestObserver(RequestMetrics("i0", 1, 1, ()), None, tracer)
        for _ in range(5_000):  # more than the SDK's queue holds
            record = replace(finished(), end_s=0.0)
            observer.end(record)
        assert record.end_s > 0
        eventually(lambda: bool(received))


def test_an_endpoint_without_the_exporter_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.config.platform.find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r"install loraplex\[otel\]"):
        TracesArgs(otlp_endpoint="http://collector:4318/v1/traces")
    assert TracesArgs().otlp_endpoint is None
