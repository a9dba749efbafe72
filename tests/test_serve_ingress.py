"""The ingress's ASGI application before any model is loaded: the requests that it accepts, and
how it refuses and counts others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, Rejected
from registry.errors import (
    ArtifactError,
    CacheFailedError,
    QuarantinedError,
    RegistryError,
    RegistryUnavailableError,
)
from serve_app.admission.tenants import Tenants
from serve_app.api.ingress import ConcurrencyLimitMiddleware, MetricsMiddleware, build_asgi
from serve_app.api.model_list import ModelList
from serve_app.api.state import IngressState
from serve_app.config import FairnessArgs, IngressArgs, ModelArgs
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import (
    AdapterUnsupportedError,
    ApiError,
    ClientGoneError,
    EngineGoneError,
    NonFiniteError,
    OverloadedError,
    RequestQuarantinedError,
    ServiceUnavailableError,
    UnservableError,
    to_api_error,
)
from serve_app.http.arrivals import Arrivals
from serve_app.http.asgi import SseResponse
from serve_app.http.browsers import with_browser_checks
from serve_app.metrics.ingress import IngressMetrics, QueueStats
from serve_app.platform_view import PlatformView, ServedBase
from serve_app.serve_file import called_by
from serve_app.text_workers.pool import TextPool
from tests.ingress_app import make_gateway, make_observer

LOCAL = "http://localhost"
PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


def ingress_of(args: IngressArgs, gateway: Gateway | None = None) -> ASGIApp:
    tenants = Tenants(FairnessArgs(), is_proven=False)
    queues = SimpleNamespace(stats=QueueStats("i", {}), tenants=tenants)
    state = SimpleNamespace(
        authenticator=None,
        accounts=None,
        args=args,
        metrics=IngressMetrics("i"),
        queues=queues,
        gateway=gateway or SimpleNamespace(view=None),
        model_list=ModelList(),
        texts=TextPool(1),
        observer=make_observer(),
    )
    return build_asgi(cast(IngressState, state))


def client_of(base_url: str = LOCAL, **fields: Any) -> TestClient:
    return TestClient(ingress_of(IngressArgs(**fields)), base_url=base_url)


# Names and pages


@pytest.mark.parametrize(
    "url",
    [
        LOCAL,
        "http://127.0.0.1:8000",
        "http://[::1]:8000",
        "http://LocalHost.:1",
        "http://127.0.0.2:8000",
        "http://[0:0:0:0:0:0:0:1]:8000",
    ],
)
def test_the_server_is_called_by_its_local_names(url: str) -> None:
    assert client_of(url).get("/version").status_code == 200
    listed = client_of(url, trusted_gateway="nginx", allowed_hosts=["other.lan"])
    assert listed.get("/version").status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@e",
        "a b",
        "",
        "[localhost]",
    ],
)
def test_another_name_is_refused_for_a_page_could_have_rebound_it(host: str) -> None:
    for path in ("/version", "/metrics"):
        answer = client_of().get(path, headers={"host": host})
        assert answer.status_code == 403
    assert (answer.status_code, answer.headers["x-should-retry"]) == (403, "false")
    assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"allowed_hosts": ["gpu-box.lan"]}, 200),
        ({"allowed_hosts": ["*"]}, 200),
        ({"allowed_hosts": ["other.lan"]}, 403),
        ({"trusted_gateway": "nginx"}, 200),
        ({"trusted_gateway": "nginx", "allowed_hosts": ["other.lan"]}, 403),
    ],
)
def test_the_file_allows_further_names(fields: dict[str, Any], status: int) -> None:
    assert client_of("http://gpu-box.lan:8000", **fields).get("/version").status_code == status


@pytest.mark.parametrize("fields", [{}, {"allowed_hosts": ["llm.example"]}])
def test_a_probe_that_calls_a_replica_by_its_address_is_answered(fields: dict[str, Any]) -> None:
    client = client_of("http://10.0.3.7:8000", **fields)
    assert client.get("/live").status_code == client.head("/live").status_code == 200
    assert client.post("/live", headers=JSON).status_code == 403
    assert client.get("/v1/models").status_code == 403


def test_a_gateway_s_replica_lets_scrapers_in_beside_its_clients() -> None:
    app = with_browser_checks(
        _Alive(), IngressArgs(trusted_gateway="nginx", allowed_hosts=("llm.example",))
    )
    client = TestClient(app, base_url="http://10.0.3.7:8000")
    for path in ("/live", "/ready", "/health", "/metrics"):
        assert client.get(path).status_code == client.head(path).status_code == 200
    assert client.get("/version").status_code == 403


class _Alive:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response()(scope, receive, send)


@pytest.mark.parametrize(
    ("host", "given", "names"),
    [
        ("10.0.3.7", ("a",), ("a", "10.0.3.7")),
        ("fd00::7", ("a",), ("a", "[fd00::7]")),
        ("0.0.0.0", ("a",), ("a",)),
        ("10.0.3.7", (), ()),
    ],
)
def test_a_server_with_a_list_of_names_answers_to_its_own_address(
    host: str, given: tuple[str, ...], names: tuple[str, ...]
) -> None:
    args = called_by(IngressArgs(trusted_gateway="nginx", allowed_hosts=given), host)
    assert args.allowed_hosts == names
    if given and names != given:
        url = f"http://{names[-1]}:8000"
        client = TestClient(with_browser_checks(_Alive(), args), base_url=url)
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_hosts": ["http://a"]},
        {"allowed_hosts": ["a:80"]},
        {"cors_origins": ["a.example"]},
        {"cors_origins": ["https://a.example/path"]},
    ],
)
def test_a_host_or_origin_that_can_never_match_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        IngressArgs(**fields)


def test_a_page_of_another_origin_is_answered_without_leave_to_read() -> None:
    answer = client_of().get("/live", headers={"origin": "https://chat.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origins", [["https://chat.example"], ["*"]])
def test_a_page_of_an_allowed_origin_may_ask_and_never_with_credentials(
    origins: list[str],
) -> None:
    client = client_of(cors_origins=origins)
    asked = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = client.options(PATH, headers=asked)
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = client.post(PATH, content=b"{", headers=JSON | {"origin": asked["origin"]})
    for answer in (preflight, refused):
        assert answer.headers["access-control-allow-origin"] in ("*", "https://chat.example")
        assert "access-control-allow-credentials" not in answer.headers
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("sent", "fields", "status"),
    [
        ({"headers": {"x-long": "x" * 40_000}}, {}, 431),
        ({"content": b"x" * 11}, {"max_body_bytes": 10}, 413),
        ({"content": iter([b"x" * 9, b"x" * 9])}, {"max_body_bytes": 10}, 413),
    ],
)
def test_a_page_of_an_allowed_origin_may_read_every_refusal(
    sent: dict[str, Any], fields: dict[str, Any], status: int
) -> None:
    app = ingress_of(IngressArgs(cors_origins=["https://chat.example"], **fields))
    headers = JSON | {"origin": "https://chat.example"} | sent.pop("headers", {})
    answer = TestClient(app, base_url=LOCAL).post(PATH, headers=headers, **sent)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    text = cast(MetricsMiddleware, app)._metrics.text(0).decode()
    counted = [x for x in text.splitlines() if f'"{status}"' in x]
    assert [line.split()[-1] for line in counted] == ["1.0"]


def test_a_preflight_of_another_origin_is_refused() -> None:
    client = client_of(cors_origins=["https://chat.example"])
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert client.options(PATH, headers=asked).status_code == 400


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "headers", [{}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data"}]
)
def test_a_request_that_any_page_can_send_is_refused(path: str, headers: dict[str, str]) -> None:
    answer = client_of().post(path, content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert "content-type" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers", [JSON, {"content-type": "Application/JSON; charset=utf-8"}, {"authorization": "b"}]
)
def test_what_no_page_can_send_unasked_is_read(headers: dict[str, str]) -> None:
    assert client_of().post(PATH, content=b"{", headers=headers).status_code == 400


@pytest.mark.parametrize("path", ["/live", "/version", "/v1/models"])
def test_head_is_get_without_the_body(path: str) -> None:
    client = client_of()
    got, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    assert client.head(PATH).status_code == 405


def test_a_refused_adapter_is_shown_as_little_as_it_is_served() -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    sound = AdapterVersion("sound", 1, "a" * 64, "base", base.digest, 8, (), "source")
    refused = replace(sound, name="dora", digest="b" * 64, refused="it uses DoRA")
    gateway = make_gateway()
    catalog = Catalog((base,), (sound, refused))
    gateway.view = PlatformView(
        "1", catalog, (ServedBase(base, "app", "running", ModelArgs(name="base")),), (), True, None
    )
    client = TestClient(ingress_of(IngressArgs(), gateway), base_url=LOCAL)
    assert client.get("/v1/models/sound").json()["id"] == "sound"
    shown = client.get("/v1/models/dora")
    assert (shown.status_code, shown.json()["error"]["code"]) == (422, "adapter_unsupported")
    with pytest.raises(AdapterUnsupportedError) as caught:
        gateway.route("dora", None)
    assert shown.json()["error"]["message"] == str(caught.value)


def test_an_adapter_whose_files_the_registry_refuses_is_answered_with_the_reason() -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    gateway = make_gateway()
    catalog = Catalog((base,), (), (Rejected("ia3", 1, "it is IA3", is_public=True),))
    served = ServedBase(base, "app", "running", ModelArgs(name="base"))
    client = TestClient(ingress_of(IngressArgs(), gateway), base_url=LOCAL)
    for registry_error in (None, "it is down"):
        gateway.view = PlatformView("1", catalog, (served,), (), True, registry_error)
        answer = client.get("/v1/models/ia3")
        assert answer.status_code == 422
        assert answer.json()["error"] == {
            "message": "The adapter 'ia3' version 1 cannot be served: it is IA3",
            "type": "invalid_request_error",
            "param": "model",
            "code": "adapter_unsupported",
        }


def test_a_base_that_its_engine_refuses_is_a_field_of_readiness() -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    failed = ServedBase(base, "app", "failed", ModelArgs(name="base"), "no room")
    gateway = make_gateway()
    client = TestClient(ingress_of(IngressArgs(), gateway), base_url=LOCAL)
    for is_refused, refused in ((False, {}), (True, {"refused": "base: no room"})):
        bases = (replace(failed, is_refused=is_refused),)
        gateway.view = PlatformView("1", Catalog((base,), ()), bases, (), True, None)
        answer = client.get("/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "base: no room", **refused}


# Requests beyond a limit


@pytest.mark.parametrize("headers", [{"x-long": "x" * 40_000}, {f"x-{i}": "" for i in range(101)}])
def test_too_many_or_too_long_headers_are_431(headers: dict[str, str]) -> None:
    answer = client_of().get("/live", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


def test_a_body_over_the_limit_is_refused_on_every_route() -> None:
    client = client_of(max_body_bytes=10)
    for path in (PATH, "/live", "/nowhere"):
        assert client.post(path, content=b"x" * 11, headers=JSON).status_code == 413


def test_a_refusal_writes_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(max_body_bytes=100)
    for path, content in ((PATH, b"{"), (PATH, b"x" * 101), ("/nowhere", b"")):
        assert 400 <= client.post(path, content=content, headers=JSON).status_code < 500
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Bodies being received


def http_scope(path: str = PATH, *headers: tuple[bytes, bytes]) -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"transfer-encoding", b"chunked"), *headers],
    }


class Sender:
    """A client that sends the parts of its body when the test requests them."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, part: bytes, *, is_last: bool = False) -> None:
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": not is_last})

    def leave(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Message:
        return await self._parts.get()


class Sink:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def arrive(arrivals: Arrivals, sender: Sender) -> asyncio.Task[Receive]:
    return asyncio.create_task(arrivals.receive_body(http_scope(), sender.receive))


async def refusal_of(task: asyncio.Task[Receive]) -> int:
    with pytest.raises((ApiError, OverloadedError)) as caught:
        await task
    return to_api_error(caught.value).status


async def test_a_body_in_parts_comes_out_in_one() -> None:
    arrivals, sender = Arrivals(IngressArgs()), Sender()
    task = arrive(arrivals, sender)
    sender.send(b"ab")
    sender.send(b"")
    sender.send(b"cd", is_last=True)
    receive = await task
    assert await receive() == {"type": "http.request", "body": b"abcd", "more_body": False}
    sender.leave()
    assert (await receive())["type"] == "http.disconnect"
    assert (len(arrivals._arriving), arrivals.num_bytes) == (0, 0)


async def test_bodies_in_arrival_have_one_budget_of_bytes() -> None:
    """A thousand bodies of 16 MiB are not 16 GiB."""
    mib = 1024**2
    arrivals = Arrivals(IngressArgs(max_arriving_bytes=4 * mib))
    senders = [Sender() for _ in range(100)]
    tasks = [arrive(arrivals, sender) for sender in senders]
    most = 0
    for sender in senders:
        sender.send(b"x" * mib)
        await settle()
        most = max(most, arrivals.num_bytes)
    assert most <= 4 * mib
    refused = [task for task in tasks if task.done()]
    assert refused == tasks[: len(refused)]  # the oldest
    assert {await refusal_of(task) for task in refused} == {429}
    small = Sender()
    small.send(b"{}", is_last=True)
    assert (await (await arrive(arrivals, small))())["body"] == b"{}"
    for sender, task in zip(senders[len(refused) :], tasks[len(refused) :], strict=True):
        sender.leave()
        with pytest.raises(ClientGoneError):
            await task
    assert (len(arrivals._arriving), arrivals.num_bytes) == (0, 0)


async def test_a_long_body_stays_in_the_budget_until_it_is_read() -> None:
    mib = 1024**2
    arrivals = Arrivals(IngressArgs(max_arriving_bytes=3 * mib))
    first, second, third = Sender(), Sender(), Sender()
    for sender in (first, second, third):
        sender.send(b"x" * 2 * mib, is_last=True)
    receive = await arrive(arrivals, first)
    assert await refusal_of(arrive(arrivals, second)) == 429
    await receive()
    arrivals.release_body(receive)
    other = await arrive(arrivals, third)
    arrivals.release_body(other)
    arrivals.release_body(other)
    assert arrivals.num_bytes == 0


async def test_a_body_that_stops_coming_is_408() -> None:
    arrivals, sender = Arrivals(IngressArgs(body_timeout_s=0.05)), Sender()
    task = arrive(arrivals, sender)
    sender.send(b"{")
    assert await refusal_of(task) == 408
    assert len(arrivals._arriving) == 0


async def test_a_request_is_open_only_once_its_body_is_whole() -> None:
    is_over = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await is_over.wait()

    stats = QueueStats("i", {})
    bounded = ConcurrencyLimitMiddleware(app, IngressArgs(max_ongoing_requests=1), stats)
    slow, quick, late = Sender(), Sender(), Sender()
    sinks: list[Sink] = []

    def ask(sender: Sender) -> asyncio.Task[None]:
        sinks.append(Sink())
        return asyncio.create_task(bounded(http_scope(), sender.receive, sinks[-1].send))

    tasks = [ask(slow)]
    quick.send(b"{}", is_last=True)
    tasks.append(ask(quick))
    await settle()
    assert not any(task.done() for task in tasks)
    await ask(late)
    slow.send(b"{}", is_last=True)
    await tasks[0]
    assert [sink.status for sink in sinks] == [429, None, 429]
    is_over.set()
    await tasks[1]
    assert stats.num_turned_away == 2


# Clients that disconnect

Leaving = Callable[[Scope, Receive, Send], Awaitable[None]]


async def disconnects_of(app: Leaving, *, is_cancelled: bool = False) -> tuple[float, Sink]:
    metrics, sink, sender = IngressMetrics("i"), Sink(), Sender()
    task = asyncio.create_task(
        cast(Any, MetricsMiddleware(app, metrics)(http_scope(), sender.receive, sink.send))
    )
    await settle()
    if is_cancelled:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    text = metrics.text(0).decode()
    (line,) = [x for x in text.splitlines() if x.startswith("loraplex_client_disconnects_total{")]
    return float(line.split()[-1]), sink


@pytest.mark.parametrize("is_started", [False, True])
async def test_a_request_that_serve_cancels_counts_as_a_client_that_left(is_started: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if is_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.Event().wait()

    assert (await disconnects_of(app, is_cancelled=True))[0] == 1


async def test_a_client_that_leaves_a_stream_after_its_first_token_is_counted() -> None:
    async def rest() -> AsyncIterator[bytes]:
        yield b"data: 2\n\n"
        raise ClientGoneError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await SseResponse(b"data: 1\n\n", rest(), lambda: None)(scope, receive, send)

    assert (await disconnects_of(app))[0] == 1


async def test_a_client_that_leaves_while_it_uploads_is_no_failure_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientGoneError

    count, sink = await disconnects_of(app)
    assert (count, sink.status) == (1, 499)
    assert not caplog.records


async def test_an_answer_to_its_end_is_no_client_that_left() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    assert (await disconnects_of(app))[0] == 0


# The header x-should-retry


@pytest.mark.parametrize(
    ("error", "status", "should_retry"),
    [
        (OverloadedError("m"), 429, "true"),
        (ServiceUnavailableError("m"), 503, "true"),
        (RegistryUnavailableError("m"), 503, "true"),
        (RegistryError("403 Client Error"), 503, "true"),
        (CacheFailedError("m"), 503, "true"),
        (EngineGoneError("m", "e"), 503, "true"),
        (ApiError(408, "m"), 408, "true"),
        (ApiError(400, "m"), 400, "false"),
        (ApiError(409, "m"), 409, "false"),
        (RequestQuarantinedError(), 422, "false"),
        (NonFiniteError("m"), 500, "false"),
        (RuntimeError("m"), 500, "false"),
        (ArtifactError("m"), 503, "false"),
        (QuarantinedError("m", 5), 503, "false"),
        (UnservableError("m"), 503, "false"),
    ],
)
def test_every_error_says_whether_another_try_may_succeed(
    error: Exception, status: int, should_retry: str
) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.headers()["x-should-retry"]) == (status, should_retry)


def test_an_error_made_beside_the_table_says_so_too() -> None:
    client = client_of()
    assert client.get("/nowhere").headers["x-should-retry"] == "false"
    assert client.get("/v1/models").headers["x-should-retry"] == "true"  # still starting
