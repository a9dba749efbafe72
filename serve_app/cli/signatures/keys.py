"""`loraplex keys create|list|info|rotate|revoke`: the signatures."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.signatures.body import Group, body_in
from serve_app.cli.signatures.options import DEFAULT_URL, Json, Url

app = typer.Typer(
    help="Keys of the clients of a running server (tenancy.enabled).",
    no_args_is_help=True,
    cls=Group,
)

Key = Annotated[str, typer.Argument(help="Id, alias or the key itself")]


@app.command()
@body_in("keys")
def create(
    alias: Annotated[str | None, typer.Option("--alias", help="A name for people")] = None,
    tenant: Annotated[str, typer.Option("--tenant", help="Whom its requests are charged to")] = "",
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Glob of models: base, base:adapter, adapter@3; default: all"),
    ] = None,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", help="infer (default), load, admin:read or admin; repeatable"),
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--duration", help="Until it expires: 12h, 30d; default: never")
    ] = None,
    rpm: Annotated[int | None, typer.Option("--rpm", help="Requests per minute")] = None,
    tpm: Annotated[int | None, typer.Option("--tpm", help="Tokens per minute")] = None,
    max_parallel_requests: Annotated[
        int | None, typer.Option("--max-parallel-requests", help="Requests at once")
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option("--tokens-per-day", help="Tokens per day, UTC")
    ] = None,
    tokens_per_month: Annotated[
        int | None, typer.Option("--tokens-per-month", help="Tokens per month, UTC")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of one answer")
    ] = None,
    lowest_priority: Annotated[
        int | None, typer.Option("--lowest-priority", help="The smallest `priority` allowed")
    ] = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Make a key and print it, this once."""


@app.command(name="list")
@body_in("keys")
def list_keys(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Of this tenant only")] = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List the keys that are not revoked."""


@app.command()
@body_in("keys")
def info(key: Key, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Show a key with its rules."""


@app.command()
@body_in("keys")
def rotate(
    key: Key,
    grace: Annotated[
        str, typer.Option("--grace", help="For how long the former secret counts: 15m, 24h")
    ] = "0s",
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Give a key a new secret and print it, this once."""


@app.command()
@body_in("keys")
def revoke(key: Key, url: Url = DEFAULT_URL) -> None:
    """End a key, on every ingress within a second or two."""
