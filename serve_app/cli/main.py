"""`loraplex`: the command line. A failure becomes a sentence on stderr and exit code 1.

A command imports its libraries when it is called: torch, MLflow and Ray take seconds.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from engine.errors import EngineError
from registry.errors import NoAnswerError, RegistryError
from serve_app import home
from serve_app.cli import signatures
from serve_app.cli.commands import adapters, bases, canary, keys
from serve_app.cli.commands.common import Failure
from serve_app.cli.commands.demo import demo
from serve_app.cli.commands.models import models
from serve_app.cli.commands.route import route
from serve_app.cli.commands.usage import usage
from serve_app.cli.options import Group

_ROOMS = frozenset({"serve_app", "engine", "lora", "kernels", "registry"})
_COMMANDS = (
    *(signatures.serve, demo, signatures.check, models, route, signatures.chat),
    *(signatures.bench, signatures.doctor, signatures.warm, usage),
)
_GROUPS = (signatures.register, bases.app, adapters.app, canary.app, keys.app)


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
    for command in _COMMANDS:
        app.command()(command)
    for group in _GROUPS:
        app.add_typer(group)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    if arguments is None:
        # Keeps collections of garbage from a third of a command's start, and from half a second of
        # its end: its imports make a million objects that stay.
        gc.set_threshold(10_000)
        atexit.register(gc.freeze)
    words = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its tries: a failure is one sentence
    try:
        build()(words, prog_name="loraplex")
    except ModuleNotFoundError as error:  # an extra that is not installed
        if error.name is None or error.name.partition(".")[0] in _ROOMS:
            raise
        _fail(f"This command needs the package {error.name}: pip install 'loraplex[demo]'")
    except (Failure, RegistryError, EngineError, OSError) as error:
        cause = home.cause(error) if isinstance(error, RegistryError | OSError) else ""
        if isinstance(error, NoAnswerError):
            cause += "; start it, or name another registry in MLFLOW_TRACKING_URI"
        _fail(f"{error}{cause}")


def _fail(words: str) -> NoReturn:
    Console(stderr=True).print("[red]error:[/]", Text(words), soft_wrap=True)
    sys.exit(1)


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
