"""A real PostgreSQL of Debian's package: own data folder, own port on loopback, removed at the end.

PostgreSQL refuses to run as root: then it runs as `postgres`, or as `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port

READY_WITHIN_S = 180


def binaries() -> Path | None:
    """Returns the newest version's folder of programs; None if the package is missing."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@dataclass
class Postgres:
    folder: Path
    binaries: Path
    port: int
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def uri(self) -> str:
        # The driver is named: SQLAlchemy's own choice depends on its version.
        return f"postgresql+psycopg2://loraplex@127.0.0.1:{self.port}/postgres"

    def create(self) -> None:
        if (user := _user()) is not None:
            os.chown(self.folder, user, -1)
        initdb = [str(self.binaries / "initdb"), "--pgdata", str(self._data), "--no-sync"]
        initdb += ["--username", "loraplex", "--auth", "trust", "--encoding", "UTF8"]
        done = subprocess.run(
            [*initdb, "--locale", "C"], capture_output=True, text=True, **_as(user)
        )
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        command = [str(self.binaries / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        command += ["-k", str(self.folder)]
        log = self.folder / "postgres.log"
        with log.open("a") as output:
            self._process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=output, **_as(_user())
            )
        ready = [str(self.binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        deadline = time.monotonic() + READY_WITHIN_S
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops the server at once: connections are cut."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=120)
            self._process = None

    def kill(self) -> None:
        """Kills all processes of the server; `start` brings it back with what was committed."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        children = server.children(recursive=True)
        # The server first: it would answer the death of a child by a restart.
        for process in (server, *children):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(timeout=120)
        # A new server is refused while one of the old processes has the shared memory.
        psutil.wait_procs(children, timeout=120)
        self._process = None

    @property
    def _data(self) -> Path:
        return self.folder / "data"


@contextmanager
def running_postgres(binaries: Path) -> Iterator[Postgres]:
    # Not below pytest's folder: another user could not get there.
    folder = Path(tempfile.mkdtemp(prefix="lpx-pg-", dir="/tmp"))
    server = Postgres(folder, binaries, free_port())
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _user() -> int | None:
    """Returns the id of the user to run it as; None for this user."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_uid
    except KeyError:
        return pwd.getpwnam("nobody").pw_uid


def _as(user: int | None) -> dict[str, Any]:
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwuid(user).pw_gid, "extra_groups": []}
