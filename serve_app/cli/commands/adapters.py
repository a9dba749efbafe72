"""`loraplex adapters list|pin|unpin|preload|evict`: the adapters of a running server."""

from __future__ import annotations

from rich.table import Table

from serve_app.admin_api import AdapterLine, AdapterLines, AdapterResidency, EngineResults
from serve_app.cli.commands.admin_client import call_admin
from serve_app.cli.commands.common import console, print_json, print_table


def list_adapters(url: str, everything: bool, json: bool) -> None:
    lines = call_admin(url, "GET", "/adapters", AdapterLines).adapters
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


def pin(name: str, url: str) -> None:
    call_admin(url, "POST", f"/adapters/{name}/pin", dict)
    console.print(f"{name} is pinned; the engines load it now", highlight=False)


def unpin(name: str, url: str) -> None:
    call_admin(url, "POST", f"/adapters/{name}/unpin", dict)
    console.print(f"{name} is not pinned any more", highlight=False)


def preload(name: str, url: str) -> None:
    _order(url, name, "preload")


def evict(name: str, url: str) -> None:
    _order(url, name, "evict")


def _order(url: str, name: str, what: str) -> None:
    done = call_admin(url, "POST", f"/adapters/{name}/{what}", EngineResults)
    for one in done.engines:
        where = f"{done.name}@{done.version} on engine {one.engine}"
        found = {"memory": "was in memory", "disk": "loaded from disk"}.get(one.outcome)
        if found is None:
            found = "fetched from the registry" if one.outcome == "registry" else one.outcome
        console.print(f"{where}: {found}", highlight=False)


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
