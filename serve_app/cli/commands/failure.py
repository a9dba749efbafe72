"""The failure that a command reports. In a file without heavy imports, for a fast --help."""

from __future__ import annotations

DEFAULT_URL = "http://127.0.0.1:8000"


class Failure(Exception):
    """Ends the command with exit code 1 and this sentence."""
