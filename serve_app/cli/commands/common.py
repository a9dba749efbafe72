"""The terminal of the commands, and the failure that ends one.

Imports no libraries but typer and rich, because every --help loads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from registry import manifest

# Output into a pipe is not wrapped, and a table is as wide as its longest cells.
_PIPE_COLUMNS = 100_000
console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


class Failure(Exception):
    """Ends the command with exit code 1 and this sentence."""


def print_table(table: Table) -> None:
    """Prints a table. A terminal that is too narrow folds the cells; no name is cut."""
    for column in table.columns:
        column.overflow = "fold"
    console.print(table, highlight=False)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for key, words in facts:
        table.add_row(f"[dim]{key}[/]", Text(words))
    print_table(table)


def print_json(value: object) -> None:
    """Prints `value` for --json, with the field names of its structs and dataclasses."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def bars_of(*columns: ProgressColumn) -> Progress:
    """Returns progress bars that leave nothing behind. Hidden where there is no terminal: their end
    would be an empty line in a file."""
    from rich.progress import Progress

    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def byte_progress() -> Iterator[manifest.Progress]:
    """Shows a progress bar for each stage of work that is counted in bytes."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        *(progress.BarColumn(), progress.DownloadColumn(), progress.TimeElapsedColumn()),
    )
    with bars_of(*columns) as bars:
        tasks = {}

        def show(stage: str, done_bytes: int, total_bytes: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total_bytes)
            bars.update(tasks[stage], completed=done_bytes, total=total_bytes)

        yield show
