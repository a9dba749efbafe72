"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from serve_app.cli.commands.failure import DEFAULT_URL as DEFAULT_URL

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
