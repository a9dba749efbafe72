"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from serve_app.field_problems import problem_of

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option("--url", help="Address of the running server")]
Uri = Annotated[
    str | None,
    typer.Option("--tracking-uri", help="MLflow's tracking URI instead of the configured one"),
]
Parity = Annotated[
    bool,
    typer.Option(
        "--parity", help="Compare the logits with those of transformers and PEFT, in float32"
    ),
]
ParityBound = Annotated[
    float,
    typer.Option("--parity-bound", min=0.0, help="With --parity: the largest difference allowed"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable field names")]


class LogFormat(StrEnum):
    text = "text"
    json = "json"


class Group(TyperGroup):
    """A group that refuses a value of a command below it in our words: typer has those of pydantic.

    Its own --help is False, not None, while such a command is parsed: typer would import pydantic
    to convert the None."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if errors := getattr(error.__cause__, "errors", None):
                error.message = problem_of(errors()[0])
            raise

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


def group(name: str, words: str) -> typer.Typer:
    return typer.Typer(name=name, help=words, no_args_is_help=True, cls=Group)
