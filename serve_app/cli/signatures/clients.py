"""The signatures of `chat` and `bench`, which are clients of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.signatures.body import body_in
from serve_app.cli.signatures.options import DEFAULT_URL, Url


@body_in("chat")
def chat(
    model: Annotated[str | None, typer.Argument(help="Default: the first base model")] = None,
    url: Url = DEFAULT_URL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="0: always the likeliest token")
    ] = 0.0,
) -> None:
    """Talk to a running server."""


@body_in("bench")
def bench(
    url: Url = DEFAULT_URL,
    models: Annotated[str | None, typer.Option(help="a,b; default: all")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all, over all models")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that are open at a time")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, about")] = 64,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Stream the answers, or take them whole")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Append JSON lines here")] = None,
) -> None:
    """Measure a running server. A stream that is cut counts as a failure; then exit code 1."""
