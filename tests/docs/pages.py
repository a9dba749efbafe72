"""The generated pages: each is one function that returns its text."""

from __future__ import annotations

from pathlib import Path

from tests.docs.commands import cli_page
from tests.docs.keys import configuration_page
from tests.docs.metrics import metrics_page
from tests.docs.modules import modules_page

FOLDER = Path(__file__).parent.parent.parent / "docs"
PAGES = {
    "configuration.md": configuration_page,
    "cli.md": cli_page,
    "metrics.md": metrics_page,
    "modules.md": modules_page,
}


def stale() -> list[str]:
    """Returns the names of the pages whose file differs from the generated text."""
    return [name for name, page in PAGES.items() if _text(FOLDER / name) != page()]


def write() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
