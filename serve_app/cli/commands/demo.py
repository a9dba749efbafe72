"""`loraplex demo`: makes the demo model once and registers it with its adapters."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app import home
from serve_app.cli.commands.common import byte_progress, console


def demo(
    two_bases: Annotated[
        bool, typer.Option("--two-bases", help="Also a tiny base of random weights")
    ] = False,
) -> None:
    """Prepare and register the demo: a small base model and four adapters."""
    from serve_app.cli.demo.prepare import prepare, prepare_random_base

    folder = home.prepare(home.default_home())
    with byte_progress() as progress:
        prepare(folder, progress)
        if two_bases:
            prepare_random_base(folder)
    file = "two_bases" if two_bases else "quickstart"
    console.print(f"The demo is registered. Start it: loraplex serve configs/{file}.yaml")
