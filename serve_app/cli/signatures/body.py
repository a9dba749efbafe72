"""Connects a command's signature to its body, which is imported when the command is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec

from serve_app.cli.commands.common import Failure

_ROOMS = frozenset({"serve_app", "engine", "lora", "kernels", "registry"})

P = ParamSpec("P")


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
