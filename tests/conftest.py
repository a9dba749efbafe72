"""Fixtures that the whole session shares, made by the first test that asks, and the markers that
follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo_server import run_cli
from tests.serve_rig import running_serve

# The markers of tests that use these fixtures.
_MARKERS = {"serve_port": pytest.mark.serve, "demo_home": pytest.mark.slow}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that share a server or the demo's home, for `make quick` to leave out."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in _MARKERS:
                item.add_marker(_MARKERS[fixture])


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """The port of a running Serve's HTTP proxy on 127.0.0.1, without an application."""
    with running_serve() as port:
        yield port


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the demo is prepared and registered."""
    folder = tmp_path_factory.mktemp("home")
    run_cli(folder, "demo")
    return folder
