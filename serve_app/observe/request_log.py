"""The request log: one JSON line per finished request, rotated by size.

A line is made and written in a thread of its own. On the event loop a request costs one `put`; when
the disk is too slow for the bounded queue, lines are dropped and counted. Each ingress process has
a file of its own, because a process that rotates a shared file cuts the lines of the others off.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import threading
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

import msgspec

from serve_app.config import RequestLogArgs, default_home
from serve_app.metrics.exposition import as_text, counter
from serve_app.observe.record import RequestRecord

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000  # lines; about 10 MB
_CLOSE_S = 5.0


class RequestLog:
    def __init__(
        self, handler: logging.Handler, ingress_id: str, lock: TextIO | None = None
    ) -> None:
        """`handler` writes the message of each record; it is closed by `close`, as is `lock`."""
        self._handler = handler
        self._lock = lock
        self._own = {"ingress": ingress_id}
        self._num_dropped = 0
        self._waiting: queue.Queue[RequestRecord | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, args: RequestLogArgs, ingress_id: str) -> RequestLog | None:
        """Returns None, after a line in the server's log, if the file cannot be written: requests
        are served without it."""
        path = args.path or default_home() / "logs" / "requests.jsonl"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            own, lock = _own_file(path)
            handler = _Handler(own, args.max_bytes, args.num_files - 1)
        except OSError as error:
            logger.error("there is no request log: %s cannot be written: %s", path, error)
            return None
        logger.info("the request log is %s", own)
        return cls(handler, ingress_id, lock)

    def write(self, record: RequestRecord) -> None:
        """Queues the line of a request that has ended. Returns at once."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._num_dropped += 1

    def text(self) -> bytes:
        num_lost = self._num_dropped + getattr(self._handler, "num_failed", 0)
        return as_text(counter("loraplex_request_log_dropped", num_lost, self._own))

    def close(self) -> None:
        """Writes the lines that wait, for five seconds at most."""
        try:
            self._waiting.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                line = as_line(record)
            except Exception:
                self._num_dropped += 1
                logger.exception("a line of the request log could not be made")
                continue
            self._handler.handle(logging.LogRecord("", logging.INFO, "", 0, line, None, None))
        with suppress(OSError):  # a full disk: the handler has counted the lines
            self._handler.close()
        if self._lock is not None:
            self._lock.close()


class _Handler(RotatingFileHandler):
    """Opens its file for its owner alone, and logs the first of several failures in a row."""

    def __init__(self, path: Path, max_bytes: int, num_backups: int) -> None:
        self._has_failed = False
        self.num_failed = 0  # lines
        super().__init__(path, "a", max_bytes, num_backups, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_owner_only)

    def emit(self, record: logging.LogRecord) -> None:
        self._failed_now = False
        super().emit(record)
        self._has_failed = self._failed_now

    def handleError(self, record: logging.LogRecord) -> None:
        self._failed_now = True
        self.num_failed += 1
        if not self._has_failed:
            logger.exception("the request log cannot be written: its lines are lost")


def as_line(record: RequestRecord) -> str:
    """Returns the record as one line of JSON, without fields that have no value."""
    resolution, decision = record.resolution, record.decision
    base = None if resolution is None else resolution.base
    adapters = () if resolution is None else resolution.adapters
    first_s = record.first_token_s
    fields: dict[str, object] = {
        "time": datetime.fromtimestamp(record.end_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": record.request_id,
        "response_id": record.response_id,
        "path": record.path,
        "status": record.status,
        "outcome": record.outcome,
        "error": record.error_code,
        "tenant": record.tenant,
        "key": record.key_id,
        "model": record.model,
        "base": base and f"{base.name}@{base.version}",
        "base_digest": base and base.digest,
        "adapter": resolution.versions if resolution and adapters else None,
        "adapter_digest": "+".join(one.version.digest for one in adapters),
        "arm": record.arm,
        "stream": record.is_stream,
        "finish_reasons": record.finish_reasons,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "queue_s": round(record.queue_s, 6),
        "ttft_s": round(first_s - record.arrival_s, 6) if first_s else None,
        "total_s": round(record.end_s - record.arrival_s, 6),
        "migrations": [move.reason for move in record.moves],
    }
    if decision is not None:
        fields["replica"] = decision.replica_id
        fields["adapter_wait_s"] = round(decision.adapter_wait_s, 6)
        fields["engine_queue_s"] = round(decision.engine_queue_s, 6)
    kept = {name: value for name, value in fields.items() if value not in ("", None, (), [])}
    return msgspec.json.encode(kept).decode()


def _own_file(path: Path) -> tuple[Path, TextIO]:
    """Returns the first of the paths NAME.jsonl, NAME-1.jsonl and so on that no other process
    writes, and the lock that reserves it. Raises OSError."""
    number = 0
    while True:
        own = path if not number else path.with_name(f"{path.stem}-{number}{path.suffix}")
        lock = open(own.with_name(f".{own.name}.lock"), "a", opener=_owner_only)  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return own, lock
        except BlockingIOError:
            lock.close()
            number += 1


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
