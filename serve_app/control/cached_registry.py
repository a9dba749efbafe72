"""The MLflow registry with this machine's content-addressed cache, as serving reads it.

Apart from `topology`, so that an ingress, which asks neither, need not import MLflow (170 MB).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from registry.cache import Cache, CacheStats
from registry.catalog import Catalog
from registry.catalog_file import CatalogFile
from registry.client import Registry
from registry.entities import AdapterVersion, BaseVersion
from registry.errors import RegistrationError, RegistryError, RegistryUnavailableError
from registry.quarantine import FolderQuarantine
from serve_app.config import environment_with

_REGISTER_TIMEOUT_S = 600.0  # the base's files may have to be fetched first


def stored_catalog_file(cache_folder: Path, tracking_uri: str) -> CatalogFile:
    return CatalogFile(cache_folder / "catalog.json", tracking_uri)


class CachedRegistry:
    """Implements `topology.RegistryReader`."""

    def __init__(
        self,
        tracking_uri: str,
        cache_folder: Path,
        cache_bytes: int | None = None,
        artifact_root: Path | None = None,
        artifact_schemes: tuple[str, ...] = (),
    ) -> None:
        self._catalog_file = stored_catalog_file(cache_folder, tracking_uri)
        self._environment = partial(environment_with, tracking_uri, artifact_root, artifact_schemes)
        self._registry = Registry(
            tracking_uri,
            artifact_root=artifact_root,
            artifact_schemes=artifact_schemes,
            scratch=cache_folder / "adoption",
        )
        quarantine = FolderQuarantine(cache_folder / "quarantine")
        self._cache = Cache(
            cache_folder, max_bytes=cache_bytes, quarantine=quarantine, leaves_room=True
        )

    def snapshot(self) -> Catalog:
        """A plain version is adopted beside it and is in a later one."""
        return self._registry.snapshot(adopt="beside")

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        return self._registry.fetch(version, self._cache)

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        self._registry.set_alias(name, alias, version)

    def set_setting(self, name: str, key: str, value: str | None) -> None:
        self._registry.set_setting(name, key, value)

    def ensure_webhook(self, url: str, secret: str) -> None:
        self._registry.ensure_webhook(url, secret)

    def register_adapter(self, folder: Path, name: str, base: str, alias: str) -> None:
        options = (f"--name={name}", f"--base={base}", f"--alias={alias}", "--no-probe")
        done = self._command(("register", "adapter", str(folder), *options))
        if done.returncode != 0:
            raise RegistrationError(_last_words(done))

    def check_adapter(self, version: AdapterVersion) -> None:
        """Finds out what the version changes, or why it cannot be served, and keeps it with the
        version. The base is run only where that takes seconds, on the CPU, at the lowest priority.
        Raises RegistryError where the check came to no verdict."""
        name = f"{version.name}@{version.version}"
        done = self._command(
            ("check", name, "--if-quick", "--device=cpu", "--json"), ("nice", "-n", "19")
        )
        if not done.stdout.startswith("{"):  # the report; a bad verdict is an exit code, too
            raise RegistryError(f"the check of {name} failed: {_last_words(done)}")

    def _command(
        self, words: Sequence[str], before: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """In a process of its own: a check needs torch, which nobody else here imports."""
        try:
            return subprocess.run(
                [*before, sys.executable, "-m", "serve_app", *words],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_REGISTER_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            command = " ".join(words[:2])
            raise RegistryUnavailableError(
                f"loraplex {command} did not end within {_REGISTER_TIMEOUT_S:g} s"
            ) from None
        except OSError as error:  # no memory for a process, say
            raise RegistryError(f"loraplex {words[0]} cannot be started: {error}") from error

    def release(self, folder: Path) -> None:
        self._cache.release(folder)

    def verify(self, version: BaseVersion | AdapterVersion) -> bool:
        return self._cache.verify(version.digest)

    def local_digests(self) -> frozenset[str]:
        return self._cache.digests()

    def stored_catalog(self) -> Catalog | None:
        return self._catalog_file.read()

    def store_catalog(self, catalog: Catalog) -> None:
        self._catalog_file.write(catalog)

    def cache_stats(self) -> CacheStats:
        return self._cache.stats()


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("error: ")
