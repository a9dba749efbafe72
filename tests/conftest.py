"""Fixtures that the whole session shares, made by the first test that asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo_server import run_cli
from tests.serve_rig import running_serve


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """Serve runs, nothing is deployed: the port of its HTTP proxy on 127.0.0.1."""
    with running_serve() as port:
        yield port


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the demo is prepared and registered."""
    folder = tmp_path_factory.mktemp("home")
    run_cli(folder, "demo")
    return folder
