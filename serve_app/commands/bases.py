"""`loraplex bases list|add|remove|sleep|wake`: base models of a running server."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from serve_app.commands.admin_client import DEFAULT, Url, call_admin
from serve_app.commands.common import Failure, console

app = typer.Typer(help="Base models of a running server.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A registered base model")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait, with --wait")]
_POLL_S = 0.3
_TIMEOUT_S = 1800.0


class _Line(msgspec.Struct):
    name: str
    version: int | None
    state: str
    message: str
    source: str
    replicas: int
    wanted_replicas: int
    draining_replicas: int
    min_replicas: int
    max_replicas: int
    idle_s: float | None
    start_s: float | None


class _Lines(msgspec.Struct):
    bases: list[_Line]


@app.command("list")
def list_bases(url: Url = DEFAULT) -> None:
    """How each base stands."""
    table = Table(
        "base", "version", "state", "replicas", "named by", "idle", "last start", box=None
    )
    lines = _lines(url)
    for line in lines:
        version = "" if line.version is None else str(line.version)
        table.add_row(
            line.name,
            version,
            line.state,
            _replicas(line),
            line.source,
            _seconds(line.idle_s),
            _seconds(line.start_s),
        )
    console.print(table)
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
        typer.Option("--engine", metavar="KEY=VALUE", help="As below models[].engine in the file"),
    ] = None,
    wait: Wait = False,
    timeout_s: Timeout = _TIMEOUT_S,
    url: Url = DEFAULT,
) -> None:
    """Serve a registered base, or with other settings; the others keep serving."""
    settings: dict[str, object] = {
        "replicas": replicas,
        "idle_timeout_s": idle_timeout_s,
        "cold_start": cold_start,
        "engine": _engine(engine) if engine else None,
    }
    given = {key: value for key, value in settings.items() if value is not None}
    call_admin(url, "POST", "/bases", {"name": name, **given})
    _report(url, name, "running", wait, timeout_s, f"{name} is being started")


@app.command()
def remove(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT
) -> None:
    """Serve it no more; requests in flight finish."""
    call_admin(url, "DELETE", f"/bases/{name}")
    _report(url, name, "gone", wait, timeout_s, f"{name} is drained and removed")


@app.command()
def sleep(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT
) -> None:
    """Stop its engines until a request comes."""
    call_admin(url, "POST", f"/bases/{name}/sleep")
    _report(url, name, "asleep", wait, timeout_s, f"{name} goes to sleep")


@app.command()
def wake(
    name: Name, wait: Wait = False, timeout_s: Timeout = _TIMEOUT_S, url: Url = DEFAULT
) -> None:
    """Start its engines."""
    call_admin(url, "POST", f"/bases/{name}/wake")
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
    """Raises Failure where waiting is of no use."""
    lines = [line for line in _lines(url) if line.name == name]
    if wanted == "gone":
        return not lines
    current = [line for line in lines if line.state != "draining"]
    if failed := [line for line in current if line.state == "failed"]:
        raise Failure(f"{name} does not start: {failed[0].message}")
    # While the version before stands in, both are there.
    return bool(current) and all(line.state == wanted for line in current)


def _lines(url: str) -> list[_Line]:
    return msgspec.convert(call_admin(url, "GET", "/bases"), _Lines).bases


def _replicas(line: _Line) -> str:
    """2 (1 starting, 1 draining) of 1-3"""
    starting = max(0, line.wanted_replicas - line.replicas)
    parts = ((starting, "starting"), (line.draining_replicas, "draining"))
    told = ", ".join(f"{count} {word}" for count, word in parts if count)
    text = f"{line.replicas} ({told})" if told else str(line.replicas)
    is_scaled = line.max_replicas > line.min_replicas
    return f"{text} of {line.min_replicas}-{line.max_replicas}" if is_scaled else text


def _engine(pairs: list[str]) -> dict[str, object]:
    """Values as JSON where they are, else as words: the server checks them."""
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
