"""`loraplex`: the command line. Each command lives in `serve_app/commands/`; here they meet, and a
failure becomes one sentence on stderr and exit code 1.

Only the command that is called is imported: torch, MLflow and Ray take seconds, a chat needs none.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import typer
from rich.console import Console
from rich.text import Text

from engine.errors import EngineError
from registry.errors import RegistryError
from serve_app.commands.common import Failure

COMMANDS = (
    *("serve", "demo", "register", "check", "models", "bases", "adapters", "canary"),
    *("route", "chat", "bench", "doctor"),
)


def build(names: Sequence[str] = COMMANDS) -> typer.Typer:
    app = typer.Typer(
        name="loraplex",
        help="Many LoRA adapters on few base models, behind one OpenAI-compatible endpoint.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name in names:
        try:
            module = import_module(f"serve_app.commands.{name}")
        except ModuleNotFoundError as error:  # an extra that is not installed
            app.command(name)(_refusing(error))
            continue
        if hasattr(module, "app"):  # a group of commands
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    called = [words[0]] if words and words[0] in COMMANDS else COMMANDS
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        build(called)(words, prog_name="loraplex")
    except (Failure, RegistryError, EngineError, OSError) as error:
        Console(stderr=True).print("[red]error:[/]", Text(str(error)), soft_wrap=True)
        sys.exit(1)


def _refusing(missing: ModuleNotFoundError) -> Callable[[], None]:
    """A command in the place of one that cannot be imported."""
    words = f"needs the package {missing.name}: pip install 'loraplex[demo]'"

    def refuse() -> None:
        raise Failure(f"This command {words}")

    refuse.__doc__ = f"(not installed: {words})"
    return refuse


def _root() -> None:
    """Keeps `loraplex NAME` a group of commands even where only one was imported."""
