"""`loraplex adapters list|pin|unpin|preload|evict`: the signatures."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.signatures.body import Group, body_in
from serve_app.cli.signatures.options import DEFAULT_URL, Json, Url

app = typer.Typer(
    help="Where adapters are in memory, and what shall stay.", no_args_is_help=True, cls=Group
)

Name = Annotated[str, typer.Argument(help="NAME, NAME@ALIAS or NAME@VERSION")]
PinName = Annotated[str, typer.Argument(help="NAME; the pin follows what it means")]


@app.command("list")
@body_in("adapters")
def list_adapters(
    url: Url = DEFAULT_URL,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what is only on disk or in the registry")
    ] = False,
    json: Json = False,
) -> None:
    """List the adapters in the engines' memory, and the pinned adapters."""


@app.command()
@body_in("adapters")
def pin(name: PinName, url: Url = DEFAULT_URL) -> None:
    """Keep the adapter NAME in the engines' memory, also after its next version."""


@app.command()
@body_in("adapters")
def unpin(name: PinName, url: Url = DEFAULT_URL) -> None:
    """Let it leave memory when others need the room."""


@app.command()
@body_in("adapters")
def preload(name: Name, url: Url = DEFAULT_URL) -> None:
    """Fetch and load it now, on all engines of its base."""


@app.command()
@body_in("adapters")
def evict(name: Name, url: Url = DEFAULT_URL) -> None:
    """Out of the engines' memory; its next request brings it back."""
