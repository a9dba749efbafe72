"""`loraplex register base|adapter`: check a folder and put it into the registry."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from engine.checks.fit import estimate_fit
from engine.checks.validation import ConversionLimits
from engine.errors import UnsupportedModelError
from registry.entities import AdapterVersion, BaseVersion
from serve_app.cli.commands.common import byte_progress, console, print_facts
from serve_app.cli.commands.effect_table import print_effect
from serve_app.cli.commands.gguf_file import as_folder, made_of
from serve_app.cli.commands.store import open_cache, open_existing, open_registry
from serve_app.cli.effect import ProbeMode
from serve_app.cli.registration import register_adapter, register_base
from serve_app.config import RegistryArgs

_MODES: dict[bool | None, ProbeMode] = {None: "auto", True: "always", False: "never"}


def base(folder: Path, name: str, alias: str, model_id: str, tracking_uri: str | None) -> None:
    registry = open_registry(tracking_uri)
    with byte_progress() as progress, as_folder(folder, progress) as (found, types):
        _print_fit(found, types)
        registered = register_base(
            registry,
            found,
            name,
            alias=alias,
            link=bool(types),
            model_id=model_id,
            progress=progress,
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


def adapter(
    folder: Path,
    name: str,
    base: str,
    alias: str,
    probe: bool | None,
    allow_noop: bool,
    force: bool,
    max_error: float,
    max_saved_mib: float,
    max_minutes: float,
    parity: bool,
    parity_bound: float,
    unquantized_base: Path | None,
    tracking_uri: str | None,
) -> None:
    registry = open_existing(RegistryArgs(tracking_uri=tracking_uri))
    cache = open_cache()
    with byte_progress() as progress:
        registered = register_adapter(
            registry,
            folder,
            name,
            base,
            cache=cache,
            alias=alias,
            probe=_MODES[probe],
            allow_noop=allow_noop,
            force=force,
            limits=ConversionLimits(
                max_error, max_bytes=int(max_saved_mib * 1024**2), max_minutes=max_minutes
            ),
            parity=parity_bound if parity else None,
            unquantized_base=unquantized_base,
            progress=progress,
        )
    version = registered.version
    _print_version(
        "Adapter",
        version,
        {
            "base": version.base_name,
            **({"converted": version.converted} if version.converted else {}),
            "rank": str(version.rank),
            "targets": ", ".join(version.targets),
            "parameters": f"{version.num_parameters:,}",
            **_activation(version),
        },
    )
    assert registered.effect is not None
    print_effect(registered.effect)
    if registered.effect.verdict == "unprobed":
        check = f"loraplex check {version.name}@{version.version}"
        console.print(f"To see what it changes: {check}", highlight=False)
    _print_warnings(registered.warnings)


def _print_fit(folder: Path, types: Mapping[str, int]) -> None:
    """Prints the needs of the base before its weights are read, and the types of the GGUF file
    that it was made of. A refusal is left to the registration, whose error has the base's name."""
    with suppress(UnsupportedModelError):
        print_facts(made_of(types, estimate_fit(folder)).facts().items())


def _activation(version: AdapterVersion) -> dict[str, str]:
    """Returns the line about the tokens from which on the adapter is active, if it has any."""
    tokens = " ".join(map(str, version.invocation))
    return {"active from": f"the last tokens {tokens} of a prompt on (aLoRA)"} if tokens else {}


def _print_version(kind: str, version: BaseVersion | AdapterVersion, facts: dict[str, str]) -> None:
    console.print(f"{kind} [bold]{version.name}[/] version {version.version} is registered")
    aliases = ", ".join(version.aliases) or "none"
    print_facts({"digest": version.digest, "aliases": aliases, **facts}.items())


def _print_warnings(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        console.print("[yellow]warning:[/]", Text(warning))
