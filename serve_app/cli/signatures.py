"""The signatures of the commands whose bodies import many libraries: names, options, help.

A body is imported when its command is called, so that --help answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from registry.catalog import DEFAULT_ALIAS
from serve_app.cli.options import DEFAULT_URL, Json, LogFormat, Parity, ParityBound, Uri, Url, group

P = ParamSpec("P")

register = group("register", "Check a model folder and register it.")

Folder = Annotated[Path, typer.Argument(help="Folder with the files")]
Name = Annotated[str, typer.Option("--name", help="Name to register it under")]
Alias = Annotated[str, typer.Option("--alias", help="Alias that points to this version")]


def body_in(module: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorates a signature: the function of the same name in serve_app/cli/commands/MODULE.py has
    the same parameters and does the work."""

    def decorate(signature: Callable[P, None]) -> Callable[P, None]:
        @wraps(signature)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            commands = import_module(f"serve_app.cli.commands.{module}")
            getattr(commands, signature.__name__)(*args, **kwargs)

        return run

    return decorate


@body_in("serve")
def serve(
    file: Annotated[Path, typer.Argument(help="A Serve config file, e.g. configs/quickstart.yaml")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for ready")] = 1800,
    haproxy: Annotated[
        bool | None,
        typer.Option(
            "--haproxy/--no-haproxy",
            help="HAProxy in front, for many streams; the default where a base has a GPU",
            show_default=False,
        ),
    ] = None,
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


@body_in("doctor")
def doctor(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where you want to serve")] = 8000,
    base: Annotated[
        Path | None,
        typer.Option(help="Check this folder or GGUF file of a base instead: form, memory, fit"),
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
    tracking_uri: Uri = None,
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


@body_in("chat")
def chat(
    model: Annotated[str | None, typer.Argument(help="Default: the first base model")] = None,
    url: Url = DEFAULT_URL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="0: always the likeliest token")
    ] = 0.0,
) -> None:
    """Talk to a running server."""


@body_in("bench")
def bench(
    url: Url = DEFAULT_URL,
    models: Annotated[str | None, typer.Option(help="a,b; default: all")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all, over all models")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that are open at a time")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, about")] = 64,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Stream the answers, or take them whole")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Append JSON lines here")] = None,
) -> None:
    """Measure a running server. A stream that is cut counts as a failure; then exit code 1."""


@register.command()
@body_in("register")
def base(
    folder: Folder,
    name: Name,
    alias: Alias = DEFAULT_ALIAS,
    model_id: Annotated[
        str, typer.Option(help="ORGANISATION/NAME, by which clients may call it too")
    ] = "",
    tracking_uri: Uri = None,
) -> None:
    """Register a base model: a Hugging Face folder with config.json and safetensors, plain or
    quantized, or a GGUF file, which is converted."""


@register.command()
@body_in("register")
def adapter(
    folder: Folder,
    name: Name,
    base: Annotated[str, typer.Option(help="Registered NAME, NAME@ALIAS or NAME@N")],
    alias: Alias = DEFAULT_ALIAS,
    probe: Annotated[
        bool | None,
        typer.Option(
            "--probe/--no-probe",
            help="Run the base to see what the adapter changes; default: where it takes seconds",
        ),
    ] = None,
    allow_noop: Annotated[
        bool, typer.Option("--allow-noop", help="Even if it changes nothing")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if its configuration names another base model")
    ] = False,
    max_error: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Of an adapter that becomes LoRA (LoHa, LoKr, saved modules): the largest "
            "relative error of a module",
        ),
    ] = 1e-3,
    max_saved_mib: Annotated[
        float,
        typer.Option(min=0.0, max=1e9, help="The device memory of saved modules, as LoRA, in MiB"),
    ] = 256.0,
    max_minutes: Annotated[float, typer.Option(min=0.0, help="The time of becoming LoRA")] = 30.0,
    parity: Parity = False,
    parity_bound: ParityBound = 1e-3,
    unquantized_base: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the base that it was trained on, if --base is an AWQ base made of it: "
            "the scales that AWQ moved are folded into the adapter"
        ),
    ] = None,
    tracking_uri: Uri = None,
) -> None:
    """Register an adapter: a PEFT folder with adapter_config.json and safetensors."""
