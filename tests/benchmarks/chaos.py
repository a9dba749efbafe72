"""Processes of a running server are killed, or stopped, while judges read every token of a mixed
load: streams, whole answers, several choices, stop strings, seeds, penalties, log-probabilities,
schemas, expressions, given choices and demanded tool calls, five adapters and their base.

    python -m tests.benchmarks.chaos --out FILE [--kills 10] [--minutes 5]
        [--target engine | ingress | controller | manager | database | sigstop | rank |
        node | silent_node] [--base demo | tiny] [--replicas 3] [--ranks 2] [--device cuda]
        [--keys] [--free] [--haproxy]

Every answer is compared, token by token, with the one that the same request had before the first
kill. `engine`: nothing but `ok`, for prompt and tokens so far go to another replica. `rank`: the
same, of engines of several ranks; a follower and a first rank are killed in turns. `ingress`:
answers that the killed one was writing are cut or fail, and say so. `controller`, `manager`:
nothing but `ok`. `database`: the manager and, at once, all processes of its PostgreSQL, which comes
back after 5 s; nothing but `ok`, with `--keys`.
`sigstop`: an engine's process stands still until Serve replaces it, or for a minute. `node`: all
processes of one of three Ray nodes are killed; `silent_node`: they stand still until Ray gives the
node up, as where the power or the network fails. Nothing but `ok`.

With `--keys` the requests have a key, and the use that the manager has recorded for it is compared
with the sums of what the clients received.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx

from registry.cache import Cache
from serve_app.cli.commands.store import open_registry
from serve_app.cli.demo.prepare import ADAPTER_NAMES, ADAPTERS_DIR, BASE_NAME
from serve_app.cli.registration import register_adapter
from serve_app.config import ADMIN_TOKEN
from tests.benchmarks import flips
from tests.benchmarks.chaos_faults import PROCESSES, num_engines, process_platform, wait
from tests.benchmarks.chaos_judge import VERDICTS
from tests.benchmarks.chaos_nodes import NODES, node_platform
from tests.benchmarks.children import module
from tests.benchmarks.keyed import TENANCY, admin_headers, make_key, recorded
from tests.benchmarks.report import Report, percentile, print_table
from tests.benchmarks.serve_base import BASE as TINY
from tests.demo_server import run_cli
from tests.ports import free_port
from tests.postgres import Postgres, binaries, running_postgres

NUM_ADAPTERS = 5
LEDGER_S = 30.0
COUNTERS = ("loraplex_requests_migrated", "loraplex_requests_lost", "loraplex_requests_quarantined")


def prepare_demo(home: Path) -> list[str]:
    """The demo's adapters and a louder copy."""
    os.environ["LORAPLEX_HOME"] = str(home)
    run_cli(home, "demo")
    registry, cache, names = open_registry(None), Cache(home / "cache"), list(ADAPTER_NAMES)
    for name in ADAPTER_NAMES[: NUM_ADAPTERS - len(ADAPTER_NAMES)]:
        folder = home / "made" / f"loud-{name}"
        names.append(folder.name)
        if folder.exists():  # of an earlier run
            continue
        shutil.copytree(ADAPTERS_DIR / name, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["lora_alpha"] *= 1.5
        (folder / "adapter_config.json").write_text(json.dumps(config))
        register_adapter(registry, folder, folder.name, BASE_NAME, cache=cache, probe="never")
    return [BASE_NAME, *(f"{BASE_NAME}:{name}" for name in names)]


def prepare_tiny(home: Path) -> list[str]:
    names = flips.prepare(home, None, NUM_ADAPTERS)
    return [TINY, *(f"{TINY}:{name}" for name in names)]


def arguments(args: argparse.Namespace, database: Postgres | None) -> dict[str, object]:
    """The application's."""
    engine = {
        "device": args.device,
        "dtype": "float32",
        "num_threads": 1,
        "max_model_len": 512,
        "kv_cache_bytes": "64MiB",
        "adapter_pool_bytes": "64MiB",
        "tensor_parallel_size": args.ranks,
    }
    model = {
        "name": BASE_NAME if args.base == "demo" else TINY,
        "replicas": args.replicas,
        "engine": engine,
    }
    found: dict[str, object] = {"ingress": {"replicas": args.ingresses}, "models": [model]}
    if not args.keys:
        return found
    url = {} if database is None else {"database_url": database.uri}
    return found | {"tenancy": TENANCY | url}


def prepare(home: Path, args: argparse.Namespace) -> list[str]:
    return prepare_demo(home) if args.base == "demo" else prepare_tiny(home)


class Judges:
    """The clients' process."""

    def __init__(self, port: int, wish: dict[str, object]) -> None:
        command = [*module("chaos_client"), str(port), json.dumps(wish)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"the clients ended with {self._process.wait()}")
        line: dict[str, object] = json.loads(text)
        return line

    def finish(self) -> dict[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write("enough\n")
        self._process.stdin.flush()
        line = self.read()
        self._process.wait()
        return line

    def kill(self) -> None:
        self._process.kill()


def counters(url: str) -> dict[str, float]:
    """Returns those of the ingress that answers; with several of them, a part."""
    text = httpx.get(f"{url}/metrics", headers=admin_headers(), timeout=30).text
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(COUNTERS) and "_total{" in line
    }


def ledger(url: str, key_id: str, received: dict[str, int]) -> dict[str, object]:
    """Returns the use that is recorded beside the use that the clients received. They are equal
    within a report's interval and the manager's start, unless a part was lost or counted twice."""
    deadline_s = time.monotonic() + LEDGER_S
    while True:
        found = recorded(url, key_id)
        sums = {name: int(found.get(name, 0)) for name in received}
        is_equal = sums == received
        if is_equal or time.monotonic() > deadline_s:
            return {"recorded": sums, "received": received, "is_equal": is_equal}
        time.sleep(0.5)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--home", type=Path, help="kept, with the demo of an earlier run")
    parser.add_argument("--target", choices=(*PROCESSES, *NODES), default="engine")
    parser.add_argument("--kills", type=int, help="10, or 1 of nodes: what takes over is elsewhere")
    parser.add_argument("--minutes", type=float, help="0.5 for each kill, or 1.5 of a node")
    parser.add_argument("--base", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--replicas", type=int, default=3, help="engines")
    parser.add_argument("--ranks", type=int, default=1, help="of an engine; the demo's divide by 3")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ingresses", type=int, help="1, or 2 where ingresses are killed")
    parser.add_argument("--haproxy", action="store_true", help="in front; not of nodes")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=48, help="the longest answer")
    parser.add_argument("--keys", action="store_true", help="requests need a key; see the ledger")
    parser.add_argument("--free", action="store_true", help="no answer has a constraint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.target == "database" and not (args.keys and binaries()):
        parser.error("--target database: needs --keys and Debian's package postgresql")
    if (args.target == "rank") != (args.ranks > 1):
        parser.error("--target rank and --ranks belong together")
    is_node = args.target in NODES
    if args.kills is None:
        args.kills = 1 if is_node else 10
    if args.minutes is None:
        args.minutes = args.kills * (1.5 if is_node else 0.5)
    if args.ingresses is None:
        args.ingresses = 2 if args.target in ("ingress", "controller") else 1
    return args


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("chaos", arguments=sys.argv[1:])
    os.environ.setdefault(ADMIN_TOKEN, secrets.token_hex())
    with ExitStack() as stack:
        home, port = args.home, free_port()
        if home is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = f"http://127.0.0.1:{port}"
        models = prepare(home, args)
        database: Postgres | None = None
        if args.target == "database":
            folder = binaries()
            assert folder is not None  # parse_args
            database = stack.enter_context(running_postgres(folder))
        start = partial(process_platform, database=database)
        if args.target in NODES:
            start = node_platform
        faults = stack.enter_context(start(args, arguments(args, database), home, port, report))
        wait(lambda: num_engines(url) == args.replicas)
        key_id, key = make_key(url) if args.keys else ("", "")
        wish = {
            "key": key,
            "is_free": args.free,
            "models": models,
            "tokens": args.tokens,
            "clients": args.clients,
            "can_chat": args.base == "demo",
        }
        judges = Judges(port, wish)
        try:
            report.emit(**judges.read())
            faults.run()
            result = judges.finish()
        finally:
            judges.kill()
        received = result.pop("received")
        if args.keys:
            assert isinstance(received, dict)
            report.emit(ledger=ledger(url, key_id, received))
        line = {
            "target": args.target,
            "kills": args.kills,
            "replicas": args.replicas,
            "ranks": args.ranks,
            "device": args.device,
            "ingresses": args.ingresses,
            "haproxy": args.haproxy,
            "replaced_s": [round(one, 2) for one in faults.replaced_s],
            "replaced_p50_s": round(percentile(faults.replaced_s, 50), 2),
            "load_average": os.getloadavg()[0],
            "counters": counters(url),
            **result,
        }
        report.emit(**line)
    names = ("submitted", *VERDICTS)
    print_table(("target", "kills", *names), [(args.target, args.kills, *(line[n] for n in names))])


if __name__ == "__main__":
    main()
