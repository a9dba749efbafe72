"""Makes the demo once: converts the base into HOME/demo, registers it and its four adapters.

A second call has no effect; concurrent calls wait for each other. The modules that convert and
check are imported when there is work to do: torch and transformers take seconds, which each start
of the demo by `make` would pay.
Ignorant of Ray and HTTP.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.cache import Cache
from registry.catalog import Catalog
from registry.entities import content_digest
from registry.manifest import MAX_ADAPTER_BYTES, Progress, no_progress, scan_folder
from serve_app.cli.commands.store import open_registry
from serve_app.cli.demo.source import GGUF_NAME, obtain_gguf

BASE_NAME = "smollm2-135m-instruct"
ADAPTER_NAMES = ("pirate", "sql", "extract", "tools")
ADAPTERS_DIR = Path(__file__).with_name("adapters")
RANDOM_BASE_NAME = "tiny-qwen3"
CONVERTED_BYTES = 269_060_552  # the size of model.safetensors


def base_folder(home: Path) -> Path:
    """Returns the folder of the converted base, which may not exist yet."""
    return home / "demo" / BASE_NAME


def prepare(home: Path, progress: Progress = no_progress) -> None:
    """Registers the demo in the configured registry."""
    convert_base(home, progress)
    registry = open_registry(None)
    cache = Cache(home / "cache")
    catalog = registry.snapshot()
    missing = [name for name in ADAPTER_NAMES if not _is_registered(catalog, name)]
    has_base = any(base.name == BASE_NAME for base in catalog.bases)
    if has_base and not missing:
        return

    from serve_app.cli.registration import register_adapter, register_base

    if not has_base:
        folder = base_folder(home)
        register_base(registry, folder, BASE_NAME, link=True, progress=progress)
    for name in missing:
        folder = ADAPTERS_DIR / name
        # The effect is measured before a release, so the start does not wait for it.
        register_adapter(
            registry, folder, name, BASE_NAME, cache=cache, probe="never", progress=progress
        )


def prepare_random_base(home: Path) -> None:
    """Registers a second, tiny base with random weights, for a server of two bases."""
    from engine.tools.random_base import RandomShape, write_random_base
    from serve_app.cli.registration import register_base

    shape = RandomShape(
        architecture="Qwen3ForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    folder = home / "demo" / RANDOM_BASE_NAME
    with _one_at_a_time(folder.parent / ".lock"):
        if not folder.exists():
            write_random_base(shape, base_folder(home), folder)
    registry = open_registry(None)
    if all(base.name != RANDOM_BASE_NAME for base in registry.snapshot().bases):
        register_base(registry, folder, RANDOM_BASE_NAME, link=True)


def convert_base(home: Path, progress: Progress = no_progress) -> Path:
    """Returns the folder of the converted base, which appears complete or not at all."""
    folder = base_folder(home)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder.parent / ".lock"):
        if not folder.exists():
            from engine.tools.gguf import convert_gguf

            with tempfile.TemporaryDirectory(prefix=".gguf.", dir=folder.parent) as scratch:
                gguf = Path(scratch) / GGUF_NAME
                obtain_gguf(gguf, progress)
                convert_gguf(gguf, folder, lambda stage: progress(stage, 0, CONVERTED_BYTES))
                progress("converted the base model", CONVERTED_BYTES, CONVERTED_BYTES)
    return folder


def _is_registered(catalog: Catalog, name: str) -> bool:
    """Returns True if the adapter is registered with the content of this release. Other content
    becomes a new version."""
    digest = content_digest(
        scan_folder(ADAPTERS_DIR / name, "adapter_config.json", MAX_ADAPTER_BYTES)
    )
    return any((a.name, a.digest) == (name, digest) for a in catalog.adapters)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
