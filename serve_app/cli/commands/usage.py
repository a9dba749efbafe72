"""`loraplex usage`: the recorded use of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer
from rich.table import Table
from rich.text import Text

from serve_app.cli.commands.admin_client import call_server
from serve_app.cli.commands.common import Failure, console, print_json, print_table
from serve_app.cli.options import DEFAULT_URL, Json, Url

if TYPE_CHECKING:
    from serve_app.admin_api import UsageLine, UsageLines


def usage(
    by: Annotated[
        str, typer.Option(help="Of key, tenant, base, model, arm, hour and day; a,b")
    ] = "key,model",
    from_: Annotated[
        str | None, typer.Option("--from", help="Date or time, UTC; default: this month")
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="Date or time, UTC, exclusive; default: now")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="CSV with a header")] = False,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show requests, tokens, engine time and cost by key and model (tenancy.enabled)."""
    from serve_app.admin_api import UsageLines, usage_csv

    if csv and json:
        raise Failure("Give --csv or --json, not both")
    given = {"by": by, "from": from_, "to": to}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    found = call_server(url, "GET", f"/admin/usage?{query}", UsageLines)
    names = [name.strip() for name in by.split(",")]
    if json:
        print_json(found)
    elif csv:
        typer.echo(usage_csv(names, found.usage), nl=False)
    elif not found.usage:
        console.print(f"No use is recorded from {found.from_} to {found.to}.", highlight=False)
    else:
        _print(names, found)


def _print(names: list[str], found: UsageLines) -> None:
    from msgspec.structs import asdict

    sums = ("requests", "prompt", "cached", "output", "engine s", "cost")
    table = Table(*names, *sums, box=None)
    for column in table.columns[len(names) :]:
        column.justify = "right"
    for line in found.usage:
        values = asdict(line)
        named = (Text(str(values[name])) for name in names)  # a tenant's name is no markup
        table.add_row(*named, *_cells(line))
    print_table(table)
    console.print(f"[dim]from {found.from_} to {found.to}[/]", highlight=False)


def _cells(line: UsageLine) -> tuple[str, ...]:
    counts = (line.requests, line.prompt_tokens, line.cached_tokens, line.output_tokens)
    cells = [f"{count:,}" for count in counts]
    return (*cells, f"{line.engine_ms / 1000:,.1f}", f"{line.cost:,.4f}")
