"""Triton's cache of compiled kernels on disk: carried from machine to machine, checked when read.

Triton names an entry by a hash of its own version, of the kernel's source, of the types and
constants and of the device's architecture, so that an entry is found by the kernel that needs it
and by no other. Triton's own manager stores absolute paths and trusts every entry. This one
stores names and digests: a folder can be copied into an image or mounted anywhere, a damaged entry
counts as missing, and a folder that cannot be written is read as far as it goes.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

logger = logging.getLogger(__name__)


class NotInCacheError(Exception):
    """A kernel is not in the cache; raised inside `only_from_cache`."""


class KernelCacheManager(FileCacheManager):  # type: ignore[misc]
    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            self._leave(error)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Returns the paths of an entry's files; None if one is missing or not as it was written,
        or if another program that shares the folder wrote the entry, without digests."""
        try:
            digests = json.loads(self._path(f"__grp__{filename}").read_bytes()).get("sha256")
            if digests is not None:
                found = {name: self._path(name) for name in digests}
                if all(_digest(path) == digests[name] for name, path in found.items()):
                    return {name: str(path) for name, path in found.items()}
                logger.warning("the entry %s of the kernel cache is damaged", self.cache_dir)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("the entry %s of the kernel cache cannot be read: %s", self.key, error)
        if _is_reading:
            raise NotInCacheError
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        digests = {name: _digest(Path(path)) for name, path in group.items()}
        # With `child_paths` the entry has the form of Triton's own, though not its absolute paths.
        content = json.dumps({"child_paths": {name: name for name in group}, "sha256": digests})
        return self.put(content, f"__grp__{filename}", binary=False)

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        try:
            return str(super().put(data, filename, binary))
        except OSError as error:
            self._leave(error)
            return str(super().put(data, filename, binary))

    def _path(self, name: str) -> Path:
        return Path(self.cache_dir) / name

    def _leave(self, error: OSError) -> None:
        """Moves this entry to a folder of the process, as the cache cannot be written."""
        folder = own_cache(error) / self.key
        folder.mkdir(exist_ok=True)
        self.cache_dir, self.lock_path = str(folder), str(folder / "lock")


_is_reading = False
_own_folder: Path | None = None


def use_cache(folder: str | None, own_folder: str | None = None) -> Path:
    """Lets this process read and write compiled kernels in the folder and returns it. None:
    TRITON_CACHE_DIR, or ~/.triton/cache. A manager that the environment names stays.

    `own_folder`: the place of new entries if the folder cannot be written, shared by the processes
    of one engine; None: it is made when it is needed.
    """
    global _own_folder
    if own_folder is not None:
        _own_folder = Path(own_folder)
    if folder is not None:
        knobs.cache.dir = str(Path(folder).expanduser().absolute())
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = KernelCacheManager
    return Path(knobs.cache.dir)


@contextmanager
def only_from_cache() -> Iterator[None]:
    """Raises NotInCacheError where a kernel would be compiled. With a manager of the environment's
    every kernel counts as missing."""
    global _is_reading
    if knobs.cache.manager_class is not KernelCacheManager:
        raise NotInCacheError
    _is_reading = True
    try:
        yield
    finally:
        _is_reading = False


def check_writable(folder: Path) -> None:
    """Makes the folder if it is missing. Raises OSError if no file can be created there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def own_cache(error: OSError | None = None) -> Path:
    """Returns the folder of this engine for entries that the cache cannot take. It goes with the
    process that made it."""
    global _own_folder
    if _own_folder is None:
        _own_folder = Path(tempfile.mkdtemp(prefix="loraplex-kernels-"))
        atexit.register(shutil.rmtree, _own_folder, ignore_errors=True)
        logger.warning(
            "the kernel cache %s cannot be written%s; new kernels are kept for this engine only",
            knobs.cache.dir,
            f": {error}" if error else "",
        )
    return _own_folder


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
