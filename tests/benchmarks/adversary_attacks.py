"""The attacks of `adversary` on connections, bodies, fields and tenants, from one client's hands.

Each attack is a function of the target; it returns what its own requests saw and a list of broken
promises. What honest clients see meanwhile, and memory, are measured around it by `adversary`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.adversary_client import Reply, chat, get, post, send
from tests.benchmarks.serve_client import HOST

MIB = 1024**2
CLOSED_WITHIN_S = 25.0  # a socket that sends nothing more; a body's own deadline is 10 s
QUICK_S = 5.0  # a refusal that needs no work, on a machine that is busy
MAX_LOG_BYTES = 64  # a request that succeeds
PROBE_LETTERS = 480
FLOOD_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Target:
    port: int
    home: Path
    log: Path
    base: str
    adapters: tuple[str, ...]
    scale: float  # of the number of hostile requests; 1: all
    capacity: float  # requests a second of the floods' size
    has_prefix_cache: bool  # the paced engine has none

    @property
    def model(self) -> str:
        return f"{self.base}:{self.adapters[0]}"

    def count(self, number: int) -> int:
        return max(2, round(number * self.scale))


@dataclass(slots=True)
class Damage:
    """The outcomes of one attack, and the promises that it broke."""

    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)  # promises
    figures: dict[str, object] = field(default_factory=dict)

    def count(self, replies: Sequence[Reply]) -> None:
        self.outcomes.update(reply.word for reply in replies)

    def require(self, holds: bool, promise: str) -> None:
        if not holds:
            self.broken.append(promise)

    def forbid_5xx(self) -> None:
        wrong = {word: n for word, n in self.outcomes.items() if word.startswith("5")}
        self.require(not wrong, f"no 5xx, but {wrong}")

    def allow_only(self, *words: str) -> None:
        wrong = {word: n for word, n in self.outcomes.items() if word not in words}
        self.require(not wrong, f"only {', '.join(words)}, but {wrong}")


Attack = Callable[[Target], Coroutine[None, None, Damage]]


async def _all(port: int, requests: Sequence[bytes], at_once: int = 8) -> list[Reply]:
    limit = asyncio.Semaphore(at_once)

    async def one(request: bytes) -> Reply:
        async with limit:
            return await send(port, request)

    return await asyncio.gather(*(one(request) for request in requests))


async def _held(target: Target, beginning: bytes, number: int) -> Damage:
    """Sockets that send a beginning and wait until the server closes them."""
    damage = Damage()

    async def hold() -> tuple[str, float]:
        began_s, first = time.monotonic(), b""
        try:
            reader, writer = await asyncio.open_connection(HOST, target.port)
            try:
                writer.write(beginning)
                async with asyncio.timeout(CLOSED_WITHIN_S + 10):
                    while part := await reader.read(4096):
                        first = first or part
            finally:
                writer.close()
        except OSError as error:
            return type(error).__name__, time.monotonic() - began_s
        return first[9:12].decode("latin-1") or "closed", time.monotonic() - began_s

    held = await asyncio.gather(*(hold() for _ in range(number)))
    damage.outcomes.update(word for word, _ in held)
    longest_s = max(seconds for _, seconds in held)
    damage.figures |= {"sockets": number, "longest_open_s": round(longest_s, 1)}
    damage.require(longest_s <= CLOSED_WITHIN_S, f"closed within {CLOSED_WITHIN_S:g} s")
    return damage


async def slow_bodies(target: Target) -> Damage:
    """1,001 requests whose bodies of 100 bytes never get beyond the first."""
    head = post("/v1/completions", b"", content_length="100")
    damage = await _held(target, head + b"{", target.count(1001))
    damage.allow_only("408", "429", "503", "closed")
    return damage


async def silent_sockets(target: Target) -> Damage:
    return await _held(target, b"", target.count(1001))


async def half_headers(target: Target) -> Damage:
    return await _held(target, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", target.count(1001))


async def huge_headers(target: Target) -> Damage:
    damage = Damage()
    body = chat(target.model, "hello", 1)
    large = post("/v1/chat/completions", body, x_large="a" * (8 * MIB))
    many = post("/v1/chat/completions", body, **{f"x_{number}": "a" for number in range(3000)})
    damage.count(await _all(target.port, [large, many] * target.count(10), at_once=4))
    # A server that answers and closes while the headers still come resets the connection.
    damage.allow_only("431", "400", "closed", "ConnectionResetError", "BrokenPipeError")
    return damage


async def session_strings(target: Target) -> Damage:
    damage = Damage()
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        requests = [
            post(
                "/v1/chat/completions",
                chat(target.model, "hello", 1, **{name: f"{number:06}" + "u" * (12 * MIB)}),
            )
            for number in range(target.count(13))
        ]
        damage.count(await _all(target.port, requests, at_once=2))
    damage.allow_only("400")
    return damage


async def large_texts(target: Target) -> Damage:
    """Bodies of nearly 16 MiB of text, on every route that tokenizes."""
    damage = Damage()
    draw = random.Random(7)
    words = " ".join("".join(draw.choices("abcdefghij", k=7)) for _ in range(2 * MIB))
    text = words[: 15 * MIB]
    requests = [
        post("/v1/completions", {"model": target.model, "prompt": text, "max_tokens": 1}),
        post("/v1/chat/completions", chat(target.model, text, 1)),
        post("/tokenize", {"model": target.model, "prompt": text}),
        post("/detokenize", {"model": target.model, "tokens": [1] * (5 * MIB)}),
    ]
    for request in requests:
        damage.count([await send(target.port, request)])
    damage.allow_only("400", "413")
    return damage


async def json_bombs(target: Target) -> Damage:
    damage = Damage()
    bombs = [
        b'{"model":"x","messages":[' + b"{}," * (5 * MIB) + b"{}]}",
        b"[" * (8 * MIB),
        b'{"a":' * (2 * MIB),
        b'{"model":"x","prompt":' + b"9" * (8 * MIB) + b"}",
        b'{"x":[' + b"[]," * (4 * MIB) + b"[]]}",
    ]
    for bomb in bombs:
        damage.count([await send(target.port, post("/v1/chat/completions", bomb))])
    damage.allow_only("400", "413")
    return damage


async def request_ids(target: Target) -> Damage:
    damage = Damage()
    ids = ("\u00e9", "a" * 10_000, "a\tb", "<script>", "../../x", "%0d%0aset-cookie:a", "\x7f", "")
    body = chat(target.model, "hello", 1)
    requests = []
    for value in ids:
        head, _, data = post("/v1/chat/completions", body).partition(b"\r\n\r\n")
        line = f"\r\nx-request-id: {value}\r\n\r\n".encode("latin-1")
        requests.append(head + line + data)
    replies = await _all(target.port, requests)
    damage.count(replies)
    damage.forbid_5xx()
    damage.allow_only("200", "400")
    echoed = [reply.headers.get("x-request-id", "") for reply in replies]
    damage.require(all(len(text) <= 128 for text in echoed), "a request id is echoed bounded")
    return damage


async def foreign_hosts(target: Target) -> Damage:
    """A page in a browser on the server's machine, by another name or without a content type."""
    damage = Damage()
    body = chat(target.model, "hello", 1)
    requests = [
        post("/v1/chat/completions", body, host="evil.example"),
        post("/v1/chat/completions", body, content_type=""),
        post("/v1/chat/completions", body, content_type="text/plain"),
    ]
    damage.count(await _all(target.port, requests))
    damage.allow_only("400", "403", "415", "421")
    return damage


