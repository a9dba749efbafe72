"""`loraplex keys create|list|info|rotate|revoke`: the keys of the clients of a running server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from serve_app.cli.commands.admin_client import call_server
from serve_app.cli.commands.common import console, print_facts, print_json, print_table
from serve_app.cli.options import DEFAULT_URL, Json, Url, group

if TYPE_CHECKING:
    from serve_app.admin_api import KeyLine

app = group("keys", "Keys of the clients of a running server (tenancy.enabled).")

_PAGE = 1000
_WHOLE_KEY = re.compile(r"lpx_([a-z0-9]{10})_[\w-]{43}")

Key = Annotated[str, typer.Argument(help="Id, alias or the key itself")]


@app.command()
def create(
    alias: Annotated[str | None, typer.Option(help="A name for people")] = None,
    tenant: Annotated[str, typer.Option(help="Whom its requests are charged to")] = "",
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Glob of models: base, base:adapter, adapter@3; default: all"),
    ] = None,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", help="infer (default), load, admin:read or admin; repeatable"),
    ] = None,
    duration: Annotated[
        str | None, typer.Option(help="Until it expires: 12h, 30d; default: never")
    ] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests per minute")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Tokens per minute")] = None,
    max_parallel_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests at once")
    ] = None,
    tokens_per_day: Annotated[int | None, typer.Option(min=1, help="Tokens per day, UTC")] = None,
    tokens_per_month: Annotated[
        int | None, typer.Option(min=1, help="Tokens per month, UTC")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of one answer")] = None,
    lowest_priority: Annotated[
        int | None,
        typer.Option(help="The smallest `priority` allowed, also of requests without one"),
    ] = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Make a key and print it, this once."""
    body: dict[str, object] = {
        "key_alias": alias,
        "team_id": tenant or None,
        "models": models or None,
        "scopes": scopes or None,
        "duration": duration,
        "rpm_limit": rpm,
        "tpm_limit": tpm,
        "max_parallel_requests": max_parallel_requests,
        "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month,
        "max_tokens": max_tokens,
        "lowest_priority": lowest_priority,
    }
    _print_new(url, "/key/generate", body, json)


@app.command(name="list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only")] = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List the keys that are not revoked."""
    from serve_app.admin_api import KeyLines

    lines: list[KeyLine] = []
    page, pages = 1, 1
    team = "" if tenant is None else f"&team_id={quote(tenant, safe='')}"
    while page <= pages:
        path = f"/key/list?return_full_object=true&page={page}&size={_PAGE}{team}"
        found = call_server(url, "GET", path, KeyLines)
        lines += found.keys
        page, pages = page + 1, found.total_pages
    if json:
        print_json({"keys": lines})
        return
    columns = ("id", "alias", "tenant", "models", "scopes", "limits", "expires")
    table = Table(*columns, box=None)
    for line in lines:
        limits = ", ".join(f"{words} {value}" for words, value in _limits(line))
        facts = _facts(line) | {"limits": limits}
        # The brackets of a glob are no markup.
        table.add_row(*(Text(facts[name]) for name in columns))
    print_table(table)


@app.command()
def info(key: Key, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Show a key with its rules."""
    from serve_app.admin_api import KeyInfo

    whole = _WHOLE_KEY.fullmatch(key)
    key = whole[1] if whole else key  # gateways log addresses: the secret is in none
    line = call_server(url, "GET", f"/key/info?key={quote(key, safe='')}", KeyInfo).info
    if json:
        print_json(line)
        return
    facts = _facts(line)
    if line.previous_secret_until is not None:
        facts["former secret until"] = line.previous_secret_until
    print_facts((facts | {words: str(value) for words, value in _limits(line)}).items())


@app.command()
def rotate(
    key: Key,
    grace: Annotated[
        str, typer.Option(help="For how long the former secret counts: 15m, 24h")
    ] = "0s",
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Give a key a new secret and print it, this once."""
    _print_new(url, "/key/regenerate", {"key": key, "grace_period": grace}, json)


@app.command()
def revoke(key: Key, url: Url = DEFAULT_URL) -> None:
    """End a key, on every ingress within a second or two."""
    done = call_server(url, "POST", "/key/delete", dict, {"keys": [key]})
    console.print(f"revoked: {', '.join(done['deleted_keys'])}", highlight=False)


def _print_new(url: str, path: str, body: Mapping[str, object], json: bool) -> None:
    from serve_app.admin_api import NewKey

    line = call_server(url, "POST", path, NewKey, body)
    if json:
        print_json(line)
        return
    console.print(line.key, markup=False, highlight=False, soft_wrap=True)
    console.print("[dim]It is shown this once; the server keeps only its hash.[/]")


def _facts(line: KeyLine) -> dict[str, str]:
    return {
        "id": line.token_id,
        "alias": line.key_alias or "",
        "tenant": line.team_id,
        "models": " ".join(line.models),
        "scopes": " ".join(line.scopes),
        "created": line.created_at,
        "expires": line.expires or "never",
    }


def _limits(line: KeyLine) -> list[tuple[str, int]]:
    found = {
        "rpm": line.rpm_limit,
        "tpm": line.tpm_limit,
        "at once": line.max_parallel_requests,
        "tokens a day": line.tokens_per_day,
        "tokens a month": line.tokens_per_month,
        "max_tokens": line.max_tokens,
        "lowest priority": line.lowest_priority,
    }
    return [(words, value) for words, value in found.items() if value is not None]
