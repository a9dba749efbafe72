"""Clients of `adversary`: requests as bytes, so that no library repairs what is hostile in them.

The honest clients are a process of their own (`python -m tests.benchmarks.adversary_client`): a
number of streams that begin anew when they end, and short requests at a rate. A line on its
standard input asks for what they saw since the line before.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tests.benchmarks.children import module
from tests.benchmarks.keyed import key_of
from tests.benchmarks.report import percentile
from tests.benchmarks.serve_client import ERROR, EVENT, HOST, LAST

TENANT, ATTACKER = "honest", "attacker"
_BACK_OFF_S = 0.2
_LATE_S = 30.0


@dataclass(slots=True)
class Reply:
    """The answer of one connection, until it closed."""

    status: int = 0  # 0: no status line came
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    error: str = ""

    @property
    def word(self) -> str:
        """For a count of outcomes."""
        return str(self.status) if self.status else self.error or "closed"

    def json(self) -> dict[str, object]:
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def post(path: str, body: bytes | Mapping[str, object], **headers: str) -> bytes:
    """One POST on a connection of its own. Underscores of header names become hyphens."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json", "content-length": str(len(data))}
    # Without keys a client is the tenant that it says; with keys, an attacker has one.
    key = key_of(TENANT if headers.get("x_tenant_id") == TENANT else ATTACKER)
    if key is not None and "authorization" not in headers:
        given["authorization"] = f"Bearer {key}"
    return _head("POST", path, given | headers) + data


def get(path: str, **headers: str) -> bytes:
    return _head("GET", path, headers)


