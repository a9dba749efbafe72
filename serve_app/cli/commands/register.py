"""`loraplex register base|adapter`: check a folder and put it into the registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

from engine.checks.fit import estimate_fit
from engine.checks.validation import ConversionLimits
from engine.errors import UnsupportedModelError
from registry.entities import AdapterVersion, BaseVersion
from registry.manifest import Progress
from serve_app.cli.commands.common import Failure, byte_progress, console, print_facts
from serve_app.cli.commands.effect_table import print_effect
from serve_app.cli.commands.store import open_cache, open_existing, open_registry
from serve_app.cli.effect import ProbeMode
from serve_app.cli.registration import register_adapter, register_base
from serve_app.config import RegistryArgs, default_home
from serve_app.home import prepare

_MODES: dict[bool | None, ProbeMode] = {None: "auto", True: "always", False: "never"}


def base(folder: Path, name: str, alias: str, model_id: str, tracking_uri: str | None) -> None:
    registry = open_registry(tracking_uri)
    with byte_progress() as progress, _as_folder(folder, progress) as (found, types):
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
        fit = estimate_fit(folder)
        if types:
            made_of = ", ".join(f"{kind} ({count} tensors)" for kind, count in types.items())
            fit = replace(fit, stored_as=f"plain weights in bfloat16, converted from {made_of}")
        print_facts(fit.facts().items())


@contextmanager
def _as_folder(path: Path, progress: Progress) -> Iterator[tuple[Path, dict[str, int]]]:
    """Yields the folder of a base and the number of tensors of each type of the GGUF file that it
    is made of; none for a folder that is given. The folder is made beside the store, so that its
    files can be linked, and is named as the file."""
    if path.suffix.lower() != ".gguf" or not path.is_file():
        yield path, {}
        return
    try:
        from engine.tools.gguf import convert_gguf  # it needs packages of the extra `demo`
    except ImportError as error:
        remedy = "pip install 'loraplex[demo]'"
        raise Failure(f"{path.name} needs the package {error.name}: {remedy}") from None
    home = prepare(default_home())
    with TemporaryDirectory(prefix=".gguf.", dir=home) as scratch:
        folder = Path(scratch) / path.stem
        try:
            types = convert_gguf(
                path, folder, lambda stage: progress(stage, 0, path.stat().st_size)
            )
        except (UnsupportedModelError, ValueError, IndexError) as error:
            raise Failure(f"{path.name} cannot be read: {error}") from error
        yield folder, types


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
