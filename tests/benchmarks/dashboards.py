"""Every panel of the dashboards has a sample: Prometheus scrapes the demo under load.

`python -m tests.benchmarks.dashboards` needs Debian's `prometheus` (2.42). It starts the demo with
two ingresses, asks every adapter again and again, and puts each expression of `deploy/grafana` to
Prometheus with its variables filled in. `--more FILE.json` adds dashboards of others, such as
vLLM's; their expressions without a sample are printed and fail nothing, because some ask for parts
that this server does not have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from serve_app.cli.demo.prepare import prepare
from tests.demo_server import ADAPTERS, BASE, ROOT, serving, write_config
from tests.ports import free_port

_INTERVAL_S = 5  # also the time limit of a scrape, which takes a busy machine over a second
_WINDOW = "30s"  # of rates
# Grafana's variables and those of the dashboards; others match everything.
_VARIABLES = {"__rate_interval": _WINDOW, "__range": _WINDOW, "__interval": _WINDOW}
_VARIABLE = re.compile(r"\$\{?(\w+)(?::\w+)?\}?")


def filled(expression: str) -> str:
    """Returns the expression as Grafana sends it while every variable means all."""
    return _VARIABLE.sub(lambda found: _VARIABLES.get(found[1], ".*"), expression)


def expressions(dashboard: Any) -> Iterator[tuple[str, str]]:
    """Yields the title of each panel and an expression, also of panels within rows."""
    for panel in dashboard.get("panels", ()):
        yield from expressions(panel)
        for target in panel.get("targets", ()):
            if target.get("expr"):
                yield panel.get("title", ""), target["expr"]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Scrapes `target` (host:port) with the rules of `deploy/`; the URL of Prometheus' API."""
    config = {
        "global": {"scrape_interval": f"{_INTERVAL_S}s", "evaluation_interval": "5s"},
        "rule_files": [str(ROOT / "deploy" / "prometheus" / "rules.yml")],
        "scrape_configs": [{"job_name": "loraplex", "static_configs": [{"targets": [target]}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(30)


def load(url: str, stop: threading.Event, statuses: Counter[int]) -> None:
    """Asks the base and every adapter in turn until `stop`."""
    models = [BASE, *(f"{BASE}:{name}" for name in ADAPTERS)]
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(1_000_000):
            if stop.is_set():
                return
            body = {
                "model": models[number % len(models)],
                "messages": [{"role": "user", "content": f"Tell me about number {number}."}],
                "max_tokens": 8,
                "stream": number % 2 == 0,
            }
            tenant = {"x-tenant-id": "gold"} if number % 2 else {}
            answer = client.post("/v1/chat/completions", json=body, headers=tenant)
            statuses[answer.status_code] += 1


def unanswered(api: str, found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the panels whose expression has no sample, or is refused."""
    empty = []
    for title, expression in found:
        query = {"query": filled(expression)}
        answer = httpx.get(f"{api}/query", params=query, timeout=30).json()
        if answer["status"] != "success" or not answer["data"]["result"]:
            empty.append((title, answer.get("error", expression)))
    return empty


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--more", nargs="*", type=Path, default=[], help="other dashboards")
    parser.add_argument("--home", type=Path, help="a home that `loraplex demo` has prepared")
    parser.add_argument("--seconds", type=float, default=40.0, help="of load before the queries")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("prometheus is not installed (Debian: apt-get install prometheus)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = options.home or folder / "home"
        os.environ["LORAPLEX_HOME"] = str(home)
        prepare(home)
        config = folder / "config.yaml"
        url = write_config(ROOT / "configs" / "quickstart.yaml", config, num_threads=1)
        content = yaml.safe_load(config.read_text())
        args = content["applications"][0]["args"]
        args["ingress"] = args.get("ingress", {}) | {"replicas": 2}
        args["fairness"] |= {"weights": {"gold": 2}}
        args["logging"] = {"requests": {"enabled": True}}
        config.write_text(yaml.safe_dump(content))
        with (
            serving(home, config, url),
            prometheus(folder, url.removeprefix("http://")) as api,
        ):
            return _ask(url, api, home, options)


def _ask(url: str, api: str, home: Path, options: argparse.Namespace) -> int:
    stop, statuses = threading.Event(), Counter[int]()
    threads = [threading.Thread(target=load, args=(url, stop, statuses)) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(options.seconds)
    own = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
    empty = []
    for path in (*own, *options.more):
        found = list(expressions(json.loads(path.read_text())))
        missing = unanswered(api, found)
        print(f"{path.name}: {len(found) - len(missing)} of {len(found)} expressions have samples")
        for title, why in missing:
            print(f"  {title}: {why}")
        empty += missing if path in own else []
    stop.set()
    for thread in threads:
        thread.join()
    lines = [
        json.loads(line)
        for path in sorted((home / "logs").glob("requests*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    print(f"answers by status: {dict(statuses)}; lines in the request log: {len(lines)}")
    if lines:
        print(json.dumps(lines[-1]))
    return 1 if empty or len(lines) != statuses.total() else 0


if __name__ == "__main__":
    sys.exit(main())
