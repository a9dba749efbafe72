"""Fixtures that the whole session shares. One Ray and one Serve, started by the first who asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve_rig import running_serve


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """Serve runs, nothing is deployed: the port of its HTTP proxy on 127.0.0.1."""
    with running_serve() as port:
        yield port
