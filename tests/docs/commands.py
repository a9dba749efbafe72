"""`docs/cli.md`, from the typer application."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperGroup

from serve_app.cli.main import build
from tests.docs.markdown import GENERATED, table

INTRODUCTION = """
# The `loraplex` command

`loraplex COMMAND --help` prints the same. A failure is one sentence on stderr and exit code 1; a
wrong command line has exit code 2.
"""


def cli_page() -> str:
    command = typer.main.get_command(build())
    return GENERATED + INTRODUCTION + "".join(_sections(command, "loraplex"))


def _sections(command: Any, path: str) -> list[str]:
    if isinstance(command, TyperGroup):
        parts = [] if path == "loraplex" else [f"\n## `{path}`\n\n{command.help}\n"]
        below = (_sections(one, f"{path} {name}") for name, one in command.commands.items())
        return parts + [text for texts in below for text in texts]
    params = [one for one in command.params if one.name != "help"]
    usage = " ".join([path, *(_word(one) for one in params if isinstance(one, TyperArgument))])
    depth = "##" if path.count(" ") == 1 else "###"
    text = f"\n{depth} `{usage}`\n\n{command.help}\n"
    rows = [(f"`{_name(one)}`", _default(one), one.help or "") for one in params]
    return [text + ("\n" + table(("", "default", ""), rows) if rows else "")]


def _word(param: Any) -> str:
    word = param.metavar or param.opts[0].lstrip("-").upper()
    return word if param.required or not isinstance(param, TyperArgument) else f"[{word}]"


def _name(param: Any) -> str:
    if isinstance(param, TyperArgument):
        return _word(param)
    if param.is_flag:
        return "/".join([*param.opts, *param.secondary_opts])
    return f"{', '.join(param.opts)} {_word(param)}"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    value = getattr(param.default, "value", param.default)
    if value is None or value is False or value == "" or callable(value):
        return ""
    if value is True:
        return f"`{param.opts[0]}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
