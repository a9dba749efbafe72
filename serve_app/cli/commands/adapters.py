"""`loraplex adapters list|pin|unpin|preload|evict`: the adapters of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from serve_app.cli.commands.admin_client import call_server
from serve_app.cli.commands.common import console, print_json, print_table
from serve_app.cli.options import DEFAULT_URL, Json, Url, group

if TYPE_CHECKING:
    from serve_app.admin_api import AdapterLine, AdapterResidency

app = group("adapters", "Where adapters are in memory, and what shall stay.")

Name = Annotated[str, typer.Argument(help="NAME, NAME@ALIAS or NAME@VERSION")]
PinName = Annotated[str, typer.Argument(help="NAME; the pin follows what it means")]
_OUTCOMES = {
    "memory": "was in memory",
    "disk": "loaded from disk",
    "registry": "fetched from the registry",
}


@app.command("list")
def list_adapters(
    url: Url = DEFAULT_URL,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what is only on disk or in the registry")
    ] = False,
    json: Json = False,
) -> None:
    """List the adapters in the engines' memory, and the pinned adapters."""
    from serve_app.admin_api import AdapterLines

    lines = call_server(url, "GET", "/admin/adapters", AdapterLines).adapters
    if json:
        print_json({"adapters": lines})
        return
    table = Table("adapter", "base", "engine", "tier", "MiB", "in use", "pin", box=None)
    num_hidden = 0
    for line in lines:
        for place in line.engines:
            in_memory = place.tier in ("device", "host")
            if everything or in_memory or (line.pin and line.is_default):
                table.add_row(*_cells(line, place))
            else:
                num_hidden += 1
    print_table(table)
    if num_hidden:
        console.print(f"{num_hidden} more are on disk or in the registry only: --all")


@app.command()
def pin(name: PinName, url: Url = DEFAULT_URL) -> None:
    """Keep the adapter NAME in the engines' memory, also after its next version."""
    call_server(url, "POST", f"/admin/adapters/{name}/pin", dict)
    console.print(f"{name} is pinned; the engines load it now", highlight=False)


@app.command()
def unpin(name: PinName, url: Url = DEFAULT_URL) -> None:
    """Let it leave memory when others need the room."""
    call_server(url, "POST", f"/admin/adapters/{name}/unpin", dict)
    console.print(f"{name} is not pinned any more", highlight=False)


@app.command()
def preload(name: Name, url: Url = DEFAULT_URL) -> None:
    """Fetch and load it now, on all engines of its base."""
    _order(url, name, "preload")


@app.command()
def evict(name: Name, url: Url = DEFAULT_URL) -> None:
    """Out of the engines' memory; its next request brings it back."""
    _order(url, name, "evict")


def _order(url: str, name: str, what: str) -> None:
    from serve_app.admin_api import EngineResults

    done = call_server(url, "POST", f"/admin/adapters/{name}/{what}", EngineResults)
    for one in done.engines:
        where = f"{done.name}@{done.version} on engine {one.engine}"
        console.print(f"{where}: {_OUTCOMES.get(one.outcome, one.outcome)}", highlight=False)


def _cells(line: AdapterLine, place: AdapterResidency) -> tuple[str, ...]:
    aliases = "".join(f" @{alias}" for alias in line.aliases)
    pinned = "yes" if place.pinned else ""
    if line.pin and line.is_default and not place.pinned:
        pinned = f"wanted: {place.why_not_pinned or 'it is being loaded'}"
    return (
        f"{line.name}@{line.version}{aliases}",
        line.base,
        place.engine,
        f"{place.tier}, leaving" if place.is_leaving is True else place.tier,
        f"{place.bytes / 2**20:.1f}" if place.bytes else "",
        str(place.references or ""),
        pinned,
    )
