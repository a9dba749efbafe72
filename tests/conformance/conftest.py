"""Fixtures for the modules of the clients, which run in the clients' own environments."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """The address of the demo server, without a path."""
    return os.environ["CONFORMANCE_URL"]


@pytest.fixture(scope="session")
def base_url(url: str) -> str:
    """The address that OpenAI's clients take."""
    return f"{url}/v1"


@pytest.fixture(scope="session")
def model() -> str:
    """The name of the base."""
    return os.environ["CONFORMANCE_MODEL"]
