"""`loraplex route MODEL PROMPT`: the engine replica that a running server would choose, and why."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from serve_app.cli.commands.admin_client import call_server
from serve_app.cli.commands.common import Failure, console, print_json, print_table
from serve_app.cli.options import DEFAULT_URL, Json, Url


def route(
    model: Annotated[str, typer.Argument(help="As in a request: BASE, BASE:ADAPTER, NAME@ALIAS")],
    prompt: Annotated[str, typer.Argument(help="What would be asked")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show the replica that a request would go to, and when its first token is expected."""
    from serve_app.admin_api import RouteAnswer

    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    found = call_server(url, "POST", "/admin/route", RouteAnswer, body)
    if json:
        print_json(found)
        return
    numbers = ("queue ms", "adapter ms", "prefill ms", "way ms", "total ms")
    table = Table("replica", *numbers, "adapter in", "cached", "queued", "running", "kv", box=None)
    for one in found.replicas:
        ms = one.expected_ms
        table.add_row(
            one.replica,
            *(f"{value:.1f}" for value in (ms.queue, ms.adapter, ms.prefill, ms.way, ms.total)),
            one.adapter_tier,
            str(one.cached_tokens),
            str(one.queued_tokens),
            str(one.sequences),
            f"{one.kv_usage:.0%}",
        )
    print_table(table)
    if not found.replicas:
        raise Failure(f"No engine replica of {found.base} is known yet")
    console.print(
        f"{found.tokens} tokens go to the first one ({found.policy}: {found.replicas[0].reason})",
        highlight=False,
    )
