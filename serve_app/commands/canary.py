"""`loraplex canary status|start|promote|abort`: a second version of an adapter on trial."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from serve_app.commands.admin_client import DEFAULT, Url, call_admin
from serve_app.commands.common import Failure, console

app = typer.Typer(
    help="Try a version of an adapter on a share of the requests.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Adapter")]


class _Arm(msgspec.Struct):
    arm: str
    version: int
    weight: float
    outcomes: dict[str, int]
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None


class _Canary(msgspec.Struct):
    name: str
    verdict: str
    arms: list[_Arm]
    problems: list[str]
    rolled_back: str | None = None


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="Adapter; default: all")] = None,
    url: Url = DEFAULT,
) -> None:
    """Show weights, both arms' numbers and the verdict."""
    answer = call_admin(url, "GET", "/canaries")
    found = msgspec.convert(answer["canaries"], list[_Canary])
    shown = [one for one in found if name in (None, one.name)]
    if not shown:
        console.print("No adapter has a canary." if name is None else f"{name} has no canary.")
    for one in shown:
        _print(one)


@app.command()
def start(
    name: Name,
    version: Annotated[int | None, typer.Option("--version", help="Number of the version")] = None,
    alias: Annotated[str | None, typer.Option("--alias", help="Or an alias that it has")] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", help="Share of the requests that it answers, 0 to 1")
    ] = None,
    shadow: Annotated[
        float | None, typer.Option("--shadow", help="Share of the requests that it gets copies of")
    ] = None,
    url: Url = DEFAULT,
) -> None:
    """Send a share of the requests for NAME to another version, or copies of them."""
    if weight is None and shadow is None:
        raise Failure("Give --weight, --shadow or both")
    given = {"version": version, "alias": alias, "weight": weight, "shadow": shadow}
    body: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    _print_answer(call_admin(url, "POST", f"/canaries/{name}", body))


@app.command()
def promote(name: Name, url: Url = DEFAULT) -> None:
    """Make the canary what NAME means."""
    _print_answer(call_admin(url, "POST", f"/canaries/{name}/promote"))


@app.command()
def abort(name: Name, url: Url = DEFAULT) -> None:
    """End the canary and the shadow of NAME."""
    _print_answer(call_admin(url, "POST", f"/canaries/{name}/abort"))


def _print_answer(answer: dict[str, object]) -> None:
    _print(msgspec.convert(answer["canary"], _Canary))


def _print(canary: _Canary) -> None:
    console.print(Text.assemble((canary.name, "bold"), f"  {canary.verdict}"), soft_wrap=True)
    if canary.arms:
        table = Table("arm", "version", "weight", "requests", "failed", "empty", "TTFT", box=None)
        for arm in canary.arms:
            outcomes = arm.outcomes
            table.add_row(
                arm.arm,
                str(arm.version),
                f"{arm.weight:g}",
                str(sum(outcomes.values())),
                str(outcomes.get("error", 0) + outcomes.get("non_finite", 0)),
                str(outcomes.get("empty", 0)),
                _first_token(arm),
            )
        console.print(table)
    for problem in canary.problems:
        console.print(Text(f"not used: {problem}", style="yellow"), soft_wrap=True)
    if canary.rolled_back is not None:
        console.print(Text(f"rolled back: {canary.rolled_back}", style="red"), soft_wrap=True)


def _first_token(arm: _Arm) -> str:
    if arm.ttft_p50_ms is None or arm.ttft_p95_ms is None:
        return ""
    return f"p50 {arm.ttft_p50_ms:.0f} ms, p95 {arm.ttft_p95_ms:.0f} ms"