def _head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    fields = {"host": HOST, "connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items() if v)]
    return "\r\n".join([*lines, "", ""]).encode()


async def send(port: int, request: bytes, timeout_s: float = 60.0) -> Reply:
    """Reads to the end of the connection. A refusal that comes while the request is still being
    written counts: the write's failure is not an error then."""
    reply, began_s, received = Reply(), time.monotonic(), bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(HOST, port)
            writing = asyncio.create_task(_write(writer, request))
            try:
                while part := await reader.read(1 << 16):
                    received += part
            except ConnectionError as error:
                reply.error = type(error).__name__
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                writer.close()
    except OSError as error:  # TimeoutError is an OSError
        reply.error = type(error).__name__
    reply.seconds = time.monotonic() - began_s
    _parse(bytes(received), reply)
    return reply


async def _write(writer: asyncio.StreamWriter, request: bytes) -> None:
    for start in range(0, len(request), 1 << 18):
        writer.write(request[start : start + (1 << 18)])
        await writer.drain()


def _parse(received: bytes, reply: Reply) -> None:
    head, _, reply.body = received.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    words = line.split(" ")
    if len(words) > 1 and words[1].isdecimal():
        reply.status = int(words[1])
    pairs = (text.partition(":") for text in lines)
    reply.headers = {name.lower(): value.strip() for name, _, value in pairs}
    if reply.headers.get("transfer-encoding") == "chunked":
        reply.body = _unchunked(reply.body)


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size.split(b";")[0] or b"0", 16)
        if not length:
            break
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def chat(model: str, text: str, max_tokens: int = 8, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return body | fields


@dataclass(frozen=True, slots=True)
class HonestLoad:
    port: int
    model: str
    streams: int
    tokens: int  # of a stream
    rate: float  # short requests a second
    short_tokens: int


@dataclass(slots=True)
class Seen:
    """The observations of the honest clients in one window."""

    seconds: float = 0.0
    longest_gap_s: float = 0.0  # between two reads of one stream, or since its last one
    num_served: int = 0  # short requests
    num_sent: int = 0
    num_cut: int = 0  # streams that ended early, or were refused
    ttft_p50_s: float = 0.0  # of short requests
    ttft_max_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def share_served(self) -> float:
        return self.num_served / self.num_sent if self.num_sent else 1.0


class Honest:
    """The process of the honest clients."""

    def __init__(self, load: HonestLoad) -> None:
        self._child = subprocess.Popen(
            module("adversary_client", json.dumps(asdict(load))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.window()  # its loop runs

    def window(self) -> Seen:
        """Returns their observations since the last call."""
        return self._ask("")

    def stop(self) -> Seen:
        """The same after the last short requests ended; an open one that does not end within
        30 s counts as not served. No new request follows."""
        return self._ask("stop")

    def _ask(self, order: str) -> Seen:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{order}\n")
        self._child.stdin.flush()
        return Seen(**json.loads(self._child.stdout.readline()))

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


class _Window:
    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.longest_gap_s = 0.0
        self.ttfts_s: list[float] = []
        self.outcomes: Counter[str] = Counter()
        self.num_served = self.num_ended = self.num_cut = 0


class _Clients:
    def __init__(self, load: HonestLoad) -> None:
        self._load = load
        self._window = _Window()
        self._open: dict[int, float] = {}  # stream -> its last event
        self._tasks: set[asyncio.Task[None]] = set()
        self._shorts_open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = {
            loop.create_task(self._stream(number)) for number in range(self._load.streams)
        }
        sending = loop.create_task(self._shorts())
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while order := await lines.readline():
            if order.strip():
                sending.cancel()
                await self._end_shorts()
            sys.stdout.write(json.dumps(asdict(self._take())) + "\n")
            sys.stdout.flush()

    def _take(self) -> Seen:
        now_s, window = time.monotonic(), self._window
        open_gaps = [now_s - max(last_s, window.began_s) for last_s in self._open.values()]
        self._window = _Window()
        return Seen(
            now_s - window.began_s,
            max([window.longest_gap_s, *open_gaps]),
            window.num_served,
            window.num_ended,
            window.num_cut,
            percentile(window.ttfts_s, 50) if window.ttfts_s else 0.0,
            max(window.ttfts_s, default=0.0),
            dict(window.outcomes),
        )

    async def _stream(self, number: int) -> None:
        load = self._load
        fields = chat(load.model, f"stream {number}", load.tokens, stream=True, ignore_eos=True)
        while True:
            self._open.pop(number, None)
            is_whole, outcome = await self._read(fields, number)
            if not is_whole:
                self._window.num_cut += 1
                self._window.outcomes[f"stream {outcome}"] += 1
                await asyncio.sleep(_BACK_OFF_S)

    async def _shorts(self) -> None:
        loop, number = asyncio.get_running_loop(), 0
        while self._load.rate:
            task = loop.create_task(self._short(number))
            self._shorts_open.add(task)
            task.add_done_callback(self._shorts_open.discard)
            number += 1
            await asyncio.sleep(1 / self._load.rate)

    async def _end_shorts(self) -> None:
        if self._shorts_open:
            _, late = await asyncio.wait(self._shorts_open, timeout=_LATE_S)
            self._window.num_ended += len(late)
            self._window.outcomes["never ended"] += len(late)
            for task in late:
                task.cancel()

    async def _short(self, number: int) -> None:
        load = self._load
        fields = chat(load.model, f"{number}?", load.short_tokens, stream=True, ignore_eos=True)
        is_whole, outcome = await self._read(fields, None)
        self._window.num_ended += 1
        self._window.num_served += is_whole
        self._window.outcomes[outcome] += 1

    async def _read(self, fields: dict[str, object], number: int | None) -> tuple[bool, str]:
        """Returns True if the answer came whole, and its status or the connection's error."""
        request = post("/v1/chat/completions", fields, x_tenant_id=TENANT)
        tail, status, is_whole, has_failed, sent_s = b"", "", False, False, time.monotonic()
        has_begun = False
        try:
            reader, writer = await asyncio.open_connection(HOST, self._load.port)
            try:
                writer.write(request)
                while part := await reader.read(1 << 16):
                    window = tail + part
                    status = status or window[:12].decode("latin-1")[9:]
                    if EVENT in window:
                        if number is not None:
                            self._event(number)
                        elif not has_begun:
                            self._window.ttfts_s.append(time.monotonic() - sent_s)
                        has_begun = True
                    has_failed = has_failed or ERROR in window
                    is_whole = is_whole or LAST in window
                    tail = window[-len(LAST) :]
            finally:
                writer.close()
        except OSError as error:
            return False, type(error).__name__
        return is_whole and not has_failed and status == "200", status or "closed"

    def _event(self, number: int) -> None:
        now_s, window = time.monotonic(), self._window
        last_s = self._open.get(number)
        if last_s is not None:
            window.longest_gap_s = max(window.longest_gap_s, now_s - max(last_s, window.began_s))
        self._open[number] = now_s


def main() -> None:
    asyncio.run(_Clients(HonestLoad(**json.loads(sys.argv[1]))).run())


if __name__ == "__main__":
    main()
