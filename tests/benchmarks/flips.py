"""`flips`: aliases move in the registry while requests come; how soon does every answer follow?

A tiny random base, 30 adapters of two versions each, `loraplex serve` over HTTP with two ingress
and two engine replicas, 50 requests/s. Polling of the embedded SQLite store (or, with
`--modes poll-server`, of `mlflow server`), and a webhook of `mlflow server`. Counted beside the
time to effect: failed requests, answers of neither version, stale answers after the effect, and
prefix cache hits of a prompt that only the old version has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from mlflow import MlflowClient
from safetensors.torch import save_file

from registry.cache import Cache
from serve_app.api.webhook import PATH
from serve_app.cli.commands.store import open_registry
from serve_app.cli.registration import register_adapter, register_base
from serve_app.config import WEBHOOK_SECRET
from tests.benchmarks.flips_load import (
    Client,
    Expected,
    Flip,
    Load,
    judge,
    make_prompt,
    wait_for_effect,
)
from tests.benchmarks.report import Report, percentile, print_table
from tests.benchmarks.serve_base import BASE, write_tokenizer, write_weights
from tests.benchmarks.serve_home import write_serve_file
from tests.benchmarks.shapes import SHAPES, ModelShape
from tests.demo_server import serving
from tests.mlflow_server import WEBHOOK_SETTINGS, running_server
from tests.ports import free_port

MODES = ("poll", "poll-server", "webhook")
TARGET_S = {"poll": 5.0, "poll-server": 5.0, "webhook": 1.0}
RANK = 8
PROMPT_LETTERS = 24
FRESH_LETTERS = 70  # four blocks of 16 tokens and a rest
EFFECT_LIMIT_S = 30.0


def write_version(folder: Path, shape: ModelShape, seed: int) -> Path:
    """An adapter that changes every answer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for module, (in_features, out_features) in shape.linears.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            a = torch.randn(RANK, in_features, generator=generator) * in_features**-0.5
            b = torch.randn(out_features, RANK, generator=generator) * 0.3
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(shape.adapter_config(RANK, 2 * RANK)))
    return folder


def prepare(home: Path, uri: str | None, num_adapters: int) -> list[str]:
    """Registers the base and two versions of each adapter; the alias is at the first."""
    os.environ["LORAPLEX_HOME"] = str(home)
    shape = SHAPES["tiny"]
    folder = shape.write_config(home / "base")
    write_tokenizer(folder, shape.vocab_size)
    write_weights(folder)
    registry = open_registry(uri)
    register_base(registry, folder, BASE, link=True)
    cache = Cache(home / "cache")
    names = [f"adapter-{index}" for index in range(num_adapters)]
    for index, name in enumerate(names):
        for version in (1, 2):
            source = write_version(home / "made" / f"{name}-{version}", shape, 2 * index + version)
            register_adapter(registry, source, name, BASE, cache=cache, probe="never")
        registry.set_alias(name, "champion", 1)
    return names


def write_config(home: Path, port: int, uri: str | None, args: argparse.Namespace) -> Path:
    registry: dict[str, object] = {"poll_interval_s": args.poll_s}
    if uri is not None:
        registry["tracking_uri"] = uri
    if args.mode == "webhook":
        registry["webhook_url"] = f"http://127.0.0.1:{port}{PATH}"
    engine = {"device": "cpu", "max_model_len": 512, "num_threads": 1, "kv_cache_bytes": "64MiB"}
    model = {"name": BASE, "replicas": args.replicas, "engine": engine}
    arguments = {
        "registry": registry,
        "ingress": {"replicas": args.ingresses, "graceful_shutdown_timeout_s": 2},
        "models": [model | {"graceful_shutdown_timeout_s": 2}],
    }
    return write_serve_file(home, port, arguments)


