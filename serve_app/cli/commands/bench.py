"""`loraplex bench`: a load on a running server, and a table of the measured latencies."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.cli.commands.client import served_models
from serve_app.cli.commands.common import Failure, bars_of, console, print_table
from serve_app.cli.load import LoadSpec, RequestResult, Summary, run_load, summarize
from serve_app.home import api_headers

_SHOWN_REASONS = 5


def bench(
    url: str,
    models: str | None,
    requests: int,
    concurrency: int,
    max_tokens: int,
    prompt_tokens: int,
    stream: bool,
    json: Path | None,
) -> None:
    url = url.rstrip("/")
    names = _names(url, models)
    load = LoadSpec(url, names, requests, concurrency, max_tokens, prompt_tokens, stream)
    results, wall_s = _run(load)
    summaries = [
        summarize(name, [one for one in results if one.model == name], wall_s) for name in names
    ]
    total = summarize("all", results, wall_s)
    print_table(_table(summaries if len(names) == 1 else [*summaries, total]))
    _print_context(results, wall_s)
    if json is not None:
        with json.open("ab") as file:
            file.writelines(msgspec.json.encode(one) + b"\n" for one in [*summaries, total])
    if total.failures:
        raise Failure(_reasons(results))


def _names(url: str, models: str | None) -> tuple[str, ...]:
    with httpx.Client(timeout=10, headers=api_headers()) as client:
        served = served_models(client, url)
    if models is not None:
        names = tuple(dict.fromkeys(name for name in models.split(",") if name))
    else:
        names = tuple(line.model for line in served)
    if not names:
        raise Failure("There is no model to ask")
    return names


def _run(load: LoadSpec) -> tuple[list[RequestResult], float]:
    results: list[RequestResult] = []
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with bars_of(*columns) as bars:
        task = bars.add_task("requests", total=load.num_requests)

        def note(result: RequestResult) -> None:
            results.append(result)
            bars.advance(task)

        wall_s = asyncio.run(run_load(load, note))
    return results, wall_s


def _table(summaries: list[Summary]) -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("model")
    for title in ("requests", "failed", "tokens/s", "TTFT p50", "p99", "gap p50", "p99"):
        table.add_column(title, justify="right")
    for one in summaries:
        times = (one.ttft_p50_ms, one.ttft_p99_ms, one.itl_p50_ms, one.itl_p99_ms)
        table.add_row(
            one.model,
            str(one.requests),
            str(one.failures),
            f"{one.tokens_per_s:.1f}",
            *("-" if value is None else f"{value:.1f}" for value in times),
        )
    return table


def _print_context(results: list[RequestResult], wall_s: float) -> None:
    good = [one for one in results if one.error is None]
    if good:
        prompt = sum(one.prompt_tokens for one in good) / len(good)
        output = sum(one.output_tokens for one in good) / len(good)
        console.print(
            f"[dim]times in ms; gap: between two events of a stream; a mean request had "
            f"{prompt:.0f} prompt and {output:.0f} output tokens; {wall_s:.1f} s in all[/]"
        )


def _reasons(results: list[RequestResult]) -> str:
    reasons = Counter(one.error for one in results if one.error is not None)
    shown = "; ".join(f"{count} x {text}" for text, count in reasons.most_common(_SHOWN_REASONS))
    return f"{reasons.total()} of {len(results)} requests failed: {shown}"
