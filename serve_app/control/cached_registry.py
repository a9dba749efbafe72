"""The MLflow registry with this machine's content-addressed cache, as serving reads it.

A module of its own, so that an ingress, which uses neither, need not import MLflow (170 MB).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from registry.cache import Cache
from registry.catalog import Catalog
from registry.catalog_file import CatalogFile
from registry.client import Registry
from registry.entities import AdapterVersion, BaseVersion
from registry.errors import RegistrationError, RegistryError, RegistryUnavailableError
from registry.quarantine import FolderQuarantine
from serve_app.config import environment_with

_WEIGHTS_FILE = "adapter_model.safetensors"
_COMMAND_TIMEOUT_S = 600.0  # the base's files may have to be fetched first


def stored_catalog_file(cache_folder: Path, tracking_uri: str) -> CatalogFile:
    return CatalogFile(cache_folder / "catalog.json", tracking_uri)


class CachedRegistry:
    """Implements `platform_view.RegistryReader`, which documents the methods."""

    def __init__(
        self,
        tracking_uri: str,
        cache_folder: Path,
        cache_bytes: int | None = None,
        artifact_root: Path | None = None,
        artifact_schemes: tuple[str, ...] = (),
    ) -> None:
        self._environment = partial(environment_with, tracking_uri, artifact_root, artifact_schemes)
        self._registry = registry = Registry(
            tracking_uri,
            artifact_root=artifact_root,
            artifact_schemes=artifact_schemes,
            scratch=cache_folder / "adoption",
        )
        quarantine = FolderQuarantine(cache_folder / "quarantine")
        self._cache = cache = Cache(
            cache_folder, max_bytes=cache_bytes, quarantine=quarantine, leaves_room=True
        )
        catalog_file = stored_catalog_file(cache_folder, tracking_uri)
        self.set_alias = registry.set_alias
        self.set_setting = registry.set_setting
        self.ensure_webhook = registry.ensure_webhook
        self.release = cache.release
        self.local_digests = cache.digests
        self.cache_stats = cache.stats
        self.stored_catalog = catalog_file.read
        self.store_catalog = catalog_file.write

    def snapshot(self) -> Catalog:
        """The catalog now. A version that plain MLflow registered is checked and tagged in the
        background, and is part of a later catalog."""
        return self._registry.snapshot(adopt="beside")

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        return self._registry.fetch(version, self._cache)

    def verify(self, version: BaseVersion | AdapterVersion) -> bool:
        return self._cache.verify(version.digest)

    def register_adapter(self, folder: Path, name: str, base: str, alias: str) -> None:
        _check_weights(folder)
        options = (f"--name={name}", f"--base={base}", f"--alias={alias}", "--no-probe")
        done = self._run(("register", "adapter", str(folder), *options))
        if done.returncode != 0:
            raise RegistrationError(_last_error(done))

    def check_adapter(self, version: AdapterVersion) -> None:
        name = f"{version.name}@{version.version}"
        done = self._run(
            ("check", name, "--if-quick", "--device=cpu", "--json"), ("nice", "-n", "19")
        )
        if not done.stdout.startswith("{"):  # the report; a bad verdict sets the exit code, too
            raise RegistryError(f"the check of {name} failed: {_last_error(done)}")

    def _run(
        self, command: Sequence[str], prefix: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Runs a loraplex command in a process of its own: a check needs torch, which this process
        does not import."""
        try:
            return subprocess.run(
                [*prefix, sys.executable, "-m", "serve_app", *command],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise RegistryUnavailableError(
                f"loraplex {' '.join(command[:2])} did not end within {_COMMAND_TIMEOUT_S:g} s"
            ) from None
        except OSError as error:  # e.g. no memory for a process
            raise RegistryError(f"loraplex {command[0]} cannot be started: {error}") from error


def _check_weights(folder: Path) -> None:
    """Raises RegistrationError for a folder whose weights are missing or empty: the command would
    find that only after seconds of imports."""
    try:
        num_bytes = (folder / _WEIGHTS_FILE).stat().st_size
    except FileNotFoundError:
        raise RegistrationError(
            f"{folder} has no {_WEIGHTS_FILE}: save the adapter as safetensors; weights in a "
            "pickle are never read"
        ) from None
    except OSError as error:
        raise RegistrationError(
            f"{folder / _WEIGHTS_FILE} cannot be read: {error.strerror}"
        ) from error
    if not num_bytes:
        raise RegistrationError(f"{folder / _WEIGHTS_FILE} is empty: save the adapter again")


def _last_error(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("error: ")
