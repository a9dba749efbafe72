"""`loraplex bases list|add|remove|sleep|wake`: base models of a running server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from serve_app.cli.commands.admin_client import call_server
from serve_app.cli.commands.common import Failure, console, print_json, print_table
from serve_app.cli.options import DEFAULT_URL, Json, Url, group

if TYPE_CHECKING:
    from serve_app.platform_view import BaseLine

app = group("bases", "Base models of a running server.")

Name = Annotated[str, typer.Argument(help="A registered base model")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait, with --wait")]
_TIMEOUT_S = 1800.0
_POLL_S = 0.3


@app.command("list")
def list_bases(url: Url = DEFAULT_URL, json: Json = False) -> None:
    """List the bases with their state and replicas."""
    lines = _lines(url)
    if json:
        print_json({"bases": lines})
        return
    table = Table(
        "base", "version", "state", "replicas", "named by", "idle", "last start", box=None
    )
    for line in lines:
        version = "" if line.version is None else str(line.version)
        times = _seconds(line.idle_s), _seconds(line.start_s)
        table.add_row(line.name, version, line.state, _replicas(line), line.source, *times)
    print_table(table)
    for line in lines:
        if line.message:
            words = Text(f"{line.name}: {line.message}")
            console.print(words, style="yellow", highlight=False, soft_wrap=True)


@app.command()
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
        typer.Option(metavar="KEY=VALUE", help="As below models[].engine in the file"),
    ] = None,
    wait: Wait = False,
    timeout_s: Timeout = _TIMEOUT_S,
    url: Url = DEFAULT_URL,
) -> None:
    """Serve a registered base, or with other settings; the others keep serving."""
    body: dict[str, object] = {
        "name": name,
        "replicas": replicas,
        "idle_timeout_s": idle_timeout_s,
        "cold_start": cold_start,
        "engine": _engine(engine) if engine else None,
    }
    call_server(url, "POST", "/admin/bases", dict, body)
    _report(url, name, "running", wait, timeout_s, f"{name} is being started")


@app.command()
def remove(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT_URL
) -> None:
    """Serve it no more; requests in flight finish."""
    from serve_app.admin_api import BaseRemoval

    removed = call_server(url, "DELETE", f"/admin/bases/{name}", BaseRemoval)
    if (other := removed.still_served_as) is None:
        _report(url, name, "gone", wait, timeout_s, f"{name} is drained and removed")
        return
    _report(url, name, "removed", wait, timeout_s, f"{name} is removed")
    words = f"Its files stay served as {other}, which also answers requests for {name}"
    console.print(words, soft_wrap=True, highlight=False)


@app.command()
def sleep(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT_URL
) -> None:
    """Stop its engines until a request comes."""
    call_server(url, "POST", f"/admin/bases/{name}/sleep", dict)
    _report(url, name, "asleep", wait, timeout_s, f"{name} goes to sleep")


@app.command()
def wake(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT_URL
) -> None:
    """Start its engines."""
    call_server(url, "POST", f"/admin/bases/{name}/wake", dict)
    _report(url, name, "running", wait, timeout_s, f"{name} wakes")


def _report(url: str, name: str, wanted: str, wait: bool, timeout_s: float, words: str) -> None:
    if not wait:
        console.print(words)
        return
    began_s = time.monotonic()
    with console.status(words):
        while not _is_reached(url, name, wanted):
            if time.monotonic() - began_s > timeout_s:
                raise Failure(f"{name} is not {wanted} after {timeout_s:.0f} s")
            time.sleep(_POLL_S)
    console.print(f"{name} is {wanted} after {time.monotonic() - began_s:.1f} s")


def _is_reached(url: str, name: str, wanted: str) -> bool:
    """Raises Failure if the base has failed."""
    lines = [line for line in _lines(url) if name in (line.name, f"{line.name}@{line.version}")]
    if wanted in ("gone", "removed"):
        return not lines
    current = [line for line in lines if line.state != "draining"]
    if failed := [line for line in current if line.state == "failed"]:
        raise Failure(f"{name} does not start: {failed[0].message}")
    # While the previous version still serves, both are listed.
    return bool(current) and all(line.state == wanted for line in current)


def _lines(url: str) -> tuple[BaseLine, ...]:
    from serve_app.platform_view import BaseLines

    return call_server(url, "GET", "/admin/bases", BaseLines).bases


def _replicas(line: BaseLine) -> str:
    """Returns, for example, "2 (1 starting, 1 draining) of 1-3"."""
    starting = max(0, line.wanted_replicas - line.replicas)
    parts = ((starting, "starting"), (line.draining_replicas, "draining"))
    counts = ", ".join(f"{count} {word}" for count, word in parts if count)
    text = f"{line.replicas} ({counts})" if counts else str(line.replicas)
    is_scaled = line.max_replicas > line.min_replicas
    return f"{text} of {line.min_replicas}-{line.max_replicas}" if is_scaled else text


def _engine(pairs: list[str]) -> dict[str, object]:
    """Returns the settings; a value that is no JSON is a string. The server checks them."""
    import msgspec

    settings: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise Failure(f"--engine {pair}: write KEY=VALUE")
        try:
            settings[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            settings[key] = value
    return settings


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"
