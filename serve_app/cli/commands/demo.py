"""`loraplex demo`: makes the demo model once and registers it with its adapters."""

from __future__ import annotations

from serve_app import config
from serve_app.cli.commands.common import byte_progress, console
from serve_app.cli.demo.prepare import prepare, prepare_random_base
from serve_app.home import prepare as prepare_home


def demo(two_bases: bool) -> None:
    home = prepare_home(config.default_home())
    with byte_progress() as progress:
        prepare(home, progress)
        if two_bases:
            prepare_random_base(home)
    file = "two_bases" if two_bases else "quickstart"
    console.print(f"The demo is registered. Start it: loraplex serve configs/{file}.yaml")
