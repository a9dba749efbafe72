"""The clients' environments: one each, so that the pins of one never hold back another.

uv installs them: packages that several clients need lie on the disk once. An environment that is
complete is kept until its requirements change; one that cannot be made is the client's outcome.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from tests.conformance.clients import Client

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".venv-conformance"
UV = "uv==0.13.9"
RUNNER = ("pytest", "pytest-asyncio")
_TIMEOUT_S = 900.0


class InstallError(Exception):
    """An environment cannot be made; the text is the reason of the installer."""


def python(client: Client) -> Path:
    return FOLDER / client.name / "bin" / "python"


def pins() -> dict[str, str]:
    lines = (Path(__file__).with_name("requirements.txt")).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def requirements(client: Client) -> list[str]:
    """Returns what to install, such as `litellm[proxy]==1.106.2`."""
    pinned = pins()
    own = [f"{name}=={pinned[_without_extras(name)]}" for name in client.packages]
    return [*own, *client.extra, *RUNNER]


def ensure(client: Client) -> None:
    """Makes the environment unless it is complete. Raises InstallError."""
    wanted = "\n".join(requirements(client))
    stamp = FOLDER / client.name / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    uv = _uv()
    if not python(client).exists():
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(FOLDER / client.name)])
    command = [uv, "pip", "install", "--quiet", "--python", str(python(client))]
    if links := os.environ.get("PIP_FIND_LINKS"):  # wheels of torch without CUDA, if there are any
        command += [word for link in links.split() for word in ("--find-links", link)]
    _run([*command, *requirements(client)])
    stamp.write_text(wanted)


def version(client: Client) -> str:
    """Returns the pinned version of the client's first package, which is the installed one."""
    return pins()[_without_extras(client.packages[0])]


def _without_extras(package: str) -> str:
    return package.partition("[")[0]


def _uv() -> str:
    folder = FOLDER / "uv"
    uv = folder / "bin" / "uv"
    if not uv.exists():
        venv.create(folder, with_pip=True)
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", UV])
    return str(uv)


def _run(command: list[str]) -> None:
    environment = dict(os.environ)
    if certificates := environment.get("PIP_CERT"):
        environment.setdefault("SSL_CERT_FILE", certificates)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"not installed within {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise InstallError(" ".join(done.stderr.split())[-500:])
