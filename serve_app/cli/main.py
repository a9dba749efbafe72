"""`loraplex`: the command line. A failure becomes a sentence on stderr and exit code 1.

A command imports its libraries when it is called: torch, MLflow and Ray take seconds.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from engine.errors import EngineError
from registry.errors import RegistryError
from serve_app import home
from serve_app.cli.commands import adapters, bases, canary, keys
from serve_app.cli.commands.common import Failure
from serve_app.cli.commands.route import route
from serve_app.cli.commands.usage import usage
from serve_app.cli.signatures import clients, local, register
from serve_app.cli.signatures.options import Group

_GROUPS = {
    "register": register,
    "bases": bases,
    "adapters": adapters,
    "canary": canary,
    "keys": keys,
}
_COMMANDS: dict[str, Callable[..., None]] = {
    "serve": local.serve,
    "demo": local.demo,
    "check": local.check,
    "models": local.models,
    "route": route,
    "chat": clients.chat,
    "bench": clients.bench,
    "doctor": local.doctor,
    "warm": local.warm,
    "usage": usage,
}


def build() -> typer.Typer:
    app = typer.Typer(
        name="loraplex",
        cls=Group,
        help="Many LoRA adapters on few base models, behind one OpenAI-compatible endpoint.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name, command in _COMMANDS.items():
        app.command(name)(command)
    for name, group in _GROUPS.items():
        app.add_typer(group.app, name=name)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    if arguments is None:
        _collect_less()
    words = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        build()(words, prog_name="loraplex")
    except (Failure, RegistryError, EngineError, OSError) as error:
        cause = home.cause(error) if isinstance(error, RegistryError | OSError) else ""
        Console(stderr=True).print("[red]error:[/]", Text(f"{error}{cause}"), soft_wrap=True)
        sys.exit(1)


def _collect_less() -> None:
    """Keeps collections of garbage from a third of a command's start, and from half a second of its
    end: its imports make a million objects that stay."""
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"loraplex {version('loraplex')}")
        raise typer.Exit


def _root(
    is_version_wanted: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Many LoRA adapters on few base models, behind one OpenAI-compatible endpoint."""