async def leaving_clients(target: Target) -> Damage:
    """Clients that leave while they send, while they wait and while they read."""
    damage = Damage()
    before = await _server_errors(target)
    log_bytes = _log_size(target)
    whole = post("/v1/chat/completions", chat(target.model, "hello", 64, stream=True))

    async def leave(number: int) -> None:
        _, writer = await asyncio.open_connection(HOST, target.port)
        writer.write(whole if number % 3 else whole[:-20])
        await asyncio.sleep(0.1 * (number % 5))
        writer.close()

    number = target.count(120)
    for start in range(0, number, 10):
        await asyncio.gather(*(leave(one) for one in range(start, min(number, start + 10))))
    await asyncio.sleep(2)
    damage.outcomes["left"] = number
    damage.require(await _server_errors(target) == before, "a client that leaves is no 5xx")
    tail = target.log.read_bytes()[log_bytes:]
    damage.figures["log_bytes"] = len(tail)
    damage.require(b"Traceback" not in tail, "a client that leaves writes no traceback")
    return damage


async def _server_errors(target: Target) -> float:
    await asyncio.sleep(1.5)  # an answer of /metrics may be kept for a second
    text = (await send(target.port, get("/metrics"))).body.decode(errors="replace")
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("loraplex_http_answers_total{") and 'status="5' in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _log_size(target: Target) -> int:
    return target.log.stat().st_size


async def slow_reader(target: Target) -> Damage:
    """A whole answer with every log-probability, and streams that nobody reads."""
    damage = Damage()
    dear = chat(target.model, "hello", 4096, n=16, logprobs=True, top_logprobs=20)
    replies = await _all(target.port, [post("/v1/chat/completions", dear)] * 2)
    damage.count(replies)
    unread = chat(
        target.model, "x", 200, n=8, stream=True, logprobs=True, top_logprobs=20, ignore_eos=True
    )
    writers = []
    for _ in range(target.count(8)):
        _, writer = await asyncio.open_connection(HOST, target.port, limit=1024)
        writer.write(post("/v1/chat/completions", unread))
        writers.append(writer)
    await asyncio.sleep(10 * target.scale)
    for writer in writers:
        writer.close()
    damage.outcomes["unread"] = len(writers)
    damage.forbid_5xx()
    return damage


async def dear_questions(target: Target) -> Damage:
    """30 scrapers of the metrics and the model list, without a pause."""
    damage = Damage()
    end_s = time.monotonic() + 6 * max(target.scale, 0.5)

    async def scrape(path: str) -> None:
        while time.monotonic() < end_s:
            damage.count([await send(target.port, get(path))])

    await asyncio.gather(*(scrape(path) for path in ("/metrics", "/v1/models") for _ in range(15)))
    damage.forbid_5xx()
    return damage


