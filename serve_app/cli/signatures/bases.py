"""`loraplex bases list|add|remove|sleep|wake`: the signatures."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.signatures.body import Group, body_in
from serve_app.cli.signatures.options import DEFAULT_URL, Json, Url

app = typer.Typer(help="Base models of a running server.", no_args_is_help=True, cls=Group)

Name = Annotated[str, typer.Argument(help="A registered base model")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait, with --wait")]
_TIMEOUT_S = 1800.0


@app.command("list")
@body_in("bases")
def list_bases(url: Url = DEFAULT_URL, json: Json = False) -> None:
    """List the bases with their state and replicas."""


@app.command()
@body_in("bases")
def add(
    name: Name,
    replicas: Annotated[int | None, typer.Option(help="Engines")] = None,
    idle_timeout_s: Annotated[
        float | None, typer.Option("--idle-timeout", help="Seconds without a request, then sleep")
    ] = None,
    cold_start: Annotated[
        str | None, typer.Option(help="A request for it while it sleeps: wait, or refuse")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="KEY=VALUE", help="As below models[].engine in the file"),
    ] = None,
    wait: Wait = False,
    timeout_s: Timeout = _TIMEOUT_S,
    url: Url = DEFAULT_URL,
) -> None:
    """Serve a registered base, or with other settings; the others keep serving."""


@app.command()
@body_in("bases")
def remove(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT_URL
) -> None:
    """Serve it no more; requests in flight finish."""


@app.command()
@body_in("bases")
def sleep(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT_URL
) -> None:
    """Stop its engines until a request comes."""


@app.command()
@body_in("bases")
def wake(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT_URL
) -> None:
    """Start its engines."""
