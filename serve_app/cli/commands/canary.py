"""`loraplex canary status|start|promote|abort`: a new version of an adapter on trial."""

from __future__ import annotations

import msgspec
from rich.table import Table
from rich.text import Text

from serve_app.canary.status import ArmStatus, CanaryStatus
from serve_app.cli.commands.admin_client import call_admin
from serve_app.cli.commands.common import Failure, console, print_json, print_table


class _Statuses(msgspec.Struct):
    canaries: list[CanaryStatus]


class _Status(msgspec.Struct):
    canary: CanaryStatus


def status(name: str | None, url: str, json: bool) -> None:
    found = call_admin(url, "GET", "/canaries", _Statuses).canaries
    shown = [one for one in found if name in (None, one.name)]
    if json:
        print_json({"canaries": shown})
        return
    if not shown:
        console.print("No adapter has a canary." if name is None else f"{name} has no canary.")
    for one in shown:
        _print(one)


def start(
    name: str,
    version: int | None,
    alias: str | None,
    weight: float | None,
    shadow: float | None,
    url: str,
) -> None:
    if weight is None and shadow is None:
        raise Failure("Give --weight, --shadow or both")
    given = {"version": version, "alias": alias, "weight": weight, "shadow": shadow}
    body: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    _change(url, name, body)


def promote(name: str, version: int | None, url: str) -> None:
    body: dict[str, object] | None = None if version is None else {"version": version}
    _change(url, f"{name}/promote", body)


def abort(name: str, url: str) -> None:
    _change(url, f"{name}/abort")


def _change(url: str, path: str, body: dict[str, object] | None = None) -> None:
    _print(call_admin(url, "POST", f"/canaries/{path}", _Status, body).canary)


def _print(canary: CanaryStatus) -> None:
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
        print_table(table)
    for problem in canary.problems:
        console.print(Text(f"not used: {problem}", style="yellow"), soft_wrap=True)
    if canary.rolled_back is not None:
        console.print(Text(f"rolled back: {canary.rolled_back}", style="red"), soft_wrap=True)


def _first_token(arm: ArmStatus) -> str:
    if arm.ttft_p50_ms is None or arm.ttft_p95_ms is None:
        return ""
    return f"p50 {arm.ttft_p50_ms:.0f} ms, p95 {arm.ttft_p95_ms:.0f} ms"
