"""A registry that answers with nonsense, or asks to be left alone: every call fails with an error
of the registry's, and soon."""

from __future__ import annotations

import http.server
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from registry.cache import Cache
from registry.client import Registry
from registry.entities import AdapterVersion
from registry.errors import NoAnswerError, NotFoundError, RegistryUnavailableError
from registry.late_answers import _MAX_LATE, AnswerLimit
from registry.mlflow_errors import call
from tests.registry_helpers import embedded_uri
from tests.waiting import eventually

VERSION = AdapterVersion("pirate", 1, "a" * 64, "tiny", "b" * 64, 4, (), "mlflow-artifacts:/x")


def drip(file: BufferedIOBase, part: Literal["head", "body"]) -> None:
    """Sends a byte now and then: no single read of the client's is slow."""
    with suppress(OSError):
        file.write(b"HTTP/1.1 200 OK\r\n" if part == "head" else b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(300):
            file.write(b"x")
            time.sleep(0.1)


class Server:
    """Answers every request in the same way."""

    def __init__(self) -> None:
        server = self
        self.status, self.headers, self.body = 200, dict[str, str](), b""
        self.dripping: list[Literal["head", "body"]] = []  # parts of the next answers

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                if server.dripping:
                    drip(self.wfile, server.dripping.pop(0))
                    return
                self.send_response(server.status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(server.body)))
                self.end_headers()
                self.wfile.write(server.body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"registered_models": 5, "model_version": 7}'),
        (200, b'{"registered_models": [{"name": 5}], "model_version": {"name": 5}}'),
        (200, b'{"registered_models": [{"creation_timestamp": "x"}], "model_version": 7}'),
        (200, b"[" * 100_000),
        (400, b'{"error_code": ["a"], "message": "b"}'),
        (404, b'{"error_code": {}}'),
        (500, b""),
    ],
)
def test_nonsense_is_an_unavailable_registry(
    server: Server, tmp_path: Path, status: int, body: bytes
) -> None:
    """A replica and the command line handle errors of the registry, and no others."""
    server.status, server.headers, server.body = status, {}, body
    registry = Registry(server.uri, timeout_s=10, max_retries=0)
    with pytest.raises(RegistryUnavailableError):
        registry.snapshot()
    with pytest.raises(RegistryUnavailableError):
        registry.fetch(VERSION, Cache(tmp_path / "cache"))


@pytest.mark.parametrize("status", [429, 503])
def test_a_registry_cannot_send_its_reader_to_sleep(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The poller reads one listing at a time: it would miss every change until then, and the
    registry would count as up."""
    slept: list[float] = []
    server.status, server.headers, server.body = status, {"retry-after": "3600"}, b"later"
    registry = Registry(server.uri, timeout_s=10, max_retries=2)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", slept.append)
        with pytest.raises(RegistryUnavailableError):
            registry.snapshot()
    assert sum(slept) < 60


@pytest.mark.parametrize("part", ["head", "body"])
def test_an_answer_that_drips_is_given_up(server: Server, part: Literal["head", "body"]) -> None:
    """The poller reads one listing at a time: it would miss every change until then."""
    server.status, server.headers, server.body = 404, {}, b"{}"
    server.dripping = [part]
    registry = Registry(server.uri, timeout_s=4, max_retries=0)
    with pytest.raises(NoAnswerError, match="timed out"):
        registry.snapshot()
    with pytest.raises(RegistryUnavailableError, match="INTERNAL_ERROR"):
        registry.snapshot()


def test_calls_beyond_too_many_late_ones_fail_until_one_of_them_ends() -> None:
    limit, ends = AnswerLimit(0.01), [threading.Event() for _ in range(_MAX_LATE)]
    for end in ends:
        with pytest.raises(requests.ReadTimeout, match="not complete after"):
            limit.call(end.wait)
    patient = AnswerLimit(120)
    patient._late = limit._late
    with pytest.raises(requests.ReadTimeout, match="earlier answers"):
        patient.call(lambda: "never called")
    ends[0].set()
    eventually(lambda: any(one.done() for one in limit._late))
    assert patient.call(lambda: "called") == "called"
    for end in ends:
        end.set()


def test_an_error_in_time_keeps_its_cause_while_another_is_handled() -> None:
    def refused() -> None:
        try:
            raise requests.ConnectionError("refused")
        except requests.ConnectionError:
            raise MlflowException("it failed")  # noqa: B904, as MLflow does it

    try:
        raise ValueError("before")
    except ValueError:
        with pytest.raises(NoAnswerError):
            call("reading", lambda: AnswerLimit(120).call(refused))


def test_a_database_of_a_newer_release_is_unavailable(tmp_path: Path) -> None:
    uri = embedded_uri(tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'f00000000000'")
        database.execute("DROP TABLE registered_model_aliases")
    database.close()
    with pytest.raises(RegistryUnavailableError, match="f00000000000"):
        Registry(uri).snapshot()


def test_an_answer_after_a_failure_is_an_answer() -> None:
    """An undo runs while the failure is handled, which Python adds to the undo's own error."""

    def missing() -> None:
        raise MlflowException("no such model", error_code=RESOURCE_DOES_NOT_EXIST)

    try:
        raise requests.ConnectionError("refused")
    except requests.ConnectionError:
        with pytest.raises(NotFoundError, match="no such model"):
            call("reading", missing)


def test_an_error_that_may_be_a_bug_is_logged_once_with_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is reported as a registry that is down, at every look at it."""

    def bug() -> None:
        raise AttributeError("no such thing")

    with caplog.at_level(logging.INFO, logger="registry"):
        for _ in range(3):
            with pytest.raises(RegistryUnavailableError, match="AttributeError: no such thing"):
                call("listing", bug)
    (record,) = caplog.records
    assert record.exc_text is not None
    assert "in bug" in record.exc_text
