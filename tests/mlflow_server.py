"""A real `mlflow server` with a folder and a port of its own, that can be killed and restarted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.registry_helpers import template_database

READY_WITHIN_S = 240
_QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
# Webhooks need permission to call without TLS and on loopback, and a key that outlives a restart.
# Tests need a short cache: by default a new webhook misses the events of its first minute.
WEBHOOK_SETTINGS = {
    "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
    "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
    "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
    "MLFLOW_WEBHOOK_CACHE_TTL": "1",
}


@dataclass
class MlflowServer:
    folder: Path
    store_uri: str
    settings: Mapping[str, str]
    uri: str
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def artifacts(self) -> Path:
        return self.folder / "artifacts"

    def start(self) -> None:
        """Returns when it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", self.uri.rpartition(":")[2]]
        command += ["--backend-store-uri", self.store_uri]
        command += ["--artifacts-destination", str(self.artifacts)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        log = self.folder / "server.log"
        with log.open("a") as output:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=clean | _QUIET | dict(self.settings),
                stdout=output,
                stderr=output,
                start_new_session=True,  # its worker is a child, so the whole process group ends
            )
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.uri}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(log.read_text())

    def kill(self) -> None:
        """Kills the server: SIGTERM would wait for kept-alive connections, including the test's."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running_server(
    folder: Path, *, store_uri: str | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[MlflowServer]:
    """`store_uri`: another database than SQLite in the folder. `settings`: environment
    variables."""
    folder.mkdir(parents=True, exist_ok=True)
    if store_uri is None:
        shutil.copy(template_database(), folder / "mlflow.db")
        store_uri = f"sqlite:///{folder}/mlflow.db"
    uri = f"http://127.0.0.1:{free_port()}"
    server = MlflowServer(folder, store_uri, settings or {}, uri)
    try:
        server.start()
        yield server
    finally:
        server.kill()