async def log_growth(target: Target) -> Damage:
    """Requests that succeed fill no disk."""
    damage = Damage()
    before = _written(target)
    number = target.count(400)
    request = post("/v1/chat/completions", chat(target.model, "hello", 1))
    damage.count(await _all(target.port, [request] * number, at_once=16))
    await asyncio.sleep(1)
    per_request = (_written(target) - before) / number
    damage.figures["log_bytes_a_request"] = round(per_request, 1)
    damage.require(per_request <= MAX_LOG_BYTES, f"at most {MAX_LOG_BYTES} log bytes a request")
    return damage


def _written(target: Target) -> int:
    """Bytes of the server's log and of all logs in the home."""
    logs = [target.log, *(target.home / "logs").rglob("*")]
    return sum(path.stat().st_size for path in logs if path.is_file())


async def unknown_names(target: Target) -> Damage:
    """Made-up models, fields and adapters: refused at once, remembered nowhere."""
    damage = Damage()
    draw = random.Random(3)
    requests = []
    for number in range(target.count(300)):
        name = "".join(draw.choices("abc/:@.é\u202e", k=40))
        fields: dict[str, object] = {f"made_up_{number}": number}
        requests.append(post("/v1/chat/completions", chat(name, "hello", 1, **fields)))
    replies = await _all(target.port, requests)
    damage.count(replies)
    damage.allow_only("400", "404")
    bad = [r for r in replies if not isinstance(r.json().get("error"), dict)]
    damage.require(not bad, "every refusal has OpenAI's error body")
    return damage


async def prefix_probing(target: Target) -> Damage:
    """Another tenant's prompt is guessed by what is said of cached tokens."""
    damage = Damage()
    if not target.has_prefix_cache:
        damage.figures["skipped"] = "this engine has no prefix cache"
        return damage
    draw = random.Random(11)
    secret = "".join(draw.choices("abcdefghijklmnop ", k=PROBE_LETTERS))

    async def cached(tenant: str) -> int:
        body = {"model": target.model, "prompt": secret, "max_tokens": 1}
        reply = await send(target.port, post("/v1/completions", body, x_tenant_id=tenant))
        damage.count([reply])
        usage = reply.json().get("usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        tokens = details.get("cached_tokens") if isinstance(details, dict) else None
        return tokens if isinstance(tokens, int) else 0

    await cached("hospital")
    own, others = await cached("hospital"), await cached("attacker")
    damage.figures |= {"cached_for_its_tenant": own, "cached_for_another": others}
    damage.require(own > 0, "a tenant's own prefix is cached")
    damage.require(others == 0, "another tenant's prefix is not")
    return damage


def flood_seconds(target: Target) -> float:
    return 120.0 * target.scale


def flood_body(target: Target, number: int, **fields: object) -> dict[str, object]:
    return chat(target.model, f"flood {number}", FLOOD_TOKENS, ignore_eos=True, **fields)


async def _flood(target: Target, make: Callable[[int], bytes]) -> Damage:
    """Twice the capacity."""
    damage, tasks = Damage(), []
    every_s, number = 1 / (2 * target.capacity), 0
    began_s = time.monotonic()
    while (due_s := began_s + number * every_s) < began_s + flood_seconds(target):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(send(target.port, make(number))))
        number += 1
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    damage.count([reply for reply in ended if isinstance(reply, Reply)])
    damage.outcomes["open at the end"] = sum(not isinstance(one, Reply) for one in ended)
    damage.figures |= {"sent": number, "capacity_per_s": round(target.capacity, 2)}
    return damage


async def priority_flood(target: Target) -> Damage:
    """A tenant that calls all of its requests urgent."""

    def make(number: int) -> bytes:
        body = flood_body(target, number, priority=-1 - number % 7)
        return post("/v1/chat/completions", body, x_tenant_id="attacker")

    return await _flood(target, make)


async def tenant_flood(target: Target) -> Damage:
    """A client that is another tenant each time."""

    def make(number: int) -> bytes:
        body = flood_body(target, number)
        return post("/v1/chat/completions", body, x_tenant_id=f"tenant-{number % 1000}")

    return await _flood(target, make)


CONNECTION_ATTACKS: dict[str, Attack] = {
    "slow_bodies": slow_bodies,
    "silent_sockets": silent_sockets,
    "half_headers": half_headers,
    "huge_headers": huge_headers,
    "session_strings": session_strings,
    "large_texts": large_texts,
    "json_bombs": json_bombs,
    "request_ids": request_ids,
    "foreign_hosts": foreign_hosts,
    "leaving_clients": leaving_clients,
    "slow_reader": slow_reader,
    "dear_questions": dear_questions,
    "log_growth": log_growth,
    "unknown_names": unknown_names,
    "prefix_probing": prefix_probing,
}
FLOODS: dict[str, Attack] = {"priority_flood": priority_flood, "tenant_flood": tenant_flood}


def described(damage: Damage) -> dict[str, object]:
    return {"seen": dict(damage.outcomes), **damage.figures, "broken": damage.broken}
