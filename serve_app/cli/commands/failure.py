"""The one kind of failure that a command reports. Apart: the command line needs it without more."""

from __future__ import annotations

DEFAULT_URL = "http://127.0.0.1:8000"


class Failure(Exception):
    """Ends the command with exit code 1 and this sentence."""
