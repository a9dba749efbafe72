"""`loraplex register base|adapter`: the signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from registry.catalog import DEFAULT_ALIAS
from serve_app.cli.signatures.body import body_in
from serve_app.cli.signatures.options import Group, Parity, ParityBound, Uri

app = typer.Typer(help="Check a model folder and register it.", no_args_is_help=True, cls=Group)

Folder = Annotated[Path, typer.Argument(help="Folder with the files")]
Name = Annotated[str, typer.Option("--name", help="Name to register it under")]
Alias = Annotated[str, typer.Option("--alias", help="Alias that points to this version")]


@app.command()
@body_in("register")
def base(
    folder: Folder,
    name: Name,
    alias: Alias = DEFAULT_ALIAS,
    model_id: Annotated[
        str, typer.Option(help="ORGANISATION/NAME, by which clients may call it too")
    ] = "",
    tracking_uri: Uri = None,
) -> None:
    """Register a base model: a Hugging Face folder with config.json and safetensors, plain or
    quantized, or a GGUF file, which is converted."""


@app.command()
@body_in("register")
def adapter(
    folder: Folder,
    name: Name,
    base: Annotated[str, typer.Option(help="Registered NAME, NAME@ALIAS or NAME@N")],
    alias: Alias = DEFAULT_ALIAS,
    probe: Annotated[
        bool | None,
        typer.Option(
            "--probe/--no-probe",
            help="Run the base to see what the adapter changes; default: where it takes seconds",
        ),
    ] = None,
    allow_noop: Annotated[
        bool, typer.Option("--allow-noop", help="Even if it changes nothing")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if its configuration names another base model")
    ] = False,
    max_error: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Of an adapter that becomes LoRA (LoHa, LoKr, saved modules): the largest "
            "relative error of a module",
        ),
    ] = 1e-3,
    max_saved_mib: Annotated[
        float,
        typer.Option(min=0.0, max=1e9, help="The device memory of saved modules, as LoRA, in MiB"),
    ] = 256.0,
    max_minutes: Annotated[float, typer.Option(min=0.0, help="The time of becoming LoRA")] = 30.0,
    parity: Parity = False,
    parity_bound: ParityBound = 1e-3,
    unquantized_base: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the base that it was trained on, if --base is an AWQ base made of it: "
            "the scales that AWQ moved are folded into the adapter"
        ),
    ] = None,
    tracking_uri: Uri = None,
) -> None:
    """Register an adapter: a PEFT folder with adapter_config.json and safetensors."""
