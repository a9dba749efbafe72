"""`loraplex warm`: compiles the kernels of the file's bases into the cache that engines read."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from engine.devices import describe_devices
from engine.errors import EngineError
from engine.warm_up import check_kernel_cache, warm_cache
from registry.cache import Cache
from registry.catalog import Catalog
from registry.client import Registry
from registry.errors import RegistryError
from serve_app.cli.commands.common import Failure, console
from serve_app.cli.commands.store import open_cache, open_existing
from serve_app.config import ModelArgs
from serve_app.control.base_plan import with_aliases
from serve_app.serve_file import ServeFileError, read_serve_file

_ARCHITECTURE = re.compile(r"sm_([0-9]{1,2})([0-9])")
_FILES = ("config.json", "generation_config.json")  # the weights are not needed


def warm(file: Path, device: str | None, tracking_uri: str | None) -> None:
    try:
        args = read_serve_file(file).args
    except ServeFileError as error:
        raise Failure(str(error)) from error
    capability = None if device is None else _capability(device)
    registry_args = args.registry
    if tracking_uri is not None:
        registry_args = registry_args.model_copy(update={"tracking_uri": tracking_uri})
    registry, cache = open_existing(registry_args), open_cache()
    # The engine's lines have the number of compiled kernels and the folder that keeps them.
    logging.getLogger("engine.warm_up").setLevel(logging.INFO)
    models = []
    for model in args.models:
        if (why := _why_nothing(model, capability is not None)) is not None:
            console.print(f"{model.name}: nothing to compile, {why}", soft_wrap=True)
        else:
            models.append(model)
    if not models:
        return
    # A name without a version has the meaning that it has for the server.
    catalog = with_aliases(registry.snapshot(adopt="no"), registry_args.alias, args.models)
    failures: list[str] = []
    for model in models:
        failures += _warm_base(model, registry, catalog, cache, capability)
    if failures:
        listed = "\n".join(failures)
        raise Failure(f"{len(failures)} kernels could not be compiled:\n{listed}")


def _warm_base(
    model: ModelArgs,
    registry: Registry,
    catalog: Catalog,
    cache: Cache,
    capability: tuple[int, int] | None,
) -> tuple[str, ...]:
    """Returns the reasons of kernels that could not be compiled."""
    try:
        base = catalog.resolve_base(model.name)
    except RegistryError as error:
        raise Failure(f"args.models: {error}") from error
    config = model.engine.to_config(str(registry.fetch(base, cache, _FILES)), base.digest, "cuda")
    check_kernel_cache(config)
    try:
        found = warm_cache(config, capability)
    except EngineError as error:
        raise Failure(f"{model.name}: {error}") from error
    num_known = len(found.calls) - found.num_compiled - len(found.failures)
    console.print(
        f"{model.name}: {len(found.calls)} kernels, {found.num_compiled} compiled, "
        f"{num_known} were there, in {found.cache}",
        soft_wrap=True,
        highlight=False,
    )
    return found.failures


def _why_nothing(model: ModelArgs, is_targeted: bool) -> str | None:
    """Returns the reason why the base has no kernels to compile, or None. Raises Failure if it
    needs a GPU that is neither here nor named."""
    engine = model.engine
    if engine.backend == "reference":
        return "engine.backend is reference: its operations are those of PyTorch"
    if engine.device == "cpu":
        return "engine.device is cpu: its operations are those of PyTorch"
    found = describe_devices()
    if not found.has_triton:
        raise Failure("Triton is not installed: pip install 'loraplex[gpu]'")
    if is_targeted or found.cuda:
        return None
    remedy = "--device names the GPU to compile for, e.g. sm_90 for H100 and H200"
    if engine.device == "cuda":
        raise Failure(f"{model.name}: engine.device is cuda and no GPU is here; {remedy}")
    return f"this machine has no GPU, where the base runs on the CPU; {remedy}"


def _capability(device: str) -> tuple[int, int]:
    match = _ARCHITECTURE.fullmatch(device)
    if match is None or (capability := (int(match[1]), int(match[2]))) < (8, 0):
        raise Failure(f"--device is {device!r}; write sm_80 or later, e.g. sm_90 for H100 and H200")
    return capability
