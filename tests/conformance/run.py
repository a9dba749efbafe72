"""One run: the demo server on a free port, each client's tests against it, and their outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serve_app.cli.demo.prepare import base_folder
from tests.conformance import environments
from tests.conformance.clients import OFFLINE, Client
from tests.conformance.outcome import SHOWN_CHARACTERS, Outcome, read_junit
from tests.conformance.reference import loglikelihoods
from tests.demo_server import BASE, ROOT, DemoServer, run_cli, serving, write_config

HERE = Path(__file__).parent


@contextmanager
def demo(home: Path | None) -> Iterator[DemoServer]:
    """A server of the demo, its home made anew unless `home` names one that is prepared."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        home = home or Path(scratch) / "home"
        run_cli(home, "demo", timeout_s=900)
        config = Path(scratch) / "serve.yaml"
        url = write_config(ROOT / "configs" / "quickstart.yaml", config)
        with serving(home, config, url) as server:
            yield server


def run_clients(
    clients: Sequence[Client], home: Path | None, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Installs first, so that no server waits for a download."""
    outcomes = {one.name: Outcome(one.name, environments.version(one)) for one in clients}
    for client in clients:
        try:
            environments.ensure(client)
        except environments.InstallError as error:
            outcomes[client.name].not_run = f"cannot be installed: {error}"
    with demo(home) as server, tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        expected = Path(scratch) / "loglikelihoods.json"
        expected.write_text(json.dumps(loglikelihoods(base_folder(server.home))))
        for client in clients:
            outcome = outcomes[client.name]
            if not outcome.not_run:
                folder = Path(scratch) / client.name
                folder.mkdir()
                _run(client, server, expected, folder, outcome)
            report(outcome)
    return list(outcomes.values())


def _run(client: Client, server: DemoServer, expected: Path, folder: Path, into: Outcome) -> None:
    python = environments.python(client)
    junit, calls = folder / "junit.xml", folder / "calls"
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(folder),  # caches and settings of clients
        "TMPDIR": str(folder),
        "PYTHONPATH": str(HERE / "loopback"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CONFORMANCE_URL": server.url,
        "CONFORMANCE_MODEL": BASE,
        "CONFORMANCE_TOKENIZER": str(base_folder(server.home)),
        "CONFORMANCE_LOGLIKELIHOODS": str(expected),
        "CONFORMANCE_CALLS": str(calls),
        **OFFLINE,
        **client.environment,
    }
    command = [str(python), "-m", "pytest", "-c", "pytest.ini", "--rootdir", ".", "--confcutdir"]
    command += [".", "--junitxml", str(junit), client.module]
    began_s = time.monotonic()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            process.wait(client.timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            into.not_run = f"not finished within {client.timeout_s:.0f} s"
    into.seconds = time.monotonic() - began_s
    if calls.exists():
        into.called_out = sorted(set(calls.read_text().split()))
    if junit.exists():
        read_junit(junit, into)
    if not (into.passed or into.failed or into.not_run):
        tail = " ".join((folder / "log").read_text().split())[-SHOWN_CHARACTERS:]
        into.not_run = f"no test ran: {tail}"
