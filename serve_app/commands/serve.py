"""`loraplex serve CONFIG`: `serve run` with a check before, a wait until ready, and a clean end.

The environment is read here only to be handed on to the child.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import httpx
import msgspec
from rich.text import Text

from registry.errors import RegistryError
from serve_app import admin_auth, config, launch
from serve_app.commands.common import Failure, console, list_served, ready_status
from serve_app.commands.store import open_configured
from serve_app.demo.examples import EXAMPLES
from serve_app.home import prepare
from serve_app.serve_file import ServeFile, ServeFileError, read_serve_file

_POLL_S = 0.3
_SHOWN_LOG_LINES = 25
_KEPT_LOGS = 10
_QUESTION = "What is the capital of France?"


class _Signals:
    """Counts Ctrl-C, SIGTERM and SIGHUP: the first asks for an end, the second for a quick one."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def serve(file: Path, timeout_s: float, haproxy: bool) -> None:
    home = prepare(config.default_home())
    try:
        wanted = read_serve_file(file)
        with launch.only_one(home, wanted.url), _signals() as signals:
            launch.check_port(wanted.host, wanted.port)
            _warn_of_missing(wanted)
            environment = {**os.environ, config.ADMIN_TOKEN: admin_auth.ensure_token(home)}
            child = launch.start(file, _new_log(home / "logs"), environment, haproxy=haproxy)
            try:
                _run(wanted, child, signals, timeout_s)
            finally:
                with console.status("Stopping (again Ctrl-C to stop at once)"):
                    launch.stop(child, lambda: signals.count > 1)
                console.print("Stopped; nothing is left running.")
    except (ServeFileError, launch.LaunchError) as error:
        raise Failure(str(error)) from error


def _warn_of_missing(wanted: ServeFile) -> None:
    """Not a refusal: the server takes up a base as soon as the registry has it."""
    with console.status("Looking into the registry"):
        try:
            catalog = open_configured(wanted.args.registry).snapshot()
        except RegistryError as error:
            console.print("[yellow]warning:[/]", Text(f"the registry does not answer: {error}"))
            return
    for model in wanted.args.models:
        try:
            catalog.resolve_base(model.name)
        except RegistryError as error:
            remedy = "It is served once it is there: loraplex register base, or loraplex demo"
            console.print("[yellow]warning:[/]", Text(f"{error}. {remedy}"), soft_wrap=True)


def _run(wanted: ServeFile, child: launch.Child, signals: _Signals, timeout_s: float) -> None:
    started_s = time.monotonic()
    with console.status("Starting Ray") as status, httpx.Client(timeout=5) as client:
        while not signals.count:
            _check_alive(child)
            _check_deployed(child)
            words = ready_status(client, wanted.url)
            if words is None:
                break
            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s:
                _fail(child, f"Not ready after {timeout_s:.0f} s ({words})")
            status.update(f"{words} ({waited_s:.0f} s; log: {child.log})")
            time.sleep(_POLL_S)
    if signals.count:
        return
    console.print(f"[green]Ready[/] at {wanted.url} after {time.monotonic() - started_s:.1f} s")
    with httpx.Client(timeout=30) as client:
        _print_examples(wanted.url, list_served(client, wanted.url))
    console.print(f"Log: {child.log}. Ctrl-C stops everything.")
    while not signals.count:
        _check_alive(child)
        time.sleep(_POLL_S)


def _check_alive(child: launch.Child) -> None:
    if child.has_ended():
        _fail(child, f"The server ended with exit code {child.process.returncode}")


def _check_deployed(child: launch.Child) -> None:
    if (name := launch.failed_application(launch.log_text(child))) is not None:
        _fail(child, f"Ray Serve could not deploy the application {name!r}")


def _fail(child: launch.Child, reason: str) -> None:
    for line in launch.log_text(child).splitlines()[-_SHOWN_LOG_LINES:]:
        console.print(line, markup=False, highlight=False, style="dim", soft_wrap=True)
    raise Failure(f"{reason}. The end of its log is above, all of it in {child.log}")


def _print_examples(url: str, served: list[tuple[str, str | None]]) -> None:
    """Three lines to paste, with names that this server has; the last one streams."""
    bases = [(name, _QUESTION) for name, parent in served if parent is None]
    adapters = [(f"{parent}:{name}", name) for name, parent in served if parent is not None]
    adapters.sort(key=lambda adapter: adapter[1] not in EXAMPLES)  # the demo's go first
    asked = bases[:1] + [(model, EXAMPLES.get(name, _QUESTION)) for model, name in adapters]
    for number, (model, question) in enumerate((asked * 3)[:3]):
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 64,
            "temperature": 0,
        }
        if is_stream := number == 2:
            body["stream"] = True
        console.print(f"[dim]# {model}{', streaming' if is_stream else ''}[/]")
        data = shlex.quote(msgspec.json.encode(body).decode())
        console.print(
            f"curl -s{'N' if is_stream else ''} {url}/v1/chat/completions "
            f"-H 'content-type: application/json' -d {data}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _new_log(folder: Path) -> Path:
    """Named by the moment; the oldest of many go."""
    for old in sorted(folder.glob("serve-*.log"))[: 1 - _KEPT_LOGS]:
        old.unlink(missing_ok=True)
    return folder / f"serve-{datetime.now(UTC):%Y%m%d-%H%M%S}.log"


@contextmanager
def _signals() -> Iterator[_Signals]:
    """A handler of ours also gives the child the default one: a shell's `&` would ignore SIGINT."""
    counter = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before: list[Callable[[int, FrameType | None], object] | int | None] = [
        signal.signal(number, counter) for number in numbers
    ]
    try:
        yield counter
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
