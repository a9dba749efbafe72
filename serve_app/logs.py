"""The server's log: its lines, as text or as JSON, and its rotation by size.

Every process of the server writes its lines to standard error (`install`); Ray forwards them to the
process that runs `serve_child`, whose standard output is the log file.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

LOG_BYTES = 64 * 1024**2  # per file; the log has at most LOG_FILES files
LOG_FILES = 3
_CHECK_S = 5.0

_PACKAGES = ("serve_app", "registry", "engine", "lora")
_TEXT = "%(levelname)s %(asctime)s %(name)s%(request_id)s -- %(message)s"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Ray prefixes each line that it forwards with its process.
_ORIGIN = re.compile(r"^\((?P<process>\S+) pid=(?P<pid>\d+)\) ?")


def install(log_format: str, request_id: Callable[[], str] = lambda: "") -> None:
    """Prints the lines of this process's loggers from INFO on to standard error, as `text` or
    `json`. `request_id` returns the id of the request being handled, or an empty string. A second
    call replaces the first."""
    handler = _Printer(logging.INFO)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    before = "" if log_format == "json" else " "

    def add_request_id(record: logging.LogRecord) -> bool:
        found = request_id()
        record.request_id = before + found if found else ""
        return True

    handler.addFilter(add_request_id)
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)


def install_in_replica(log_format: str) -> None:
    """Calls `install` with the request id of Serve, which responses carry in `x-request-id`."""
    from ray.serve.context import _get_serve_request_context  # here: the CLI does not load Ray

    install(log_format, lambda: _get_serve_request_context().request_id)


class _Printer(logging.Handler):
    """Prints to the present `sys.stderr`, which Serve may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := getattr(record, "request_id", ""):
            fields["request_id"] = found
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class JsonStream(io.TextIOBase):
    """A text stream that writes each line as one JSON object to `target`. A line that is a JSON
    object keeps its fields, any other becomes `message`; `process` and `pid` name its origin if
    Ray added it."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._rest = ""
        self._mutex = threading.Lock()  # Ray prints from several threads

    def write(self, text: str) -> int:
        with self._mutex:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                if line.strip():
                    self._target.write(as_json(line) + "\n")
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def fileno(self) -> int:
        return self._target.fileno()

    def writable(self) -> bool:
        return True


def as_json(line: str) -> str:
    plain = _ANSI.sub("", line)
    origin = _ORIGIN.match(plain)
    message = plain if origin is None else plain[origin.end() :]
    try:
        parsed = json.loads(message)
    except ValueError:
        parsed = None
    fields: dict[str, object] = parsed if isinstance(parsed, dict) else {"message": message}
    if origin is not None:
        fields |= {"process": origin["process"], "pid": int(origin["pid"])}
    return json.dumps(fields)


class RotatingOutput:
    """Rotates the file `log`, this process's standard output and error, to keep the log within
    `max_bytes` times `num_files`. Older parts are `log.1`, `log.2` and so on. The descriptors are
    redirected to a new file, so no line is lost or cut."""

    def __init__(
        self,
        log: Path,
        max_bytes: int = LOG_BYTES,
        num_files: int = LOG_FILES,
        descriptors: tuple[int, ...] = (1, 2),
    ) -> None:
        self._log = log
        self._max_bytes = max_bytes
        self._num_files = num_files
        self._descriptors = descriptors

    def start(self) -> None:
        """Checks the size every five seconds, in a daemon thread."""
        threading.Thread(target=self._run, name="log-rotation", daemon=True).start()

    def rotate_if_full(self) -> bool:
        if os.fstat(self._descriptors[0]).st_size < self._max_bytes:
            return False
        for number in range(self._num_files - 1, 0, -1):
            older = backup(self._log, number - 1) if number > 1 else self._log
            if older.exists():
                older.replace(backup(self._log, number))
        fresh = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for descriptor in self._descriptors:
            os.dup2(fresh, descriptor)
        os.close(fresh)
        return True

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(_CHECK_S):
            try:
                self.rotate_if_full()
            except OSError as error:  # a full disk, for instance: the next check tries again
                print(f"the log {self._log} cannot be rotated: {error}", file=sys.stderr)


def backup(log: Path, number: int) -> Path:
    """Returns the path of an older part of a log; number 1 is the newest."""
    return log.with_name(f"{log.name}.{number}")
