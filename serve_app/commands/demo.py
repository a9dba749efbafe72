"""`loraplex demo`: makes the demo model once and registers it with its adapters."""

from __future__ import annotations

from serve_app import config
from serve_app.commands.common import byte_progress, console
from serve_app.demo.prepare import prepare


def demo() -> None:
    """Prepare and register the demo: one small base model, three adapters."""
    with byte_progress() as progress:
        prepare(config.default_home(), progress)
    console.print("The demo is registered. Start it: loraplex serve configs/quickstart.yaml")
