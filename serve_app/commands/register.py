"""`loraplex register base|adapter`: check a folder and put it into the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from registry.cache import Cache
from registry.catalog import DEFAULT_ALIAS
from registry.entities import AdapterVersion, BaseVersion
from serve_app import config
from serve_app.commands.common import byte_progress, console
from serve_app.commands.effect_table import print_effect
from serve_app.commands.store import Uri, open_registry
from serve_app.effect import Wish
from serve_app.register import register_adapter, register_base

app = typer.Typer(help="Check a model folder and register it.", no_args_is_help=True)

_WISHES: dict[bool | None, Wish] = {None: "auto", True: "always", False: "never"}

Folder = Annotated[Path, typer.Argument(help="Folder with the files")]
Name = Annotated[str, typer.Option("--name", help="Name to register it under")]
Alias = Annotated[str, typer.Option("--alias", help="Alias that points to this version")]


@app.command()
def base(
    folder: Folder,
    name: Name,
    alias: Alias = DEFAULT_ALIAS,
    model_id: Annotated[
        str, typer.Option("--model-id", help="ORGANISATION/NAME, by which clients may call it too")
    ] = "",
    tracking_uri: Uri = None,
) -> None:
    """Register a base model: a Hugging Face folder with config.json and safetensors."""
    registry = open_registry(tracking_uri)
    with byte_progress() as progress:
        registered = register_base(
            registry, folder, name, alias=alias, model_id=model_id, progress=progress
        )
    version = registered.version
    _print_version(
        "Base model",
        version,
        {
            "architecture": version.architecture,
            "parameters": f"{version.num_parameters:,}",
            "context": f"{version.max_model_len or 'unknown'} tokens",
            **({"model id": version.model_id} if version.model_id else {}),
        },
    )
    _print_warnings(registered.warnings)


@app.command()
def adapter(
    folder: Folder,
    name: Name,
    base: Annotated[str, typer.Option("--base", help="Registered NAME, NAME@ALIAS or NAME@N")],
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
    tracking_uri: Uri = None,
) -> None:
    """Register a LoRA adapter: a PEFT folder with adapter_config.json and safetensors."""
    registry = open_registry(tracking_uri)
    cache = Cache(config.cache_folder())
    with byte_progress() as progress:
        registered = register_adapter(
            registry,
            folder,
            name,
            base,
            cache=cache,
            alias=alias,
            probe=_WISHES[probe],
            allow_noop=allow_noop,
            force=force,
            progress=progress,
        )
    version = registered.version
    _print_version(
        "Adapter",
        version,
        {
            "base": version.base_name,
            "rank": str(version.rank),
            "targets": ", ".join(version.targets),
            "parameters": f"{version.num_parameters:,}",
        },
    )
    assert registered.effect is not None
    print_effect(registered.effect)
    if registered.effect.verdict == "unprobed":
        check = f"loraplex check {version.name}@{version.version}"
        console.print(f"To see what it changes: {check}", highlight=False)
    _print_warnings(registered.warnings)


def _print_version(kind: str, version: BaseVersion | AdapterVersion, facts: dict[str, str]) -> None:
    console.print(f"{kind} [bold]{version.name}[/] version {version.version} is registered")
    table = Table(box=None, show_header=False, padding=(0, 2))
    aliases = ", ".join(version.aliases) or "none"
    for key, value in {"digest": version.digest, "aliases": aliases, **facts}.items():
        table.add_row(f"[dim]{key}[/]", value)
    console.print(table)


def _print_warnings(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        console.print("[yellow]warning:[/]", Text(warning))
