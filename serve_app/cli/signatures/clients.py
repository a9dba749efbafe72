"""Commands that are a client of a running server: chat, bench, route, usage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.signatures.body import body_in
from serve_app.cli.signatures.options import DEFAULT_URL, Json, Url


@body_in("chat")
def chat(
    model: Annotated[str | None, typer.Argument(help="Default: the first base model")] = None,
    url: Url = DEFAULT_URL,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, max=2, help="0: always the likeliest token")
    ] = 0.0,
) -> None:
    """Talk to a running server."""


@body_in("bench")
def bench(
    url: Url = DEFAULT_URL,
    models: Annotated[str | None, typer.Option("--models", help="a,b; default: all")] = None,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests in all, over all models")
    ] = 64,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Requests that are open at a time")
    ] = 16,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Tokens of an answer, at most")
    ] = 64,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt, about")
    ] = 64,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Stream the answers, or take them whole")
    ] = True,
    json: Annotated[Path | None, typer.Option("--json", help="Append JSON lines here")] = None,
) -> None:
    """Measure a running server. A stream that is cut counts as a failure; then exit code 1."""


@body_in("route")
def route(
    model: Annotated[str, typer.Argument(help="As in a request: BASE, BASE:ADAPTER, NAME@ALIAS")],
    prompt: Annotated[str, typer.Argument(help="What would be asked")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show the replica that a request would go to, and when its first token is expected."""


@body_in("usage")
def usage(
    by: Annotated[
        str, typer.Option("--by", help="Of key, tenant, base, model, arm, hour and day; a,b")
    ] = "key,model",
    from_: Annotated[
        str | None, typer.Option("--from", help="Date or time, UTC; default: this month")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Date or time, UTC, exclusive; default: now")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="CSV with a header")] = False,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show requests, tokens, engine time and cost by key and model (tenancy.enabled)."""
