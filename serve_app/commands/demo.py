"""`loraplex demo`: makes the demo model once and registers it with its adapters."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app import config
from serve_app.commands.common import byte_progress, console
from serve_app.demo.prepare import prepare, prepare_random_base


def demo(
    two_bases: Annotated[
        bool, typer.Option("--two-bases", help="Also a tiny base of random weights")
    ] = False,
) -> None:
    """Prepare and register the demo: one small base model, three adapters."""
    home = config.default_home()
    with byte_progress() as progress:
        prepare(home, progress)
        if two_bases:
            prepare_random_base(home)
    file = "two_bases" if two_bases else "quickstart"
    console.print(f"The demo is registered. Start it: loraplex serve configs/{file}.yaml")
