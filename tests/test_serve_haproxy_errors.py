"""The answers of HAProxy itself: a real one, started as Serve does it, with the configuration that
Serve's own template makes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import openai
import pytest

from serve_app.cli import launch
from serve_app.errors import SHOULD_RETRY
from tests.ports import free_port
from tests.waiting import eventually

# Arguments: HAProxy's port, that of the only server, or 0 for a Serve without applications.
WRITE_CONFIG = """
import sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
port, of_server = map(int, sys.argv[1:])
server = ServerConfig(name="one", host="127.0.0.1", port=of_server)
backend = BackendConfig(name="api", path_prefix="/", app_name="api", servers=[server])
options = HTTPOptions(host="127.0.0.1", port=port)
api = HAProxyApi(HAProxyConfig(http_options=options), {"api": backend} if of_server else {})
api._generate_config_file_internal()
"""


@contextmanager
def haproxy(folder: Path, of_server: int, limit_s: int = 120) -> Iterator[str]:
    """The URL of a HAProxy in front of a server, see WRITE_CONFIG, which may be silent for
    `limit_s`."""
    port = free_port()
    limit = {"RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(limit_s)}
    settings = launch.haproxy_settings(folder) | limit
    command = [sys.executable, "-c", WRITE_CONFIG, str(port), str(of_server)]
    subprocess.run(command, env=os.environ | settings, check=True)
    program = settings["RAY_SERVE_HAPROXY_BINARY_PATH"]
    config = settings["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]
    process = subprocess.Popen([program, "-db", "-f", config])
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: answers(url))
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/routes").status_code > 0
    except httpx.TransportError:
        return False


@contextmanager
def faulty_server() -> Iterator[int]:
    """The port of a healthy server that closes the connection on /closes, and says nothing on
    /silent."""
    is_over = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/silent":
                is_over.wait(120)
            elif self.path == "/-/healthz":
                self.send_response(200)
                self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()


def check(answer: httpx.Response, status: int, code: str, should_retry: str) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert answer.headers[SHOULD_RETRY] == should_retry
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code


def test_a_path_without_an_application_is_not_found(tmp_path: Path) -> None:
    with haproxy(tmp_path, 0) as url, openai.OpenAI(base_url=url, api_key="unused") as client:
        check(httpx.get(f"{url}/v1/models"), 404, "not_found", "false")
        with pytest.raises(openai.NotFoundError, match="No application is served") as raised:
            client.models.list()
        assert raised.value.code == "not_found"


def test_a_server_that_is_gone_makes_the_request_unavailable(tmp_path: Path) -> None:
    with haproxy(tmp_path, free_port()) as url:
        answer = httpx.get(f"{url}/v1/models")
        check(answer, 503, "unavailable", "true")
        assert answer.headers["retry-after"] == "1"
        assert httpx.head(f"{url}/v1/models").status_code == 503


def test_a_server_that_closes_fails_the_request(tmp_path: Path) -> None:
    with faulty_server() as port, haproxy(tmp_path, port) as url:
        check(httpx.get(f"{url}/closes"), 503, "unavailable", "true")


def test_a_server_that_is_silent_fails_the_request(tmp_path: Path) -> None:
    with faulty_server() as port, haproxy(tmp_path, port, limit_s=1) as url:
        check(httpx.get(f"{url}/silent"), 408, "request_timeout", "true")
