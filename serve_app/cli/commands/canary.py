"""`loraplex canary status|start|promote|abort`: a new version of an adapter on trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from serve_app.cli.commands.admin_client import call_server
from serve_app.cli.commands.common import Failure, console, print_json, print_table
from serve_app.cli.options import DEFAULT_URL, Json, Url, group

if TYPE_CHECKING:
    from serve_app.canary.status import ArmStatus, CanaryStatus

app = group("canary", "Try a version of an adapter on a share of the requests.")

Name = Annotated[str, typer.Argument(help="Adapter")]


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="Adapter; default: all")] = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show weights, both arms' numbers and the verdict."""
    from serve_app.canary.status import CanaryLines

    found = call_server(url, "GET", "/admin/canaries", CanaryLines).canaries
    shown = [one for one in found if name in (None, one.name)]
    if json:
        print_json({"canaries": shown})
        return
    if not shown:
        console.print("No adapter has a canary." if name is None else f"{name} has no canary.")
    for one in shown:
        _print(one)


@app.command()
def start(
    name: Name,
    version: Annotated[int | None, typer.Option(help="Number of the version")] = None,
    alias: Annotated[str | None, typer.Option(help="Or an alias that it has")] = None,
    weight: Annotated[
        float | None, typer.Option(help="Share of the requests that it answers, 0 to 1")
    ] = None,
    shadow: Annotated[
        float | None, typer.Option(help="Share of the requests that it gets copies of")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Send a share of the requests for NAME to another version, or copies of them."""
    if weight is None and shadow is None:
        raise Failure("Give --weight, --shadow or both")
    given = {"version": version, "alias": alias, "weight": weight, "shadow": shadow}
    _print(_change(url, name, given))


@app.command()
def promote(
    name: Name,
    version: Annotated[
        int | None, typer.Option(help="Refuse unless this version is the canary")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Make the canary the stable version of NAME."""
    body = None if version is None else {"version": version}
    _print_end(_change(url, f"{name}/promote", body), "the canary is promoted", url)


@app.command()
def abort(name: Name, url: Url = DEFAULT_URL) -> None:
    """End the canary and the shadow of NAME."""
    _print_end(_change(url, f"{name}/abort"), "the trial has ended", url)


def _change(url: str, path: str, body: Mapping[str, object] | None = None) -> CanaryStatus:
    from serve_app.canary.status import CanaryAnswer

    return call_server(url, "POST", f"/admin/canaries/{path}", CanaryAnswer, body).canary


def _print_end(after: CanaryStatus, words: str, url: str) -> None:
    """Prints the meaning of a name whose canary has ended, and the rest of its trial, if any.
    `url`: of the server."""
    from serve_app.canary.status import start_command

    name = after.name
    text = Text.assemble((name, "bold"), f"  {words}")
    if after.stable_version is not None:
        text.append(f": {name} means version {after.stable_version}, by the alias ")
        text.append(str(after.stable_alias))
    console.print(text, soft_wrap=True)
    _print_parts(after)
    if not after.arms:
        other = "" if url == DEFAULT_URL else f" --url {url}"
        console.print(
            f"Another trial: {start_command(name)}{other}",
            markup=False,
            soft_wrap=True,
            highlight=False,
        )


def _print(canary: CanaryStatus) -> None:
    console.print(Text.assemble((canary.name, "bold"), f"  {canary.verdict}"), soft_wrap=True)
    _print_parts(canary)


def _print_parts(canary: CanaryStatus) -> None:
    if canary.arms:
        table = Table("arm", "version", "weight", "requests", "failed", "empty", "TTFT", box=None)
        for arm in canary.arms:
            outcomes = arm.outcomes
            failed = outcomes.get("error", 0) + outcomes.get("non_finite", 0)
            counts = map(str, (sum(outcomes.values()), failed, outcomes.get("empty", 0)))
            version, weight = str(arm.version), f"{arm.weight:g}"
            table.add_row(arm.arm, version, weight, *counts, _first_token(arm))
        print_table(table)
    for problem in canary.problems:
        console.print(Text(f"not used: {problem}", style="yellow"), soft_wrap=True)
    if canary.rolled_back is not None:
        console.print(Text(f"rolled back: {canary.rolled_back}", style="red"), soft_wrap=True)


def _first_token(arm: ArmStatus) -> str:
    if arm.ttft_p50_ms is None or arm.ttft_p95_ms is None:
        return ""
    return f"p50 {arm.ttft_p50_ms:.0f} ms, p95 {arm.ttft_p95_ms:.0f} ms"
