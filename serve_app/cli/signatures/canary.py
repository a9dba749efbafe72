"""`loraplex canary status|start|promote|abort`: the signatures."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.signatures.body import Group, body_in
from serve_app.cli.signatures.options import DEFAULT_URL, Json, Url

app = typer.Typer(
    help="Try a version of an adapter on a share of the requests.", no_args_is_help=True, cls=Group
)

Name = Annotated[str, typer.Argument(help="Adapter")]


@app.command()
@body_in("canary")
def status(
    name: Annotated[str | None, typer.Argument(help="Adapter; default: all")] = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show weights, both arms' numbers and the verdict."""


@app.command()
@body_in("canary")
def start(
    name: Name,
    version: Annotated[int | None, typer.Option("--version", help="Number of the version")] = None,
    alias: Annotated[str | None, typer.Option("--alias", help="Or an alias that it has")] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", help="Share of the requests that it answers, 0 to 1")
    ] = None,
    shadow: Annotated[
        float | None, typer.Option("--shadow", help="Share of the requests that it gets copies of")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Send a share of the requests for NAME to another version, or copies of them."""


@app.command()
@body_in("canary")
def promote(
    name: Name,
    version: Annotated[
        int | None, typer.Option("--version", help="Refuse unless this version is the canary")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Make the canary the stable version of NAME."""


@app.command()
@body_in("canary")
def abort(name: Name, url: Url = DEFAULT_URL) -> None:
    """End the canary and the shadow of NAME."""
