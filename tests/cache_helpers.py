"""Versions of made-up bytes for the tests of the cache, and the store that they come from."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from registry.cache import Cache
from registry.entities import FileEntry, Manifest, content_digest

ROOT = Path(__file__).parent.parent


def files_of(name: str, size: int = 1000) -> dict[str, bytes]:
    """A version: two files, `size` bytes together, no byte shared with another name."""
    config = json.dumps({"name": name}).encode()
    weights = hashlib.shake_256(name.encode()).digest(size - len(config))
    return {"adapter_config.json": config, "adapter_model.safetensors": weights}


def manifest_of(files: dict[str, bytes]) -> Manifest:
    return tuple(
        FileEntry(path, len(data), hashlib.sha256(data).hexdigest())
        for path, data in sorted(files.items())
    )


def digest_of(name: str, size: int = 1000) -> str:
    return content_digest(manifest_of(files_of(name, size)))


class FarSide:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []

    def __call__(self, entry: FileEntry, target: Path) -> None:
        self.fetched.append(entry.path)
        target.write_bytes(self.files[entry.path])


def get(cache: Cache, name: str, size: int = 1000) -> Path:
    """Returns the tree of a version, held."""
    manifest = manifest_of(files_of(name, size))
    return cache.tree(content_digest(manifest), manifest, FarSide(files_of(name, size)))


def use(cache: Cache, *names: str, size: int = 1000) -> None:
    for name in names:
        cache.release(get(cache, name, size))


def held_names(cache: Cache, names: str, size: int = 1000) -> str:
    """Returns the one-letter names that the cache has."""
    digests = cache.digests()
    return "".join(name for name in names if digest_of(name, size) in digests)


def is_right(path: Path, name: str, size: int = 1000) -> bool:
    return {p.name: p.read_bytes() for p in path.iterdir()} == files_of(name, size)


def leftovers(cache: Cache) -> list[Path]:
    return list((cache.root / "tmp").iterdir())


def python(program: str, *arguments: object) -> list[str]:
    """A command line that runs a program with this checkout's modules."""
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    return [sys.executable, "-c", path + program, *map(str, arguments)]


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = python(program, *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
