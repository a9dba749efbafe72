"""`loraplex keys create|list|info|rotate|revoke`: the keys of the clients of a running server."""

from __future__ import annotations

import re
from urllib.parse import quote

import msgspec
from rich.table import Table
from rich.text import Text

from serve_app.admin_api import KeyLine, KeyLines, NewKey
from serve_app.cli.commands.admin_client import call_server
from serve_app.cli.commands.common import console, print_facts, print_json, print_table

_PAGE = 1000
_WHOLE_KEY = re.compile(r"lpx_([a-z0-9]{10})_[\w-]{43}")


class _Info(msgspec.Struct):
    info: KeyLine


def create(
    alias: str | None,
    tenant: str,
    models: list[str] | None,
    scopes: list[str] | None,
    duration: str | None,
    rpm: int | None,
    tpm: int | None,
    max_parallel_requests: int | None,
    tokens_per_day: int | None,
    tokens_per_month: int | None,
    max_tokens: int | None,
    lowest_priority: int | None,
    url: str,
    json: bool,
) -> None:
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
    given = {name: value for name, value in body.items() if value is not None}
    _print_new(call_server(url, "POST", "/key/generate", NewKey, given), json)


def list_keys(tenant: str | None, url: str, json: bool) -> None:
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
    table = Table("id", "alias", "tenant", "models", "scopes", "limits", "expires", box=None)
    for line in lines:
        cells = (
            line.token_id,
            line.key_alias or "",
            line.team_id,
            " ".join(line.models),
            " ".join(line.scopes),
            ", ".join(f"{words} {value}" for words, value in _limits(line)),
            line.expires or "never",
        )
        table.add_row(*map(Text, cells))  # the brackets of a glob are no markup
    print_table(table)


def info(key: str, url: str, json: bool) -> None:
    whole = _WHOLE_KEY.fullmatch(key)
    key = whole[1] if whole else key  # gateways log addresses: the secret is in none
    line = call_server(url, "GET", f"/key/info?key={quote(key, safe='')}", _Info).info
    if json:
        print_json(line)
        return
    facts = [
        ("id", line.token_id),
        ("alias", line.key_alias or ""),
        ("tenant", line.team_id),
        ("models", " ".join(line.models)),
        ("scopes", " ".join(line.scopes)),
        ("created", line.created_at),
        ("expires", line.expires or "never"),
    ]
    if line.previous_secret_until is not None:
        facts.append(("former secret until", line.previous_secret_until))
    print_facts([*facts, *((words, str(value)) for words, value in _limits(line))])


def rotate(key: str, grace: str, url: str, json: bool) -> None:
    body: dict[str, object] = {"key": key, "grace_period": grace}
    _print_new(call_server(url, "POST", "/key/regenerate", NewKey, body), json)


def revoke(key: str, url: str) -> None:
    done = call_server(url, "POST", "/key/delete", dict, {"keys": [key]})
    console.print(f"revoked: {', '.join(done['deleted_keys'])}", highlight=False)


def _print_new(line: NewKey, json: bool) -> None:
    if json:
        print_json(line)
        return
    console.print(line.key, markup=False, highlight=False, soft_wrap=True)
    console.print("[dim]It is shown this once; the server keeps only its hash.[/]")


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
