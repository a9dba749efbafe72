"""Connects a command's signature to its body, which is imported when the command is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec

from typer.core import TyperGroup

from serve_app.cli.commands.failure import Failure

_ROOMS = frozenset({"serve_app", "engine", "lora", "kernels", "registry"})

P = ParamSpec("P")


class Group(TyperGroup):
    """A group whose own --help is False, not None, while a command below it is parsed: typer would
    import pydantic to convert the None."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


def body_in(module: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorates a signature: the function of the same name in serve_app/cli/commands/MODULE.py has
    the same parameters and does the work."""

    def decorate(signature: Callable[P, None]) -> Callable[P, None]:
        @wraps(signature)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                body = getattr(
                    import_module(f"serve_app.cli.commands.{module}"), signature.__name__
                )
                body(*args, **kwargs)
            except ModuleNotFoundError as error:  # an extra that is not installed
                if error.name is None or error.name.partition(".")[0] in _ROOMS:
                    raise
                words = f"This command needs the package {error.name}: pip install 'loraplex[demo]'"
                raise Failure(words) from error

        return run

    return decorate
