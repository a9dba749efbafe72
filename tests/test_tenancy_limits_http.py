"""Limits of keys at the HTTP routes, in OpenAI's shape; and `loraplex usage`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from rich.console import Console
from starlette.types import ASGIApp, Receive, Scope, Send
from typer.testing import CliRunner

from serve_app.admin_api import KeyLine, KeyLines, UsageLine, UsageLines
from serve_app.api.ingress import build_asgi
from serve_app.api.state import IngressState
from serve_app.cli.commands import common
from serve_app.cli.commands import keys as keys_command
from serve_app.cli.commands import usage as usage_command
from serve_app.cli.commands.common import Failure
from serve_app.cli.main import build
from serve_app.tenancy.caller import Caller, KeyPolicy
from serve_app.tenancy.keys import new_id, new_key
from serve_app.tenancy.leases import Grants, LeaseRequest, Leases
from serve_app.tenancy.limits import Accounts, Limits
from serve_app.tenancy.usage import UsageBatch
from tests.ingress_app import make_state


class _Authenticated:
    """Sets the caller, as the authentication does."""

    def __init__(self, app: ASGIApp, caller: Caller | None) -> None:
        self.app, self.caller = app, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope | {"state": {"caller": self.caller}}, receive, send)


@asynccontextmanager
async def served(policy: KeyPolicy) -> AsyncIterator[tuple[IngressState, Caller, _Authenticated]]:
    """An ingress without engines, and a manager that grants leases."""
    leases = Leases(burst_s=0.5)

    async def lease(request: LeaseRequest) -> dict[str, Grants]:
        return leases.grant(request, {}, {"day": 7200.0}, asyncio.get_running_loop().time())

    async def record(batch: UsageBatch) -> bool:
        return True

    state = make_state()
    state.accounts = accounts = Accounts("i0", lease, record, lambda: 1)
    accounts.start()
    accounts.check_tasks()
    caller = Caller("k", policy)
    yield state, caller, _Authenticated(build_asgi(state), caller)
    for task in accounts._tasks:
        task.cancel()


def stop_clock(limits: Limits) -> None:
    """Leaves a dry key dry, however slow this machine is."""
    now_s = limits._clock()
    limits._clock = lambda: now_s


def client_of(app: ASGIApp) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(app)
    http = httpx.AsyncClient(transport=transport, base_url="http://testserver/v1")
    return openai.AsyncOpenAI(
        api_key="k", base_url="http://testserver/v1", http_client=http, max_retries=0
    )


async def test_a_dry_key_is_refused_with_the_headers_and_codes_of_openai() -> None:
    async with served(KeyPolicy(requests_per_minute=1)) as (state, caller, app):
        assert state.accounts is not None
        limits, client = state.accounts.limits, client_of(app)
        await limits.admit(caller, 10)
        with pytest.raises(Exception, match="1 requests per minute"):
            await limits.admit(caller, 10)  # the manager's answer leaves it dry
        stop_clock(limits)
        for send in (
            client.completions.create(model="base", prompt="x"),
            client.chat.completions.create(model="base", messages=[]),
        ):
            with pytest.raises(openai.RateLimitError) as refused:
                await send
            error, headers = refused.value, refused.value.response.headers
            assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
            assert headers["x-should-retry"] == "true"
            assert 55 <= int(headers["retry-after"]) <= 60
            assert 55_000 <= int(headers["retry-after-ms"]) <= 60_000
            assert headers["x-ratelimit-limit-requests"] == "1"
            assert headers["x-ratelimit-remaining-requests"] == "0"
            assert headers["x-ratelimit-reset-requests"] in ("1m0s", "60s")
        assert limits.num_refused["requests"] == 3


async def test_anthropics_clients_find_their_own_headers() -> None:
    async with served(KeyPolicy(requests_per_minute=1)) as (state, caller, app):
        assert state.accounts is not None
        limits = state.accounts.limits
        await limits.admit(caller, 10)
        with pytest.raises(Exception, match="1 requests per minute"):
            await limits.admit(caller, 10)
        stop_clock(limits)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as http:
            answers = [
                await http.post(path, json={"model": "base"})
                for path in ("/v1/messages", "/v1/responses", "/v1/messages/count_tokens")
            ]
        assert [answer.status_code for answer in answers] == [429, 429, 429]
        anthropic, other = (answer.headers for answer in answers[:2])
        assert answers[0].json()["error"]["type"] == "rate_limit_error"
        assert anthropic["anthropic-ratelimit-requests-limit"] == "1"
        assert anthropic["anthropic-ratelimit-requests-remaining"] == "0"
        assert anthropic["anthropic-ratelimit-requests-reset"].endswith("Z")
        assert anthropic["x-ratelimit-limit-requests"] == "1"
        assert not [name for name in other if name.startswith("anthropic")]


async def test_a_spent_budget_is_not_worth_a_repetition() -> None:
    async with served(KeyPolicy(tokens_per_day=100)) as (state, caller, app):
        assert state.accounts is not None
        limits, client = state.accounts.limits, client_of(app)
        charge = await limits.admit(caller, 100)
        charge.settle(150)  # more than was expected
        with pytest.raises(Exception, match="its 100 tokens of this day"):
            await limits.admit(caller, 1)
        stop_clock(limits)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="base", prompt="x")
        assert refused.value.code == "insufficient_quota"
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert refused.value.response.headers["retry-after"] == "7200"


async def test_an_answer_of_a_key_without_limits_has_no_such_headers() -> None:
    async with served(KeyPolicy()) as (_, _, app):
        with pytest.raises(openai.InternalServerError, match="is starting") as refused:
            await client_of(app).completions.create(model="base", prompt="x")
        headers = refused.value.response.headers
        assert not [name for name in headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("name", ["[/]", "[red]team", "base:[ab]*", "[link=http://evil]a[/link]"])
def test_names_of_tenants_and_globs_are_no_markup_of_the_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = UsageLines("", "", [UsageLine(1, 1, 0, 1, 1.0, 0.0, tenant=name)])
    limits = (None,) * 7
    key = KeyLine("id", "", name, name, (name,), ("infer",), *limits, {}, "", None)
    monkeypatch.setattr(common, "console", Console(width=200))
    monkeypatch.setattr(usage_command, "call_server", lambda *call: used)
    monkeypatch.setattr(keys_command, "call_server", lambda *call: KeyLines([key], 1, 1, 1))
    for command, count in ((["usage", "--by", "tenant"], 1), (["keys", "list"], 3)):
        monkeypatch.setattr(usage_command, "console", common.console)
        shown = CliRunner().invoke(build(), command)
        assert shown.exit_code == 0, shown.output
        assert shown.output.count(name) == count


def test_the_secret_of_a_key_is_in_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    def call(url: str, method: str, path: str, kind: type) -> None:
        paths.append(path)
        raise Failure("unknown")

    monkeypatch.setattr(keys_command, "call_server", call)
    key_id = new_id()
    for key in (new_key(key_id), key_id, "ci & more"):
        CliRunner().invoke(build(), ["keys", "info", key])
    assert paths == [f"/key/info?key={one}" for one in (key_id, key_id, "ci%20%26%20more")]


def test_the_command_prints_usage_as_a_table_json_and_csv(monkeypatch: pytest.MonkeyPatch) -> None:
    line = UsageLine(1200, 10_000, 4000, 5000, 1_234_567.0, 0.25, key="k1", model="pirate@3")
    found = UsageLines("2026-11-01T00:00:00Z", "2026-11-23T05:00:00Z", [line])
    paths: list[str] = []

    def call(url: str, method: str, path: str, kind: type[UsageLines]) -> UsageLines:
        paths.append(f"{method} {path}")
        return found

    monkeypatch.setattr(usage_command, "call_server", call)
    runner, cli = CliRunner(), build()
    # The command's console has the standard output of the time when it was made.
    monkeypatch.setattr(common, "console", Console(width=200))
    monkeypatch.setattr(usage_command, "console", common.console)
    shown = runner.invoke(cli, ["usage", "--from", "2026-11-01"])
    assert shown.exit_code == 0, shown.output
    for part in ("k1", "pirate@3", "1,200", "10,000", "1,234.6", "0.2500"):
        assert part in shown.output
    assert paths == ["GET /admin/usage?by=key%2Cmodel&from=2026-11-01"]
    as_csv = runner.invoke(cli, ["usage", "--csv"])
    assert as_csv.output.splitlines() == [
        "key,model,requests,prompt_tokens,cached_tokens,output_tokens,engine_ms,cost",
        "k1,pirate@3,1200,10000,4000,5000,1234567.0,0.25",
    ]
    as_json = runner.invoke(cli, ["usage", "--json"])
    assert '"engine_ms": 1234567.0' in as_json.output
