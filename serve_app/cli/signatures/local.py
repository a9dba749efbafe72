"""Commands that work on this machine and its registry: serve, demo, check, models, doctor,
warm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.signatures.body import body_in
from serve_app.cli.signatures.options import Json, LogFormat, Parity, ParityBound, Uri


@body_in("serve")
def serve(
    file: Annotated[Path, typer.Argument(help="A Serve config file, e.g. configs/quickstart.yaml")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for ready")] = 1800,
    haproxy: Annotated[bool, typer.Option(help="HAProxy in front: for many streams")] = False,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain",
            min=0,
            help="Seconds that open requests have to end after Ctrl-C or SIGTERM; new ones get 503",
        ),
    ] = 30.0,
    log_format: Annotated[
        LogFormat, typer.Option(help="Form of the log's lines, in $LORAPLEX_HOME/logs")
    ] = LogFormat.text,
) -> None:
    """Start the server, wait until it is ready, stay until Ctrl-C."""


@body_in("demo")
def demo(
    two_bases: Annotated[
        bool, typer.Option("--two-bases", help="Also a tiny base of random weights")
    ] = False,
) -> None:
    """Prepare and register the demo: a small base model and four adapters."""


@body_in("check")
def check(
    name: Annotated[str, typer.Argument(help="NAME, NAME@ALIAS or NAME@N of an adapter")],
    json: Annotated[bool, typer.Option("--json", help="The whole report, on stdout")] = False,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Ask this instead; may be repeated")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Also write the report and its plot here")
    ] = None,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Keep the report with the version")
    ] = True,
    if_quick: Annotated[
        bool, typer.Option("--if-quick", help="Run the base only where it takes seconds")
    ] = False,
    parity: Parity = False,
    parity_bound: ParityBound = 1e-3,
    tracking_uri: Uri = None,
) -> None:
    """Measure the effect of an adapter on its base; exit code 1 if it has none."""


@body_in("models")
def models(
    url: Annotated[str | None, typer.Option(help="Ask this running server")] = None,
    tracking_uri: Uri = None,
    json: Json = False,
) -> None:
    """List base models and their adapters."""


@body_in("doctor")
def doctor(
    port: Annotated[int, typer.Option(help="Where you want to serve")] = 8000,
    base: Annotated[
        Path | None, typer.Option(help="Check this folder of a base instead: form, memory, fit")
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option("--memory", min=0.1, max=1e6, help="GiB of the GPU that --base is for"),
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="engine.quantization for --base; default: none")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="engine.kv_cache_dtype for --base; default: auto")
    ] = None,
    lora_dtype: Annotated[
        str | None, typer.Option(help="engine.lora_dtype for --base; default: auto")
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, max=8, help="Ranks that share --base, as tensor_parallel_size")
    ] = 1,
    json: Json = False,
) -> None:
    """Check this machine and report missing requirements."""


@body_in("warm")
def warm(
    file: Annotated[Path, typer.Argument(help="The Serve config file that will be served")],
    device: Annotated[
        str | None, typer.Option(help="Compile for this GPU, e.g. sm_90; default: the one here")
    ] = None,
    tracking_uri: Uri = None,
) -> None:
    """Compile the GPU kernels that the file's bases need, without serving."""
