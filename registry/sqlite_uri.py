"""The URI of a SQLite file. In a file of its own: the configuration needs it without MLflow."""

from __future__ import annotations

from pathlib import Path


def sqlite_uri(file: Path) -> str:
    """Returns a URI that means this file, whatever characters its path has."""
    return f"sqlite:///{str(file).replace('%', '%25').replace('?', '%3F')}"
