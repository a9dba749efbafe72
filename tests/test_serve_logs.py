"""The server's log: its lines and its rotation."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.entities import BaseVersion
from serve_app.config import LOG_FORMAT, ModelArgs, PlatformArgs, log_format
from serve_app.control.deployments import base_application
from serve_app.control.manager import manager_application
from serve_app.logs import JsonStream, RotatingOutput, backup, install
from serve_app.platform_view import BaseSpec, Sources
from tests.fakes_registry import FolderRegistry


@pytest.fixture
def _loggers() -> Iterator[None]:
    """Restores the loggers after the test."""
    rooms = [logging.getLogger(name) for name in ("serve_app", "registry", "engine", "lora")]
    before = [(room, room.handlers[:], room.level) for room in rooms]
    yield
    for room, handlers, level in before:
        room.handlers[:] = handlers
        room.setLevel(level)


def test_a_full_log_is_exchanged_without_losing_a_line(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    rotation = RotatingOutput(log, max_bytes=100, num_files=3, descriptors=(descriptor,))
    try:
        for number in range(30):
            os.write(descriptor, b"line %02d\n" % number)
            rotation.rotate_if_full()
    finally:
        os.close(descriptor)
    files = [backup(log, 2), backup(log, 1), log]
    assert set(tmp_path.iterdir()) == set(files)  # and no third one
    assert [len(path.read_text().splitlines()) for path in files] == [13, 13, 4]
    lines = "".join(path.read_text() for path in files).split("\n")
    assert lines[:-1] == [f"line {number:02}" for number in range(30)]


def test_a_log_that_is_always_full_keeps_the_number_of_its_files(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    rotation = RotatingOutput(log, max_bytes=1, num_files=3, descriptors=(descriptor,))
    try:
        for number in range(9):
            os.write(descriptor, b"%d" % number)
            assert rotation.rotate_if_full()
    finally:
        os.close(descriptor)
    assert {path.name for path in tmp_path.iterdir()} == {log.name, "serve.log.1", "serve.log.2"}
    assert [backup(log, n).read_text() for n in (1, 2)] == ["8", "7"]


def test_every_line_of_a_json_log_is_one_object() -> None:
    target = io.StringIO()
    stream = JsonStream(target)
    stream.write('\x1b[36m(ServeReplica:api:ingress pid=7)\x1b[0m {"message": "a", "level"')
    stream.write(': "INFO"}\n(ProxyActor pid=8) Traceback "x"\n\nplain\nunfini')
    assert [json.loads(line) for line in target.getvalue().splitlines()] == [
        {"message": "a", "level": "INFO", "process": "ServeReplica:api:ingress", "pid": 7},
        {"message": 'Traceback "x"', "process": "ProxyActor", "pid": 8},
        {"message": "plain"},
    ]


@pytest.mark.usefixtures("_loggers")
def test_a_json_line_names_its_request_and_carries_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    install("json", lambda: "req-1")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("serve_app.http.asgi").exception("request %d failed", 7)
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["request_id"]) == ("request 7 failed", "req-1")
    assert (line["level"], line["logger"]) == ("ERROR", "serve_app.http.asgi")
    assert "RuntimeError: broken" in line["exception"]


@pytest.mark.usefixtures("_loggers")
def test_a_text_line_has_the_time_and_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    install("text", lambda: "req-1")
    logging.getLogger("registry.quota").info("evicted")
    install("text")  # again: one handler
    logging.getLogger("registry.quota").info("evicted")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("INFO 20")
    assert first.endswith("registry.quota req-1 -- evicted")
    assert second.endswith("registry.quota -- evicted")


def test_an_unknown_log_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT, "xml")
    with pytest.raises(ValueError, match=r"LORAPLEX_LOG_FORMAT is 'xml'"):
        log_format()


def test_no_deployment_of_ours_writes_a_line_for_each_call() -> None:
    """An application that the manager makes does not inherit the file's logging_config."""
    sources = Sources(lambda: FolderRegistry(Path()), "engine.factory:open_engine")
    version = BaseVersion("base", 1, "d" * 64, "", ())
    spec = BaseSpec(version, ModelArgs(name="base"), "cpu", "base--base")
    for made in (base_application(spec, sources), manager_application(PlatformArgs(), sources)):
        config = made._bound_deployment._deployment_config  # type: ignore[attr-defined]
        assert config.logging_config["enable_access_log"] is False
