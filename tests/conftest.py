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
# Files that need more than about five seconds: `make quick` leaves them out.
_SLOW_FILES = frozenset(
    {
        "test_benchmarks",
        "test_control_plane_orders",
        "test_engine_effect",
        "test_engine_interleavings",
        "test_engine_model",
        "test_engine_resumed",
        "test_import_names",
        "test_interpreter",
        "test_registry_plain",
        "test_registry_postgres",
        "test_registry_server",
        "test_request_path",
        "test_serve_effect",
        "test_serve_hostile_registry",
        "test_serve_register",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make quick` leaves out: slow files, and tests that share a server or the demo."""
    for item in items:
        if item.path.stem in _SLOW_FILES:
            item.add_marker(pytest.mark.slow)
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