@contextmanager
def platform(home: Path, args: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """Everything runs: (URL of the server, URI of the registry, adapters)."""
    port = free_port()
    os.environ[WEBHOOK_SECRET] = "of the benchmark"
    if args.mode == "poll":
        names = prepare(home, None, args.adapters)
        config = write_config(home, port, None, args)
        with serving(home, config, f"http://127.0.0.1:{port}") as server:
            yield server.url, f"sqlite:///{home}/mlflow.db", names
        return
    with running_server(home / "mlflow", settings=WEBHOOK_SETTINGS) as mlflow:
        names = prepare(home, mlflow.uri, args.adapters)
        config = write_config(home, port, mlflow.uri, args)
        with serving(home, config, f"http://127.0.0.1:{port}") as server:
            yield server.url, mlflow.uri, names


async def flip_once(
    load: Load, client: Client, expected: Expected, aliases: MlflowClient, flip: Flip, fresh: str
) -> Flip:
    """`flip`: its versions; the times are filled in. `fresh`: a prompt that nobody has sent."""
    load.probed = flip.adapter
    warm = [await client.ask(flip.adapter, fresh) for _ in range(4)]
    flip.cached_before = [answer.cached_tokens for answer in warm]
    flip.began_s = time.monotonic()
    await asyncio.to_thread(
        aliases.set_registered_model_alias, flip.adapter, "champion", str(flip.new)
    )
    flip.returned_s = time.monotonic()
    await wait_for_effect(load, expected, flip, EFFECT_LIMIT_S)
    first = await client.ask(flip.adapter, fresh)
    flip.cached_after = first.cached_tokens
    named = [await client.ask(flip.adapter, fresh, f"@{number}") for number in (flip.new, flip.old)]
    flip.is_text_right = named[0].text == first.text != named[1].text
    assert warm[0].text == named[1].text, "the old version answered as another one"
    return flip


async def measure(
    url: str, uri: str, names: Sequence[str], args: argparse.Namespace
) -> dict[str, object]:
    draw = random.Random(args.flips)
    client, expected = Client(url, BASE), Expected()
    prompts = [make_prompt(draw, PROMPT_LETTERS) for _ in range(4)]
    await expected.take(client, names, prompts)
    load = Load(client, names, prompts, args.rate)
    running = asyncio.create_task(load.run())
    aliases = MlflowClient(uri, uri)
    versions = dict.fromkeys(names, 1)
    flips: list[Flip] = []
    flipped = names[: args.flipped]
    for number in range(args.flips):
        # At any moment between two polls.
        await asyncio.sleep(draw.uniform(0.2, args.poll_s if args.mode != "webhook" else 0.4))
        name = flipped[number % len(flipped)]
        old, new = versions[name], 3 - versions[name]
        flip = Flip(name, old, new, 0.0, 0.0)
        fresh = make_prompt(draw, FRESH_LETTERS)
        flips.append(await flip_once(load, client, expected, aliases, flip, fresh))
        versions[name] = new
    await asyncio.sleep(args.poll_s)
    load.stop()
    await running
    await client.close()
    return figures(load, flips, expected)


def figures(load: Load, flips: Sequence[Flip], expected: Expected) -> dict[str, object]:
    effects = [flip.effect_s for flip in flips]
    took = [answer.done_s - answer.sent_s for answer in load.answers]
    hits = [max(flip.cached_before[1:]) > 0 for flip in flips]
    return {
        "requests": len(load.answers),
        "requests_per_s": round(len(load.answers) / load.seconds, 1),
        **judge(load.answers, flips, expected),
        "effect_s": {
            "p50": round(statistics.median(effects), 3),
            "p95": round(percentile(effects, 95), 3),
            "max": round(max(effects), 3),
        },
        "registry_call_s": round(statistics.median(f.returned_s - f.began_s for f in flips), 3),
        "request_s": {
            "p50": round(statistics.median(took), 3),
            "p99": round(percentile(took, 99), 3),
        },
        # The control: the same prompt did hit the cache while the version was the same.
        "same_version_cache_hits": sum(hits),
        "stale_cache_hits": sum(flip.cached_after != 0 for flip in flips),
        "wrong_first_answers": sum(not flip.is_text_right for flip in flips),
        "effects_s": [round(effect, 3) for effect in effects],
        "sample_errors": [answer.error for answer in load.answers if answer.error][:3],
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--modes", default="poll,webhook", help=",".join(MODES))
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--flipped", type=int, default=10, help="adapters that take turns")
    parser.add_argument("--adapters", type=int, default=30)
    parser.add_argument("--rate", type=float, default=50.0, help="requests/s")
    parser.add_argument("--poll-s", type=float, default=2.0)
    parser.add_argument("--replicas", type=int, default=2, help="engines")
    parser.add_argument("--ingresses", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("flips", arguments=sys.argv[1:])
    rows = []
    for mode in args.modes.split(","):
        if mode not in MODES:
            raise SystemExit(f"no mode is called {mode}; there are {', '.join(MODES)}")
        args.mode = mode
        with (
            tempfile.TemporaryDirectory(prefix="lpx-flips-") as folder,
            platform(Path(folder), args) as (url, uri, names),
        ):
            line = asyncio.run(measure(url, uri, names, args))
        report.emit(
            mode=mode,
            flips=args.flips,
            target_p95_s=TARGET_S[mode],
            replicas=args.replicas,
            ingresses=args.ingresses,
            load_average=os.getloadavg()[0],
            **line,
        )
        effect = line["effect_s"]
        assert isinstance(effect, dict)
        counted = ("requests", "errors", "mixed", "stale_after_effect", "stale_cache_hits")
        rows.append(
            (mode, args.flips, *effect.values(), TARGET_S[mode], *(line[c] for c in counted))
        )
    header = ("mode", "flips", "effect p50 s", "p95", "max", "target", "requests", "errors")
    print_table((*header, "mixed", "stale", "stale KV hits"), rows)


if __name__ == "__main__":
    main()
